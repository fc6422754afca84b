// GET /status (JSON) and GET /metrics (Prometheus) on a local HTTP port.
#pragma once

#include <asio.hpp>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "base/result.h"

namespace rejoin::daemon {

class StatusServer {
 public:
  static constexpr std::size_t kMostRequests = 64;  // at a time; others wait to be accepted
  using Source = std::function<nlohmann::json()>;   // called in the io_context's thread
  static Result<std::unique_ptr<StatusServer>> start(asio::io_context& io, const std::string& listen, Source source);
  std::string address() const { return address_; }

 private:
  StatusServer(asio::io_context& io, Source source) : acceptor_(io), again_(io), source_(std::move(source)) {}
  void accept();
  void on_ended();

  asio::ip::tcp::acceptor acceptor_;
  asio::steady_timer again_;  // to accept, when there was no descriptor
  std::size_t open_ = 0;      // requests
  Source source_;
  std::string address_;
};

// What a request is answered with, its headers included; whatever it is made of.
std::string answer_to(std::string_view request, const StatusServer::Source& source);

// The numbers of a status document as Prometheus metrics.
std::string metrics_text(const nlohmann::json& status);

}  // namespace rejoin::daemon
