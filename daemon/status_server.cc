#include "daemon/status_server.h"

#include <fmt/format.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "base/bytes.h"
#include "base/fail.h"
#include "daemon/listen.h"

namespace rejoin::daemon {

namespace {

constexpr std::size_t kMaxRequest = 8 * KiB;

// One request, one answer, closed.
class Request : public std::enable_shared_from_this<Request> {
 public:
  // `ended` is called once.
  Request(asio::ip::tcp::socket socket, const StatusServer::Source& source, std::function<void()> ended)
      : socket_(std::move(socket)),
        timer_(socket_.get_executor()),
        source_(source),
        ended_(std::move(ended)),
        buffer_(kMaxRequest) {}

  void start() {
    timer_.expires_after(std::chrono::seconds(5));
    timer_.async_wait([self = shared_from_this()](asio::error_code error) {
      asio::error_code ignored;
      if (!error) self->socket_.close(ignored);
    });
    asio::async_read_until(
        socket_, buffer_, "\r\n\r\n", [self = shared_from_this()](asio::error_code error, std::size_t) {
          const auto bytes = self->buffer_.data();
          self->answer(answer_to(
              error ? std::string_view() : std::string_view(static_cast<const char*>(bytes.data()), bytes.size()),
              self->source_));
        });
  }

 private:
  void answer(std::string reply) {
    reply_ = std::move(reply);
    asio::async_write(socket_, asio::buffer(reply_), [self = shared_from_this()](asio::error_code, std::size_t) {
      asio::error_code ignored;
      self->socket_.shutdown(asio::ip::tcp::socket::shutdown_both, ignored);
      self->timer_.cancel();
      self->socket_.close(ignored);
      self->ended_();
    });
  }

  asio::ip::tcp::socket socket_;
  asio::steady_timer timer_;
  const StatusServer::Source& source_;
  const std::function<void()> ended_;
  asio::streambuf buffer_;
  std::string reply_;
};

}  // namespace

Result<std::unique_ptr<StatusServer>> StatusServer::start(asio::io_context& io, const std::string& listen,
                                                          Source source) {
  std::unique_ptr<StatusServer> server(new StatusServer(io, std::move(source)));
  auto address = listen_on(server->acceptor_, listen);
  if (!address)
    return fail(address.error().code, "status on {}: {}; choose another --status address or port 0", listen,
                address.error().message);
  server->address_ = *address;
  server->accept();
  return server;
}

void StatusServer::accept() {
  acceptor_.async_accept([this](asio::error_code error, asio::ip::tcp::socket socket) {
    if (error == asio::error::operation_aborted) return;
    if (without_descriptors(error)) {
      again_.expires_after(kWithoutDescriptors);
      return again_.async_wait([this](asio::error_code cancelled) {
        if (!cancelled) accept();
      });
    }
    if (!error) {
      ++open_;
      std::make_shared<Request>(std::move(socket), source_, [this] { on_ended(); })->start();
    }
    if (open_ < kMostRequests) accept();
  });
}

void StatusServer::on_ended() {
  if (open_-- == kMostRequests) accept();
}

std::string answer_to(std::string_view request, const StatusServer::Source& source) {
  const auto reply = [](int code, const char* type, const std::string& body) {
    return fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}", code,
                       code == 200 ? "OK" : "Error", type, body.size(), body);
  };
  // METHOD PATH VERSION, the path up to a query.
  const std::string_view line = request.substr(0, request.find("\r\n"));
  const auto first = line.find(' '), second = line.find(' ', first == line.npos ? first : first + 1);
  if (first == line.npos || second == line.npos || !line.substr(second + 1).starts_with("HTTP/"))
    return reply(400, "text/plain", "not an HTTP request\n");
  if (line.substr(0, first) != "GET") return reply(405, "text/plain", "only GET\n");
  std::string_view path = line.substr(first + 1, second - first - 1);
  path = path.substr(0, path.find('?'));
  if (path == "/status") return reply(200, "application/json", source().dump(2) + "\n");
  if (path == "/metrics") return reply(200, "text/plain; version=0.0.4", metrics_text(source()));
  return reply(404, "text/plain", "here are /status and /metrics\n");
}

