#include "daemon/coordinator_server.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/entropy.h"
#include "base/events.h"
#include "base/fail.h"
#include "base/log.h"

namespace rejoin::daemon {

using membership::NodeId;

namespace {

// As events name them: 0,1,2c
void add_member(std::string& members, std::uint64_t replica, bool catching_up) {
  members += fmt::format("{}{}{}", members.empty() ? "" : ",", replica, catching_up ? "c" : "");
}

// By which a job's replicas and its log know each other.
membership::JobConfig with_id(membership::JobConfig job) {
  job.id = random_number() | 1;
  return job;
}

}  // namespace

CoordinatorServer::CoordinatorServer(asio::io_context& io, const membership::JobConfig& job, const JobKeys& keys,
                                     membership::Log log, std::uint64_t log_compact)
    : timer_(io),
      job_(with_id(job)),
      log_(std::move(log)),
      log_compact_(log_compact),
      machine_(job_),
      nodes_(
          io, keys, job_.silence,
          {.message = [this](NodeId node,
                             const proto::FromNode& message) { carry_out(machine_.on_message(node, message, now())); },
           .lost = [this](NodeId node) { carry_out(machine_.on_node_lost(node, now())); }}) {}

Result<std::unique_ptr<CoordinatorServer>> CoordinatorServer::start(asio::io_context& io, const std::string& listen,
                                                                    const std::string& log_directory,
                                                                    std::uint64_t log_compact,
                                                                    const membership::JobConfig& job,
                                                                    const JobKeys& keys) {
  auto log = membership::Log::open(log_directory);
  if (!log) return tl::unexpected(log.error());
  if (log->bytes_cut() > 0) spdlog::warn("decision log: a torn tail of {} bytes was cut off", log->bytes_cut());
  std::unique_ptr<CoordinatorServer> server(new CoordinatorServer(io, job, keys, std::move(*log), log_compact));
  if (auto recovered = server->machine_.recover(server->log_.records(), server->now()); !recovered)
    return tl::unexpected(recovered.error());
  const auto& machine = server->machine_;
  if (!server->log_.records().empty())
    spdlog::info("recovered from the log: step {} is committed, epoch {}", machine.committed(), machine.epoch());
  if (machine.started()) {  // the instance before may have been killed after it wrote it down, and before it emitted it
    std::string members;
    for (const auto& m : machine.members()) add_member(members, m.replica.value, m.catching_up);
    events::emit("recovered",
                 {{"epoch", machine.epoch().value}, {"step", machine.committed().value + 1}, {"members", members}});
  }

  server->log_.forget_records();
  if (auto listening = server->nodes_.listen(listen); !listening)
    return fail(listening.error().code,
                "the coordinator can't listen on {}: {}; choose another --listen address or stop what uses it", listen,
                listening.error().message);
  server->carry_out({});
  server->tick();
  return server;
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

namespace {

// Deciding without remembering could decide twice. Ranks wait; a restarted coordinator goes on from the log.
[[noreturn]] void end_of_deciding(const std::string& why) {
  spdlog::critical("{}", why);
  std::_Exit(4);
}

}  // namespace

void CoordinatorServer::carry_out(const membership::Actions& actions) {
  if (auto written = log_.append(actions.append); !written) {
    const bool gone = written.error().code == ErrorCode::not_found;
    end_of_deciding(written.error().message +
                    (gone ? ". The coordinator ends" : "; free space and start the coordinator again"));
  }
  if (log_.size() >= compact_at_ && !actions.append.empty()) compact_log();
  for (const auto& record : actions.append) {
    if (record.has_committed())
      events::emit("commit", {{"step", record.committed().step()}, {"epoch", record.committed().epoch()}});
    if (record.has_rolled_back())
      events::emit("rolled_back", {{"from", record.rolled_back().from()}, {"to", record.rolled_back().version()}});
    if (record.has_stopped()) {
      spdlog::critical("the job stops after step {}: {}", record.stopped().step(), record.stopped().reason());
      events::emit("stopped", {{"step", record.stopped().step()}, {"reason", record.stopped().reason()}});
    }
    if (record.has_epoch()) {
      std::string members;
      for (const auto& m : record.epoch().members()) add_member(members, m.replica(), m.catching_up());
      events::emit("epoch", {{"epoch", record.epoch().epoch()},
                             {"step", record.epoch().step()},
                             {"members", members},
                             {"reason", record.epoch().reason()}});
    }
  }
  for (const auto& note : actions.notes)
    spdlog::log(note.warning ? spdlog::level::warn : spdlog::level::info, "{}", note.text);
  for (const auto& [nodes, message] : actions.send) {
    const std::string bytes = message.SerializeAsString();
    for (auto node : nodes) nodes_.send(node, bytes);
    if (message.has_plan() && message.plan().finished()) events::emit("finished");
  }
  for (auto node : actions.close) nodes_.close(node);
}

// A snapshot is small beside a log that is due; where it is not, the log at least doubles until the next one.
void CoordinatorServer::compact_log() {
  const std::uint64_t before = log_.size();
  if (auto compacted = log_.compact(machine_.snapshot()); compacted)
    spdlog::info("the decision log is compacted after step {}, from {} to {}", machine_.committed(),
                 human_bytes(before), human_bytes(log_.size()));
  else if (log_.failed()) end_of_deciding(compacted.error().message + ". Start the coordinator again");
  else spdlog::warn("the decision log is not compacted, and goes on growing: {}", compacted.error().message);
  compact_at_ = std::max(log_compact_, 2 * log_.size());
}

nlohmann::json CoordinatorServer::status() const {
  nlohmann::json json{{"epoch", machine_.epoch().value},
                      {"committed", machine_.committed().value},
                      {"job", fmt::format("{:016x}", machine_.job())},
                      {"finished", machine_.finished()},
                      {"nodes", nodes_.nodes()},
                      {"rejected", nodes_.rejected()},
                      {"strangers", nodes_.strangers()},
                      {"waiting_for", machine_.waiting_for(now())}};
  const auto& audit = machine_.audit();
  json["audit"] = {{"period", audit.period()},
                   {"rounds", audit.counted().rounds},
                   {"result_differences", audit.counted().result_differences},
                   {"state_differences", audit.counted().state_differences},
                   {"drift_reports", audit.counted().drift_reports},
                   {"last_difference", audit.counted().last}};
  json["stopped"] = machine_.stopped().value_or("");
  json["members"] = nlohmann::json::array();
  for (const auto& m : machine_.members())
    json["members"].push_back({{"replica", m.replica.value},
                               {"incarnation", m.incarnation.value},
                               {"role", m.catching_up ? "catching_up" : "contributor"},
                               {"has_left", machine_.finished() && !machine_.replicas().contains(m.replica)},
                               {"reduced", m.reduced.size()}});
  json["suspended"] = nlohmann::json::array();
  for (const auto& out : machine_.suspended())
    json["suspended"].push_back({{"replica", out.replica.value}, {"reason", out.reason}});
  json["out"] = nlohmann::json::array();
  for (const auto& out : machine_.outages(now())) {
    json["out"].push_back({{"replica", out.replica.value}, {"reason", out.why}, {"next", out.next}});
    if (out.lasting) json["out"].back()["for_ms"] = static_cast<std::uint64_t>(milliseconds(*out.lasting));
  }
  json["alarms"] = machine_.alarms();
  json["refused"] = nlohmann::json::array();
  for (const auto& [replica, refused] : machine_.refused())
    json["refused"].push_back({{"replica", replica.value}, {"rank", refused.first}, {"reason", refused.second}});
  json["blocked_on"] = nlohmann::json::array();
  for (auto replica : machine_.blocked_on()) json["blocked_on"].push_back(replica.value);
  json["steps_rolled_back"] = machine_.steps_rolled_back();
  if (auto step = machine_.wants_roll_back()) json["wants_roll_back_to"] = step->value;
  json["registered"] = nlohmann::json::array();
  for (const auto& [id, replica] : machine_.replicas())
    json["registered"].push_back({{"replica", id.value},
                                  {"incarnation", replica.incarnation.value},
                                  {"ranks", replica.registered},
                                  {"caught_up", machine_.caught_up(replica)}});
  return json;
}

}  // namespace rejoin::daemon
