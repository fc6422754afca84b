#include "daemon/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/refusals.h"
#include "base/release.h"
#include "membership/versions.h"

namespace rejoin::daemon {

namespace {

using Labels = prometheus::Labels;
using nlohmann::json;

constexpr std::size_t kMostHops = 16;  // of a rank

class Metrics {
 public:
  void gauge(const std::string& name, const std::string& help, double value, const Labels& labels = {}) {
    prometheus::BuildGauge().Name("rejoin_" + name).Help(help).Register(registry_).Add(labels).Set(value);
  }
  // `name` without _total.
  void counter(const std::string& name, const std::string& help, double value, const Labels& labels = {}) {
    prometheus::BuildCounter()
        .Name("rejoin_" + name + "_total")
        .Help(help)
        .Register(registry_)
        .Add(labels)
        .Increment(value);
  }
  void histogram(const std::string& name, const std::string& help, const Histogram& values) {
    prometheus::BuildHistogram()
        .Name("rejoin_" + name)
        .Help(help)
        .Register(registry_)
        .Add({}, values.bounds())
        .ObserveMultiple({values.counts().begin(), values.counts().end()}, values.sum());
  }
  prometheus::Family<prometheus::Gauge>& gauges(const std::string& name, const std::string& help) {
    return prometheus::BuildGauge().Name("rejoin_" + name).Help(help).Register(registry_);
  }
  std::string text() const { return prometheus::TextSerializer().Serialize(registry_.Collect()); }

