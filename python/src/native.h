// What the binding's files have alike: memory as addresses, errors as Python's.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <utility>

#include "rejoin/c.h"

namespace nb = nanobind;

namespace rejoin::python {

using Memory = std::pair<std::uintptr_t, std::uint64_t>;  // address, bytes

inline nb::object& make_error() {
  static nb::object* make = new nb::object;  // outlives the interpreter's last calls
  return *make;
}

[[noreturn]] inline void raise(rejoin_code code, const std::string& message) {
  const nb::object error = make_error()(static_cast<int>(code), message);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}
inline void check(rejoin_code code) {
  if (code != REJOIN_OK) raise(code, rejoin_error());
}

void bind_checkpoints(nb::module_& m);  // checkpoint.cc

}  // namespace rejoin::python
