// What a daemon answers over HTTP: the page, and what it is made of. Everything is read-only.
#pragma once

#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "daemon/job_history.h"
#include "daemon/status_server.h"

namespace rejoin::daemon {

class StatusPages {
 public:
  struct Sources {
    std::function<nlohmann::json()> status;
    std::function<const JobHistory*()> history = [] { return nullptr; };  // of a coordinator
    std::function<TimePoint()> now = [] { return SteadyClock().now(); };
  };
  explicit StatusPages(Sources sources) : sources_(std::move(sources)) {}
  StatusServer::Answer answer(const std::string& path);

 private:
  // Many callers at a time are told the same: what a document costs does not grow with them.
  static constexpr Duration kKeepFor = std::chrono::milliseconds(200);
  StatusServer::Answer made_lately(const std::string& path, const char* type,
                                   const std::function<std::string(const nlohmann::json&)>& make);

  const Sources sources_;
  struct Made {
    std::shared_ptr<const std::string> body;
    TimePoint at{};
  };
  std::map<std::string, Made> made_;
};

// What keeps this process from its work, a line each; none: it is ready.
std::vector<std::string> not_ready(const nlohmann::json& status);

}  // namespace rejoin::daemon