 private:
  prometheus::Registry registry_;
};

double number(const json& at, const char* key) {
  const auto& value = at.at(key);
  return value.is_boolean() ? static_cast<double>(value.get<bool>()) : value.get<double>();
}

double unix_seconds(TimePoint then, TimePoint now) {
  const auto since_1970 = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch());
  return since_1970.count() - seconds(now - then);
}

void add_connections(Metrics& metrics, const json& of, const char* role) {
  metrics.counter("rejected_messages", "Connections and messages refused.", number(of, "rejected"), {{"by", role}});
  if (of.contains("strangers"))
    metrics.gauge("unproven_connections", "Control connections that have not proven the job key yet.",
                  number(of, "strangers"), {{"by", role}});
}

void add_refusals(Metrics& metrics, const json& refused, const Labels& of) {
  for (const auto& [reason, times] : refused.items()) {
    Labels labels = of;
    labels["reason"] = reason;
    metrics.counter("refused", "Connections, registrations and operations that were refused, by why.",
                    times.get<double>(), labels);
  }
}

void add_replicas(Metrics& metrics, const JobHistory& history) {
  auto& states = metrics.gauges("replica_state",
                                "1 for the state that each replica of the job is in, and 0 for the others; a replica "
                                "that is away is absent, or suspended while it may be taken back.");
  constexpr std::array<std::pair<char, const char*>, 4> all{{{JobHistory::kContributes, "contributor"},
                                                             {JobHistory::kCatchesUp, "catching_up"},
                                                             {JobHistory::kSuspended, "suspended"},
                                                             {JobHistory::kAbsent, "absent"}}};
  for (const auto& [sign, state] : all) {
    for (std::size_t replica = 0; replica < history.states().size(); ++replica)
      states.Add({{"replica", std::to_string(replica)}, {"state", state}})
          .Set(history.states()[replica] == sign ? 1 : 0);
    metrics.gauge("replicas", "Replicas in each state.",
                  static_cast<double>(std::ranges::count(history.states(), sign)), {{"state", state}});
  }
}

void add_versions(Metrics& metrics, const json& versions) {
  metrics.gauge("job_protocol", "The protocol that all members of the job speak.", number(versions, "protocol"));
  metrics.gauge("job_mixed", "1: there are several releases or protocols in the job.", number(versions, "mixed"));
  const auto add = [&](const char* name, const char* help, const json& groups) {
    auto& family = metrics.gauges(name, help);
    for (const auto& group : groups)
      family.Add({{"protocol", group.at("protocol").dump()}, {"release", group.at("release").get<std::string>()}})
          .Increment(number(group, "count"));
  };
  add("job_nodes", "Daemons and relays that are connected, by what they speak.", versions.at("nodes"));
  add("job_ranks", "Ranks that are registered, by what may be spoken with them.", versions.at("ranks"));
}

void add_stragglers(Metrics& metrics, const json& stragglers) {
  metrics.gauge("stragglers", "Replicas that compute more slowly than others, and a link or hop that is slow.",
                static_cast<double>(stragglers.size()));
  auto& times = metrics.gauges("straggler_times",
                               "How many times as long as the median a straggler takes: a replica to compute a sample, "
                               "a link to carry bytes, or a hop between two chunks.");
  for (const auto& one : stragglers) {
    Labels labels{{"what", one.at("what").get<std::string>()},
                  {"replica", std::to_string(one.at("replica").get<int>())}};
    if (one.contains("from")) labels["from"] = std::to_string(one.at("from").get<int>());
    times.Add(labels).Set(number(one, "times"));
  }
}

// What only the coordinator that decides knows.
void add_job(Metrics& metrics, const json& c, const JobHistory& history, TimePoint now) {
  metrics.gauge("epoch", "The current epoch; 0: the job has not started.", number(c, "epoch"));
  metrics.gauge("committed_step", "The last committed step.", number(c, "committed"));
  metrics.gauge("finished", "1: the last step is committed.", number(c, "finished"));
  metrics.gauge("connected_nodes", "Daemons and relays that are connected.", number(c, "nodes"));
  metrics.counter("rolled_back_steps", "Committed steps that an operator gave up.", number(c, "steps_rolled_back"));
  metrics.gauge("blocked_on_replicas", "Silent replicas that the job waits for: nobody else has the last step.",
                static_cast<double>(c.at("blocked_on").size()));
  metrics.gauge("wants_roll_back", "1: the job waits for an operator's word to go on from an older checkpoint.",
                c.contains("wants_roll_back_to"));
  metrics.gauge("wants_log", "1: its log is an older copy, or another job's.", c.contains("wants_log"));
  metrics.gauge("stopped", "1: replicas differ and an operator must say which is wrong.", c.at("stopped") != "");
  metrics.gauge("alarms", "What is not as it should be although nothing waits for it; the status has the words.",
                static_cast<double>(c.at("alarms").size()));
  add_stragglers(metrics, c.at("stragglers"));
  const auto& audit = c.at("audit");
  metrics.gauge("audit_period_steps", "Steps in which all of the replicas' states are compared.",
                number(audit, "period"));
  metrics.counter("audit_rounds", "Times that all of the state has been compared.", number(audit, "rounds"));
  metrics.counter("gradient_differences",
                  "Steps repeated because replicas had reduced different gradients: corruption.",
                  number(audit, "result_differences"));
  metrics.counter("state_differences", "Steps repeated because replicas' states differed: corruption.",
                  number(audit, "state_differences"));
  metrics.counter("drifted_slices", "Slices in which a joiner's sources differed: corruption.",
                  number(audit, "drift_reports"));
  add_versions(metrics, c.at("versions"));
  add_replicas(metrics, history);
  for (std::size_t i = 0; i < JobHistory::kCauses; ++i) {
    const auto cause = static_cast<JobHistory::Cause>(i);
    metrics.counter("epochs", "Epochs that this coordinator has begun, by what they change.",
                    static_cast<double>(history.epochs_by(cause)), {{"reason", JobHistory::name(cause)}});
  }
  metrics.histogram("step_duration_seconds", "From one commit to the next.", history.step_seconds());
  metrics.histogram("recovery_duration_seconds",
                    "From an epoch that repeats a step (a replica lost, a connection made anew, gradients that "
                    "differed) to the commit of that step.",
                    history.recovery_seconds());
  if (const auto median = history.median_step())
    metrics.gauge("step_duration_median_seconds", "Of the last 200 steps.", seconds(*median));
  if (const auto at = history.last_commit() ? history.last_commit() : history.decides_since())
    metrics.gauge(
        "last_commit_timestamp_seconds",
        "When the last step was committed, since 1970; where none was, when this coordinator began to decide.",
        unix_seconds(*at, now));
  const auto effective = history.effective(now, !c.at("finished").get<bool>());
  metrics.counter("training_seconds", "Time of the job since this coordinator decides.", seconds(effective.total));
  metrics.counter(
      "training_lost_seconds",
      "What steps that were repeated, or took over a second and over ten median steps, took beyond the median.",
      seconds(effective.lost));
  metrics.counter("contributor_seconds", "Time of the job, summed over the replicas that contributed.",
                  effective.replica_seconds);
}

void add_coordinator(Metrics& metrics, const json& c, const JobHistory& history, TimePoint now) {
  const auto& store = c.at("store");
  add_connections(metrics, c, "coordinator");
  metrics.gauge("leads", "1: this coordinator decides; 0: another one does.", number(store, "leads"));
  if (store.contains("term")) {
    metrics.gauge("leader_term", "The number of the current lead: it rises with each takeover.", number(store, "term"));
    metrics.counter("takeovers", "Times that this coordinator has taken the lead.", number(store, "takeovers"));
    metrics.counter("store_set_back", "Times that the store was set back to an older copy under this coordinator.",
                    number(store, "times_set_back"));
    metrics.gauge("store_stalled", "1: the store does not take what is decided.", number(store, "stalled"));
    metrics.gauge("store_failing_seconds", "For how long the store has not answered, or taken a write; 0: it does.",
                  number(store, "failing_ms") * 1e-3);
    metrics.gauge("store_copy_given_up", "1: the copy of the decisions on this disk is not kept any more.",
                  store.value("copy", "") != "");
  }
  metrics.histogram("log_append_duration_seconds", "How long it took to keep what was decided.",
                    history.append_seconds());
  if (store.at("leads").get<bool>()) add_job(metrics, c, history, now);
}

void add_rank(Metrics& metrics, const json& rank) {
  const Labels labels{{"replica", std::to_string(rank.at("replica").get<int>())},
                      {"rank", std::to_string(rank.at("rank").get<int>())}};
  const auto with = [&](const char* name, const json& value) {
    Labels more = labels;
    more[name] = std::to_string(value.get<std::uint64_t>());
    return more;
  };
  if (rank.contains("silent_ms"))
    metrics.gauge("rank_silence_seconds", "Since the trainer's last sign of life.", number(rank, "silent_ms") * 1e-3,
                  labels);
  if (rank.contains("catch_up")) {
    const auto& stream = rank.at("catch_up");
    metrics.gauge("catch_up_placed_bytes", "Of a joiner: state that has arrived.", number(stream, "bytes"), labels);
    metrics.gauge("catch_up_state_bytes", "Of a joiner: all of its state.", number(stream, "total_bytes"), labels);
  }
  const auto& reduced = rank.at("all_reduce");
  Labels by = labels;
  by["by"] = "trainer";
  add_refusals(metrics, rank.at("refused"), by);
  metrics.counter("all_reduces", "All-reduces done.", number(reduced, "operations"), labels);
  metrics.counter("reduced_bytes", "Gradients reduced.", number(reduced, "bytes"), labels);
  metrics.counter("stale_messages", "Messages of other epochs that were dropped.", number(reduced, "stale_dropped"),
                  labels);
  if (rank.contains("coding")) {
    const auto& coding = rank.at("coding");
    metrics.counter("chunk_plain_bytes", "Chunks that were sent, if none of them had been coded.",
                    number(coding, "plain_bytes"), labels);
    metrics.counter("chunk_sent_bytes", "… as they went.", number(coding, "sent_bytes"), labels);
    metrics.gauge("coding_feedback_bytes", "Memory that keeps what coding has lost, for the next step.",
                  number(coding, "feedback_bytes"), labels);
    if (coding.contains("error"))
      metrics.gauge("coding_error_ratio",
                    "Root mean square of what coding lost in the last steps, in relation to the values.",
                    number(coding, "error"), labels);
  }
  std::vector<const json*> hops;
  for (const auto& hop : rank.at("hops"))
    if (hop.at("bytes") != 0) hops.push_back(&hop);
  const auto most = static_cast<std::ptrdiff_t>(std::min(hops.size(), kMostHops));
  std::partial_sort(hops.begin(), hops.begin() + most, hops.end(),
                    [](const json* one, const json* other) { return one->at("bytes") > other->at("bytes"); });
  hops.resize(static_cast<std::size_t>(most));
  for (const json* hop : hops) {
    const Labels from = with("from", hop->at("replica"));
    metrics.counter("hop_received_bytes", "Chunks from a neighbour in the ring; of the 16 that most came from.",
                    number(*hop, "bytes"), from);
    metrics.gauge("hop_longest_gap_seconds",
                  "The longest time between two chunks of one all-reduce, in the last 10 to 20 s.",
                  number(*hop, "recent_gap_us") * 1e-6, from);
    if (rank.contains("coding"))
      metrics.gauge("hop_coded_bits", "A value, in the last chunk that was sent to a neighbour; 0: it went as it is.",
                    number(*hop, "coded_bits"), with("to", hop->at("replica")));
  }
  for (std::size_t i = 0; i < rank.at("rails").size(); ++i) {
    const auto& rail = rank.at("rails").at(i);
    metrics.gauge("rail_peers", "Peers that a rail should reach.", number(rail, "peers"), with("rail", i));
    metrics.gauge("rail_peers_up", "Peers that a rail reaches.", number(rail, "up"), with("rail", i));
  }
}

void add_node(Metrics& metrics, const json& n) {
  add_connections(metrics, n, "node");
  metrics.gauge("coordinator_connected", "1: connected with the coordinator, or its relay.",
                number(n.at("coordinator"), "connected"), {{"by", "node"}});
  metrics.gauge("trainers", "Trainers that are registered here.", static_cast<double>(n.at("ranks").size()));
  metrics.gauge("gone_trainers", "Places of this node whose trainer has gone.",
                static_cast<double>(n.at("gone").size()));
  metrics.gauge("standing_threads", "Threads of this daemon that stand still; its status and log say which.",
                static_cast<double>(n.at("standing").size()));
  metrics.counter("catch_up_sent_bytes", "State sent to joiners.", number(n, "bytes_served"));
  metrics.counter("catch_up_passed_on_bytes", "… of it by replicas that were catching up themselves.",
                  number(n, "bytes_passed_on"));
  metrics.counter("catch_up_refetched_slices",
                  "Slices that joiners of this node fetched again: they came damaged, or there was no room to keep "
                  "their gradients.",
                  number(n, "refetched"));
  for (const auto& rank : n.at("ranks")) add_rank(metrics, rank);
}

void add_relay(Metrics& metrics, const json& r) {
  add_connections(metrics, r, "relay");
  metrics.gauge("coordinator_connected", "1: connected with the coordinator, or its relay.",
                number(r.at("coordinator"), "connected"), {{"by", "relay"}});
  metrics.gauge("relay_nodes", "Daemons connected to this relay.", number(r, "nodes"));
  metrics.gauge("relay_ranks", "Ranks that have registered through it.", number(r, "ranks"));
}

}  // namespace

