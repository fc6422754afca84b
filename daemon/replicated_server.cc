#include "daemon/replicated_server.h"

#include <nlohmann/json.hpp>

#include "base/deadlines.h"
#include "base/entropy.h"
#include "base/events.h"
#include "base/fail.h"
#include "base/log.h"
#include "daemon/log_notes.h"

namespace rejoin::daemon {

using membership::NodeId;

namespace {

std::uint64_t ms_since_1970() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count());
}

}  // namespace

ReplicatedServer::ReplicatedServer(asio::io_context& io, Options options, std::unique_ptr<membership::Store> store,
                                   LogCopy::Handle copy, const JobKeys& keys)
    : timer_(io),
      options_(std::move(options)),
      copy_(std::move(copy)),
      nodes_(io, keys, options_.job.silence,
             {.message =
                  [this](NodeId node, const proto::FromNode& message) {
                    if (message.has_report()) return history_.on_report(message.report(), now());
                    carry_out(machine_->on_message(node, message, now()));
                  },
              .lost = [this](NodeId node) { carry_out(machine_->on_node_lost(node, now())); }}),
      store_(std::move(store)) {}

ReplicatedServer::~ReplicatedServer() { *lives_ = false; }

Result<std::unique_ptr<ReplicatedServer>> ReplicatedServer::start(asio::io_context& io, Options options,
                                                                  std::unique_ptr<membership::Store> store,
                                                                  const JobKeys& keys) {
  auto copy = LogCopy::open(options.log_directory, options.disk);
  if (!copy) return tl::unexpected(copy.error());
  (*copy)->keep_archives(options.log_archives);
  auto landmark = membership::ReplicatedCoordinator::landmark_of((*copy)->take_records(), options.job);
  if (!landmark)
    return fail(landmark.error().code,
                "{}/decisions.log, this coordinator's copy of the decisions, contradicts itself ({}): move it away, or "
                "start with another --log-directory",
                options.log_directory, landmark.error().message);
  std::unique_ptr<ReplicatedServer> server(
      new ReplicatedServer(io, std::move(options), std::move(store), std::move(*copy), keys));
  const Options& given = server->options_;
  if (auto listening = server->nodes_.listen(given.listen); !listening)
    return fail(listening.error().code,
                "the coordinator can't listen on {}: {}; choose another --listen address or stop what uses it",
                given.listen, listening.error().message);
  membership::ReplicatedCoordinator::Options of_machine{.job = given.job,
                                                        .name = given.name,
                                                        .address = given.advertised(server->nodes_.address()),
                                                        .instance = random_number() | 1,
                                                        .started_ms = ms_since_1970(),
                                                        .per_snapshot = given.per_snapshot,
                                                        .copied = server->copy_->position(),
                                                        .copied_job = server->copy_->job(),
                                                        .copied_landmark = std::move(*landmark),
                                                        .copy_unread = server->copy_->unread(),
                                                        .keys = keys.store_marks()};
  of_machine.job.id = random_number() | 1;  // where the job has none yet
  server->machine_ = std::make_unique<membership::ReplicatedCoordinator>(std::move(of_machine), server->now());
  server->carry_out(server->machine_->on_tick(server->now()));
  server->tick();
  return server;
}

void ReplicatedServer::tick() {
  timer_.expires_after(deadlines::tick_of(options_.job.silence));
  timer_.async_wait([this, lives = lives_](asio::error_code error) {
    if (error || !*lives || failed_) return;
    carry_out(machine_->on_tick(now()));
    if (machine_->leading() != nullptr) versions_.look_at(*machine_->leading(), now());
    tick();
  });
}

void ReplicatedServer::carry_out(membership::ReplicatedCoordinator::Actions actions) {
  if (failed_) return;
  log_notes(actions.notes);
  if (actions.failed) {
    failed_ = true;
    if (options_.failed) return options_.failed(*actions.failed);
    end_of_deciding(actions.failed->message, actions.failed->code == ErrorCode::invalid_argument ? 2 : 4);
  }
  if (actions.request)
    store_->submit(*actions.request,
                   [this](const membership::StoreAnswer& answer) { carry_out(machine_->on_answer(answer, now())); });
  if (actions.copy_from) copy_->begin_with(*actions.copy_from);
  copy_->add(actions.copy);
  compact_copy();
  // What comes while it does not lead, it has read: whoever wrote it down has told of it.
  if (leads_) emit_events(actions.copy);
  remember(actions);
  tell_of_lead();
  send_all(nodes_, actions.send, actions.close, page_);
}

