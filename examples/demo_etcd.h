// An etcd cluster of the demo's own on this machine: killed, stopped, and started again on its data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"

namespace rejoin::demo {

class Etcd {
 public:
  static constexpr std::size_t kMembers = 3;
  // Whether this machine has etcd; `not_found` names the package that has it.
  static Result<> check();

  // Data and output are in `directory`.
  explicit Etcd(std::string directory) : directory_(std::move(directory)) {}
  ~Etcd();
  Etcd(const Etcd&) = delete;

  Result<> start();  // all members; they answer when this returns
  std::string endpoints() const;
  static std::string name(std::size_t member);

  std::optional<std::size_t> leader() const;  // as they say now
  void signal(std::size_t member, int signal);
  void kill(std::size_t member);  // -9
  Result<> restart(std::size_t member);
  std::optional<std::size_t> find(int pid) const;  // which member that process is, if it is one

 private:
  struct Member {
    std::string client, peer;  // HOST:PORT
    int pid = 0;
  };
  bool healthy(std::size_t member) const;

  const std::string directory_;
  std::string cluster_;
  std::vector<Member> members_;
};

}  // namespace rejoin::demo
