// Machines that share nothing but a network, as network namespaces.
#pragma once

#include "tests/daemons.h"

namespace rejoin::test {

inline const std::string kEnter = "/usr/bin/nsenter", kUnshare = "/usr/bin/unshare";

// A network namespace; it lives as long as this.
class Host {
 public:
  explicit Host(const Scratch& scratch) : holder_({kUnshare, "-n", "/bin/sleep", "600"}, scratch.path + "/holder") {
    std::error_code error;
    const auto own = std::filesystem::read_symlink("/proc/self/ns/net", error);
    there_ = eventually(
        [&] {
          const auto its = std::filesystem::read_symlink(network(), error);
          return !error && its != own && read_file("/proc/" + std::to_string(holder_.pid()) + "/comm") == "sleep\n";
        },
        std::chrono::seconds(5));
  }
  bool there() const { return there_; }
  pid_t pid() const { return holder_.pid(); }
  std::string network() const { return "/proc/" + std::to_string(holder_.pid()) + "/ns/net"; }
  std::vector<std::string> inside(std::vector<std::string> command) const {
    command.insert(command.begin(), {kEnter, "--net=" + network(), "--"});
    return command;
  }
  Ended ip(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), "/usr/sbin/ip");
    return run(inside(arguments));
  }

 private:
  Process holder_;
  bool there_ = false;
};

}  // namespace rejoin::test
