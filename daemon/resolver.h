// Finds the addresses of a host. Nothing ends a question to a name server that does not answer: each is asked on a
// thread of its own, so that no other host's waits behind it, and who has asked can go. All calls, and the answers, are
// in the io_context's thread.
#pragma once

#include <asio.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"

namespace rejoin::daemon {

class Resolver {
 public:
  using Endpoints = std::vector<asio::ip::tcp::endpoint>;
  using Answer = std::function<void(Result<Endpoints>)>;  // at least one, or `unavailable` with the reason
  explicit Resolver(asio::io_context& io) : io_(io) {}
  ~Resolver();  // no answer comes after it; the thread is left to itself
  Resolver(const Resolver&) = delete;
  // Of the same host each time. While a question is open no other is asked: its answer is for whoever asked last.
  void ask(const std::string& host, std::uint16_t port, Answer answer);

 private:
  struct Question;
  asio::io_context& io_;
  std::shared_ptr<Question> open_;
};

}  // namespace rejoin::daemon