json refusals_json(std::span<const std::uint64_t> counted) {
  json all = json::object();
  for (std::size_t i = 0; i < refusals::kWhys; ++i)
    all[refusals::name_of(static_cast<refusals::Why>(i))] = i < counted.size() ? counted[i] : 0;
  return all;
}

std::string metrics_text(const json& status, const JobHistory* history, TimePoint now) {
  Metrics metrics;
  metrics.gauge("build_info", "1, with what runs here.", 1,
                {{"version", release()}, {"protocol", std::to_string(membership::kProtocolVersion)}});
  if (status.contains("refused")) add_refusals(metrics, status.at("refused"), {{"by", "daemon"}});
  if (status.contains("certificate")) {
    const auto& own = status.at("certificate");
    metrics.gauge("certificate_begins_timestamp_seconds",
                  "When the certificate in use, and those of its CAs, have become valid, since 1970.",
                  number(own, "valid_from"));
    metrics.gauge("certificate_expires_timestamp_seconds",
                  "When the certificate in use, or that of one of its CAs, expires, since 1970.",
                  number(own, "valid_until"));
  }
  if (status.contains("coordinator_role") && history != nullptr)
    add_coordinator(metrics, status.at("coordinator_role"), *history, now);
  if (status.contains("relay_role")) add_relay(metrics, status.at("relay_role"));
  if (status.contains("node_role")) add_node(metrics, status.at("node_role"));
  return metrics.text();
}

}  // namespace rejoin::daemon
