#include "daemon/coordinator_server.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/deadlines.h"
#include "base/entropy.h"
#include "base/events.h"
#include "base/fail.h"
#include "base/log.h"
#include "daemon/log_copy.h"
#include "daemon/log_notes.h"

namespace rejoin::daemon {

using membership::NodeId;

namespace {

// By which a job's replicas and its log know each other.
membership::JobConfig with_id(membership::JobConfig job) {
  job.id = random_number() | 1;
  return job;
}

// The log names itself, and what is wrong; where that is its disk, this is what to do.
const char* remedy_for(ErrorCode code, const char* otherwise) {
  return code == ErrorCode::exhausted ? "; free space and start the coordinator again" : otherwise;
}

// Where somebody has cut or removed the log a supervisor is not to start the coordinator again: it would go on from
// what is left, or begin another log in the place where an operator is to put the copy.
int exit_status_for(ErrorCode code) { return code == ErrorCode::corrupt || code == ErrorCode::not_found ? 2 : 4; }

bool is_of_several(const proto::LogRecord& record) { return record.has_led() || record.snapshot().position() != 0; }

}  // namespace

CoordinatorServer::CoordinatorServer(asio::io_context& io, const membership::JobConfig& job, const JobKeys& keys,
                                     membership::Log log, const LogOptions& options)
    : timer_(io),
      job_(with_id(job)),
      log_(std::move(log)),
      log_compact_(options.compact),
      log_archives_(options.archives),
      machine_(job_),
      nodes_(io, keys, job_.silence,
             {.message =
                  [this](NodeId node, const proto::FromNode& message) {
                    if (message.has_report()) return history_.on_report(message.report(), now());
                    carry_out(machine_.on_message(node, message, now()));
                  },
              .lost = [this](NodeId node) { carry_out(machine_.on_node_lost(node, now())); }}) {}

Result<std::unique_ptr<CoordinatorServer>> CoordinatorServer::start(asio::io_context& io, const std::string& listen,
                                                                    const LogOptions& options,
                                                                    const membership::JobConfig& job,
                                                                    const JobKeys& keys) {
  auto log = membership::Log::open(options.directory);
  if (!log) return fail(log.error().code, "{}{}", log.error().message, remedy_for(log.error().code, ""));
  if (log->bytes_cut() > 0) spdlog::warn("decision log: a torn tail of {} bytes was cut off", log->bytes_cut());
  std::unique_ptr<CoordinatorServer> server(new CoordinatorServer(io, job, keys, std::move(*log), options));
  if (auto recovered = server->machine_.recover(server->log_.records(), server->now()); !recovered)
    return tl::unexpected(recovered.error());
  const auto& machine = server->machine_;
  if (server->log_.records().empty() && job.roll_back_to)
    spdlog::warn("--roll-back-to {}: the log in {} has no decision; is it the job's --log-directory?",
                 job.roll_back_to->text(), options.directory);
  if (!server->log_.records().empty())
    spdlog::info("recovered from the log: step {} is committed, epoch {}", machine.committed(), machine.epoch());
  if (std::ranges::any_of(server->log_.records(), is_of_several))
    spdlog::warn(
        "this log is a copy of decisions that several coordinators have shared: where any of them still leads, there "
        "are two jobs from here on. --store says where they share them");
  emit_recovered(machine);
  server->history_.on_records(server->log_.records(), {});
  server->history_.on_lead(server->now());
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
  timer_.expires_after(deadlines::tick_of(job_.silence));
  timer_.async_wait([this](asio::error_code error) {
    if (error) return;
    carry_out(machine_.on_tick(now()));
    versions_.look_at(machine_, now());
    tick();
  });
}

void CoordinatorServer::carry_out(const membership::Actions& actions) {
  const TimePoint begun = now();
  if (auto written = log_.append(actions.append); !written) {
    const auto code = written.error().code;  // of the disk, or of the file, and then the error says what to do
    const char* remedy = remedy_for(code, ". The coordinator ends");
    if (code == ErrorCode::io)
      remedy = "; see to the disk (dmesg tells of it), copy the log directory, and start the coordinator again";
    end_of_deciding(written.error().message + remedy, exit_status_for(code));
  }
  if (!actions.append.empty()) {
    const TimePoint ended = now();
    const Duration taken = ended - begun;
    written_.add(taken);
    history_.on_append(taken);
    history_.on_records(actions.append, ended);
    events::record(events::Kind::appended, {.number = static_cast<std::uint32_t>(actions.append.size()),
                                            .a = static_cast<std::uint64_t>(taken.count())});
  }
  if (log_.size() >= compact_at_ && !actions.append.empty()) compact_log();
  emit_events(actions.append);
  log_notes(actions.notes);
  send_all(nodes_, actions.send, actions.close, page_);
}

// A snapshot is small beside a log that is due; where it is not, the log at least doubles until the next one.
void CoordinatorServer::compact_log() {
  const std::uint64_t before = log_.size();
  if (auto compacted = log_.compact(machine_.snapshot()); compacted) {
    spdlog::info("the decision log is compacted after step {}, from {} to {}", machine_.committed(),
                 human_bytes(before), human_bytes(log_.size()));
    remove_archives(log_, log_archives_);
  } else if (log_.failed())
    end_of_deciding(compacted.error().message + ". Start the coordinator again",
                    exit_status_for(compacted.error().code));
  else
    spdlog::warn(
        "the decision log is not compacted, and goes on growing: {}. Where its disk is full, archives beside it "
        "(decisions.N.log) may be moved away",
        compacted.error().message);
  compact_at_ = std::max(log_compact_, 2 * log_.size());
}

nlohmann::json CoordinatorServer::status() const {
  nlohmann::json json = status_of(machine_, nodes_, now());
  json["stragglers"] = stragglers_of(machine_, history_, now());
  for (auto& line : unreached_of(machine_, history_, now())) json["alarms"].push_back(std::move(line));
  json["store"] = {{"kind", "file"}, {"leads", true}, {"write_us", status_of(written_)}};
  return json;
}

}  // namespace rejoin::daemon
