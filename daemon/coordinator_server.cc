#include "daemon/coordinator_server.h"

#include <nlohmann/json.hpp>

#include "base/events.h"
#include "base/log.h"
#include "daemon/listen.h"
#include "membership/node.h"

namespace rejoin::daemon {

Result<std::unique_ptr<CoordinatorServer>> CoordinatorServer::start(asio::io_context& io, const std::string& listen,
                                                                    const std::string& log_directory,
                                                                    const membership::JobConfig& job,
                                                                    const JobKey& key) {
  auto log = membership::Log::open(log_directory);
  if (!log) return tl::unexpected(log.error());
  if (log->bytes_cut() > 0) spdlog::warn("decision log: a torn tail of {} bytes was cut off", log->bytes_cut());
  std::unique_ptr<CoordinatorServer> server(new CoordinatorServer(io, job, key, std::move(*log)));
  if (auto recovered = server->machine_.recover(server->log_.records(), server->now()); !recovered)
    return tl::unexpected(recovered.error());
  if (!server->log_.records().empty())
    spdlog::info("recovered from the log: step {} is committed, epoch {}", server->machine_.committed(),
                 server->machine_.epoch());

  auto address = listen_on(server->acceptor_, listen);
  if (!address)
    return fail(address.error().code,
                "the coordinator can't listen on {}: {}; choose another --listen address or stop what uses it", listen,
                address.error().message);
  server->address_ = *address;
  server->accept();
  server->carry_out({});
  server->tick();
  return server;
}

void CoordinatorServer::accept() {
  acceptor_.async_accept([this](asio::error_code error, asio::ip::tcp::socket socket) {
    if (error == asio::error::operation_aborted) return;
    if (!error) {
      auto connection = std::make_shared<Framed>(std::move(socket), key_, true);
      const membership::NodeId id(next_node_++);
      connection->start({.ready = [this, id, connection] { nodes_[id] = connection; },
                         .message =
                             [this, id, connection](std::string_view bytes) {
                               proto::FromNode message;
                               if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
                                 spdlog::warn("node {}: bytes that are no message; ignored", connection->remote());
                                 ++rejected_;
                                 return;
                               }
                               if (message.has_hello() && message.hello().protocol() != membership::kProtocolVersion) {
                                 spdlog::error("node {} speaks protocol {}, this coordinator {}; use one version",
                                               message.hello().node(), message.hello().protocol(),
                                               membership::kProtocolVersion);
                                 nodes_.erase(id);  // it was authenticated, so it is in the table
                                 return connection->close();
                               }
                               carry_out(machine_.on_message(id, message, now()));
                             },
                         .closed =
                             [this, id, remote = std::weak_ptr(connection)](const std::string& why) {
                               if (nodes_.erase(id) == 0) {
                                 ++rejected_;
                                 spdlog::warn("a connection was refused: {}", why);
                                 return;
                               }
                               spdlog::info("a node is gone: {}", why);
                               events::emit("node_lost", {{"why", why}});
                               carry_out(machine_.on_node_lost(id, now()));
                             }},
                        std::chrono::seconds(5));
    }
    accept();
  });
}

void CoordinatorServer::tick() {
  timer_.expires_after(std::chrono::duration_cast<std::chrono::milliseconds>(job_.silence / 16) +
                       std::chrono::milliseconds(1));
  timer_.async_wait([this](asio::error_code error) {
    if (error) return;
    carry_out(machine_.on_tick(now()));
    tick();
  });
}

void CoordinatorServer::carry_out(const membership::Actions& actions) {
  if (auto written = log_.append(actions.append); !written) {
    // Deciding without remembering could decide twice. Ranks wait; a restarted coordinator goes on from the log.
    spdlog::critical("{}; free space and start the coordinator again", written.error().message);
    std::_Exit(4);
  }
  for (const auto& record : actions.append) {
    if (record.has_committed())
      events::emit("commit", {{"step", record.committed().step()}, {"epoch", record.committed().epoch()}});
    if (record.has_epoch()) {
      std::string members;
      for (const auto& m : record.epoch().members())
        members += fmt::format("{}{}{}", members.empty() ? "" : ",", m.replica(), m.catching_up() ? "c" : "");
      events::emit("epoch", {{"epoch", record.epoch().epoch()},
                             {"step", record.epoch().step()},
                             {"members", members},
                             {"reason", record.epoch().reason()}});
    }
  }
  for (const auto& note : actions.notes) spdlog::info("{}", note);
  for (const auto& [node, message] : actions.send) {
    auto found = nodes_.find(node);
    if (found == nodes_.end()) continue;
    found->second->send(message.SerializeAsString());
    if (message.has_plan() && message.plan().finished()) events::emit("finished");
  }
  for (const auto& node : actions.close) {
    auto silent = nodes_.extract(node);
    if (silent.empty()) continue;
    events::emit("node_lost", {{"why", "it was silent"}});
    silent.mapped()->close();
  }
}

nlohmann::json CoordinatorServer::status() const {
  nlohmann::json json{{"epoch", machine_.epoch().value}, {"committed", machine_.committed().value},
                      {"finished", machine_.finished()}, {"nodes", nodes_.size()},
                      {"rejected", rejected_},           {"waiting_for", machine_.waiting_for(now())}};
  json["members"] = nlohmann::json::array();
  for (const auto& m : machine_.members())
    json["members"].push_back({{"replica", m.replica.value},
                               {"incarnation", m.incarnation.value},
                               {"role", m.catching_up ? "catching_up" : "contributor"},
                               {"exchanged", m.exchanged.size()}});
  json["registered"] = nlohmann::json::array();
  for (const auto& [id, replica] : machine_.replicas())
    json["registered"].push_back(
        {{"replica", id.value}, {"incarnation", replica.incarnation.value}, {"ranks", replica.ranks.size()}});
  return json;
}

}  // namespace rejoin::daemon
