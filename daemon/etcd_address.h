// Where one of etcd's members is. gRPC is given addresses, and never asks for a name: its own resolvers ask for one
// name after the other, so that one without an answer holds up all members, or shut down sockets of others (c-ares).
#pragma once

#include <functional>
#include <string>

#include "base/result.h"
#include "daemon/resolver.h"

namespace rejoin::daemon::etcd_client {

class Address {
 public:
  Address(asio::io_context& io, const std::string& endpoint);  // HOST:PORT
  // For gRPC, as it was found last, e.g. "ipv4:10.0.0.1:2379,10.0.0.2:2379". Empty: its name has not been resolved yet.
  const std::string& target() const { return target_; }
  std::size_t count() const { return count_; }  // of addresses in it
  bool has_name() const { return has_name_; }
  // `done` is called later, with `unavailable` and the reason where the name is not resolved now, and never after this
  // is gone. Where a question is open, its answer is for whoever asked last.
  void ask(std::function<void(Result<>)> done);

 private:
  std::string host_, target_;
  std::uint16_t port_ = 0;
  std::size_t count_ = 0;
  bool has_name_ = false;
  Resolver resolver_;
};

}  // namespace rejoin::daemon::etcd_client
