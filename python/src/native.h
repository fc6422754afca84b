// What the binding's files have alike: memory as addresses, errors as Python's.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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

// What the library has opened, shared by the calls under way on it: close() may come from another thread, and what was
// opened ends with the last of them.
template <typename T>
class Opened {
 public:
  explicit Opened(const char* closed) : closed_(closed) {}
  Opened(const Opened&) = delete;
  ~Opened() { close(); }

  void set(T* opened, void (*end)(T*)) { opened_.reset(opened, end); }
  std::shared_ptr<T> get() const {
    if (opened_ == nullptr) raise(REJOIN_UNAVAILABLE, closed_);
    return opened_;
  }
  void close() {
    if (opened_ == nullptr) return;
    auto opened = std::exchange(opened_, nullptr);
    const nb::gil_scoped_release release;
    opened.reset();
  }

 private:
  const char* const closed_;
  std::shared_ptr<T> opened_;
};

inline std::vector<rejoin_memory> memory_of(const std::vector<Memory>& buffers) {
  std::vector<rejoin_memory> all;
  all.reserve(buffers.size());
  for (const auto& [address, bytes] : buffers) all.push_back({reinterpret_cast<void*>(address), bytes});
  return all;
}

// Calls that may wait. What a signal's handler or look() raises ends the call and is raised by it.
class Signals {
 public:
  // Within such a call, whose thread has not the interpreter's lock: whether a handler has raised something.
  bool heard() {
    const nb::gil_scoped_acquire acquire;
    if (raised_) return true;
    try {
      if (PyErr_CheckSignals() != 0) raised_.emplace();
      else if (look.is_valid()) look();
    } catch (nb::python_error& error) {
      raised_.emplace(std::move(error));
    }
    return raised_.has_value();
  }
  nb::object look;  // called then, too; it must not keep the session alive, which Python's collector could not see
  static int ask(void* self) { return static_cast<Signals*>(self)->heard() ? 1 : 0; }  // for C

  template <typename Call>
  void waiting(const Call& call) {
    rejoin_code code = REJOIN_OK;
    {
      const nb::gil_scoped_release release;
      code = call();
    }
    if (raised_) {
      nb::python_error error = std::move(*raised_);
      raised_.reset();
      throw std::move(error);
    }
    check(code);
  }

 private:
  std::optional<nb::python_error> raised_;
};

void bind_checkpoints(nb::module_& m);     // checkpoint.cc
void bind_process_groups(nb::module_& m);  // process_group.cc

}  // namespace rejoin::python