std::string metrics_text(const nlohmann::json& status) {
  prometheus::Registry registry;
  const auto gauge = [&](const std::string& name, const std::string& help,
                         const std::map<std::string, std::string>& labels, double value) {
    prometheus::BuildGauge().Name("rejoin_" + name).Help(help).Register(registry).Add(labels).Set(value);
  };
  const auto number = [&](const nlohmann::json& at, const char* key, const std::string& name, const std::string& help,
                          const std::map<std::string, std::string>& labels = {}) {
    if (!at.contains(key)) return;
    const auto& value = at.at(key);
    if (value.is_number()) gauge(name, help, labels, value.get<double>());
    if (value.is_boolean()) gauge(name, help, labels, value.get<bool>() ? 1 : 0);
  };
  if (status.contains("coordinator_role")) {
    const auto& c = status.at("coordinator_role");
    number(c, "epoch", "epoch", "current epoch");
    number(c, "committed", "committed_step", "last committed step");
    number(c, "nodes", "nodes", "connected daemons");
    number(c, "steps_rolled_back", "steps_rolled_back_total", "committed steps that an operator gave up");
    gauge("blocked_on_replicas", "silent replicas that the job waits for: nobody else has the last committed step", {},
          static_cast<double>(c.value("blocked_on", nlohmann::json::array()).size()));
    gauge("wants_roll_back", "1: the job waits for an operator's word to go on from an older checkpoint", {},
          c.contains("wants_roll_back_to"));
    number(c, "rejected", "rejected_connections", "connections and messages refused");
    number(c, "strangers", "control_strangers", "control connections that have not proven the job key yet");
    const auto& audit = c.at("audit");
    number(audit, "period", "audit_period_steps", "steps in which all of the replicas' states are compared");
    number(audit, "rounds", "audit_rounds", "times that all of the state has been compared");
    number(audit, "result_differences", "result_differences",
           "steps repeated because replicas reduced other gradients");
    number(audit, "state_differences", "state_differences", "steps repeated because replicas' states differed");
    number(audit, "drift_reports", "drift_reports", "slices that a joiner's sources differed in");
    const auto& store = c.at("store");
    number(store, "leads", "leads", "1: this coordinator decides; 0: another one does");
    number(store, "term", "leader_term", "how often coordinators have taken the lead");
    number(store, "stalled", "store_stalled", "1: the store does not take what is decided");
    number(store, "failing_ms", "store_failing_ms", "since when the store has not answered; 0: it does");
    const auto& writes = store.at("write_us");
    const std::string help = "how long it took to keep what was decided: ";
    const auto micro = [&](const char* which) { return writes.at(which).get<double>() * 1e-6; };
    gauge("store_write_last_seconds", help + "the last time", {}, micro("last"));
    gauge("store_write_mean_seconds", help + "on average", {}, micro("mean"));
    gauge("store_write_longest_seconds", help + "at most", {}, micro("longest"));
    gauge("store_copy_given_up", "1: the copy of the decisions on this disk is not kept any more", {},
          store.value("copy", "") != "");
    gauge("stopped", "1: replicas differ and an operator must say which is wrong", {}, c.at("stopped") != "");
    for (const auto& m : c.at("members"))
      gauge("contributor", "1: the replica contributes; 0: it is catching up",
            {{"replica", std::to_string(m.at("replica").get<int>())}}, m.at("role") == "contributor");
  }
  if (status.contains("relay_role")) {
    const auto& r = status.at("relay_role");
    number(r, "nodes", "relay_nodes", "daemons connected to this relay");
    number(r, "ranks", "relay_ranks", "ranks that have registered through it");
    number(r, "rejected", "relay_rejected", "connections and messages it refused");
    number(r, "strangers", "relay_strangers", "connections to it that have not proven the job key yet");
    number(r.at("coordinator"), "connected", "relay_coordinator_connected", "1: connected with the coordinator");
  }
  if (status.contains("node_role")) {
    const auto& n = status.at("node_role");
    number(n, "bytes_served", "catch_up_bytes_served", "state bytes sent to joiners");
    number(n, "rejected", "rejected_messages", "local connections and messages refused");
    number(n.at("coordinator"), "connected", "coordinator_connected", "1: connected with the coordinator");
    for (const auto& rank : n.at("ranks")) {
      const std::map<std::string, std::string> labels{{"replica", std::to_string(rank.at("replica").get<int>())},
                                                      {"rank", std::to_string(rank.at("rank").get<int>())}};
      number(rank, "silent_ms", "rank_silent_ms", "since the last sign of life", labels);
      if (rank.contains("catch_up")) {
        number(rank.at("catch_up"), "bytes", "catch_up_bytes", "state bytes in place", labels);
        number(rank.at("catch_up"), "total_bytes", "catch_up_total_bytes", "state bytes of the rank", labels);
      }
    }
  }
  return prometheus::TextSerializer().Serialize(registry.Collect());
}

}  // namespace rejoin::daemon