void ReplicatedServer::remember(const membership::ReplicatedCoordinator::Actions& actions) {
  if (actions.copy_from) history_.on_records({*actions.copy_from}, {});
  history_.on_records(actions.copy, leads_ ? std::optional(now()) : std::nullopt);
  const auto& latency = machine_->latency();
  if (std::exchange(writes_, latency.count) != latency.count) history_.on_append(latency.last);
}

// What was in it stays beside it. A snapshot is small beside a copy that is due; where it is not, or can't take the
// copy's place, the copy at least doubles until the next one.
void ReplicatedServer::compact_copy() {
  const std::uint64_t size = copy_->size();
  if (size < compact_at_) compacting_ = 0;
  if (size < compact_at_ || size < 2 * compacting_) return;
  const auto snapshot = machine_->snapshot();
  if (!snapshot) return;  // at another time
  copy_->compact(*snapshot);
  compacting_ = size;
  compact_at_ = std::max(options_.log_compact, 2 * std::uint64_t{snapshot->ByteSizeLong()});
}

void ReplicatedServer::tell_of_lead() {
  const bool leads = machine_->leading() != nullptr;
  if (std::exchange(leads_, leads) == leads) return;
  events::record(leads ? events::Kind::leader : events::Kind::standby, {.a = machine_->leader().term()});
  if (!leads) return history_.on_standby(now(), !machine_->following().finished());
  emit_recovered(*machine_->leading());
  history_.on_lead(now());
}

nlohmann::json ReplicatedServer::status() const {
  const bool leads = machine_->leading() != nullptr;
  nlohmann::json json = status_of(leads ? *machine_->leading() : machine_->following(), nodes_, now());
  if (!leads)  // nobody registers with a standby: it waits for nobody, and knows of nothing that is not as it should be
    for (const char* of_leader : {"waiting_for", "alarms", "refused", "blocked_on", "registered"})
      json[of_leader] = nlohmann::json::array();
  if (!leads)
    for (const char* of_leader : {"wants_roll_back_to", "roll_back_word", "wants_log", "versions"})
      json.erase(of_leader);
  for (auto& out : json["out"])
    if (!leads) out["next"] = "";  // as far as a standby knows
  if (const auto word = machine_->unheeded_word(); !word.empty()) json["alarms"].push_back(word);
  if (auto line = machine_->other_steps(); !line.empty()) json["alarms"].push_back(std::move(line));
  const std::string given_up = copy_->given_up();
  if (!given_up.empty())
    json["alarms"].push_back(
        fmt::format("the copy of the decisions in {} is given up: {}", options_.log_directory, given_up));
  if (const auto& why = machine_->snapshot_failed(); !why.empty())
    json["alarms"].push_back(fmt::format("the store takes no snapshot, so that its log grows: {}", why));
  if (const auto& line = machine_->set_back_under_it(); !line.empty()) json["alarms"].push_back(line);
  if (auto line = machine_->of_another_job(); !line.empty()) json["alarms"].push_back(std::move(line));
  if (leads)
    for (auto& line : unreached_of(*machine_->leading(), history_, now())) json["alarms"].push_back(std::move(line));
  json["stragglers"] = leads ? stragglers_of(*machine_->leading(), history_, now()) : nlohmann::json::array();
  const auto& leader = machine_->leader();
  auto failing = machine_->failing();
  if (const auto overdue = store_->overdue(); overdue && !failing)
    failing = {.why = overdue->why, .since = overdue->since};
  json["store"] = {{"kind", options_.kind},
                   {"endpoints", options_.endpoints},
                   {"leads", leads},
                   {"term", leader.term()},
                   {"leader",
                    {{"name", leader.name()},
                     {"address", leader.address()},
                     {"since_ms", leader.since_ms()},
                     {"for_ms", static_cast<std::uint64_t>(milliseconds(machine_->led_for(now())))}}},
                   {"position", machine_->position()},
                   {"no_sign_ms", failing ? 0 : static_cast<std::uint64_t>(milliseconds(machine_->no_sign_for(now())))},
                   {"stalled", machine_->stalled()},
                   {"failing", failing ? failing->why : ""},
                   {"failing_ms", failing ? static_cast<std::uint64_t>(milliseconds(now() - failing->since)) : 0},
                   {"write_us", status_of(machine_->latency())},
                   {"takeovers", machine_->takeovers()},
                   {"times_set_back", machine_->times_set_back()},
                   {"copy", given_up}};
  return json;
}

}  // namespace rejoin::daemon
