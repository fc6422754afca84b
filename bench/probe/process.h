// A probe runs in a process of its own, with a time limit: one that hangs in a GPU's driver costs the others nothing.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"

namespace rejoin::bench {

// Runs it in another process: what it returns, or why it has not.
Result<std::string> text_of_a_process(Duration limit, const std::function<std::string()>& what);

// What a probe has measured, or why it has not.
struct Outcome {
  std::vector<double> values;
  std::string failure;
};

// A probe throws what has failed.
Outcome in_a_process(Duration limit, const std::function<std::vector<double>()>& probe);

template <typename T>
T must(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().message);
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

void pause(Duration time);

}  // namespace rejoin::bench
