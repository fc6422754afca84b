#include "daemon/resolver.h"

#include <netdb.h>

#include <cstring>
#include <mutex>

#include "base/fail.h"
#include "base/start_thread.h"

namespace rejoin::daemon {

namespace {

Result<Resolver::Endpoints> endpoints_of(const std::string& host, const std::string& port) {
  addrinfo hints{}, *all = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  if (const int error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &all); error != 0)
    return fail(ErrorCode::unavailable, "its name is not resolved: {}", ::gai_strerror(error));
  Resolver::Endpoints endpoints;
  for (const auto* one = all; one != nullptr; one = one->ai_next) {
    asio::ip::tcp::endpoint endpoint;
    if (one->ai_addrlen > endpoint.capacity()) continue;
    endpoint.resize(one->ai_addrlen);
    std::memcpy(endpoint.data(), one->ai_addr, one->ai_addrlen);
    endpoints.push_back(endpoint);
  }
  ::freeaddrinfo(all);
  if (endpoints.empty()) return fail(ErrorCode::unavailable, "its name has no address");
  return endpoints;
}

}  // namespace

// The io_context's thread alone writes it, with the lock, under which the asking thread finds the io_context alive.
struct Resolver::Question {
  std::mutex mutex;
  Resolver* asker;
  Answer answer;
  // In the io_context's thread.
  void end(Result<Endpoints> found) {
    if (asker == nullptr) return;
    asker->open_.reset();
    answer(std::move(found));
  }
};

Resolver::~Resolver() {
  if (!open_) return;
  const std::lock_guard lock(open_->mutex);
  open_->asker = nullptr;
  open_->answer = nullptr;  // what it holds is of the io_context, which may end before the question does
}

void Resolver::ask(const std::string& host, std::uint16_t port, Answer answer) {
  if (open_) {
    open_->answer = std::move(answer);
    return;
  }
  open_ = std::make_shared<Question>();
  open_->asker = this;
  open_->answer = std::move(answer);
  std::thread asking;
  auto started = start_thread(asking, [question = open_, host, port = std::to_string(port)] {
    auto found = endpoints_of(host, port);
    const std::lock_guard lock(question->mutex);
    if (question->asker == nullptr) return;
    asio::post(question->asker->io_, [question, found = std::move(found)] { question->end(found); });
  });
  if (started) return asking.detach();
  // Not within this call: who asks is not ready for an answer.
  asio::post(io_, [question = open_, failed = started.error()] { question->end(tl::unexpected(failed)); });
}

}  // namespace rejoin::daemon
