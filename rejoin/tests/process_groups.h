// What tests do with several process groups of one program.
#pragma once

#include <future>
#include <memory>
#include <string>
#include <vector>

#include "rejoin/process_group.h"

namespace rejoin {

// All of them at once, with one another.
inline std::vector<Result<>> reconfigure(const std::vector<std::unique_ptr<ProcessGroup>>& groups, std::uint64_t number,
                                         Duration limit) {
  std::vector<std::string> handles;
  for (const auto& group : groups) handles.push_back(group->handle());
  std::vector<std::future<Result<>>> all;
  for (const auto& group : groups)
    all.push_back(std::async(std::launch::async, [&] { return group->reconfigure(number, handles, limit); }));
  std::vector<Result<>> results;
  for (auto& one : all) results.push_back(one.get());
  return results;
}

}  // namespace rejoin
