// `rejoin doctor` calls coordinators, other daemons and etcd.
#include <poll.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/fail.h"
#include "daemon/clock_stamp.h"
#include "daemon/doctor_probes.h"
#include "daemon/etcd_client.h"
#include "daemon/store_factory.h"
#include "daemon/upstream.h"
#include "membership/greeting.h"
#include "transport/factory.h"
#include "transport/socket_address.h"

namespace rejoin::daemon {

namespace {

constexpr const char* kName = "rejoin doctor";

// A call to one address of a coordinator, or of a relay, as a node without trainers makes it. Each answers such a node:
// one of several says whether it leads, any other returns a heartbeat.
class Call {
 public:
  // `name`: what its host was asked for as.
  Call(asio::io_context& io, const std::string& address, const std::string& name, const JobKeys& keys,
       std::chrono::milliseconds patience, CoordinatorFacts facts, std::function<void()> over)
      : facts_(std::move(facts)),
        begun_(SteadyClock().now()),
        over_(std::move(over)),
        upstream_(io, address, keys, patience,
                  {.up = [this] { introduce(); },
                   .message = [this](const proto::ToNode& message) { on_message(message); },
                   .down = [this] { on_down(); },
                   .over = [] { return false; },
                   .rejected = [] {}},
                  false, name) {}
  void begin() { upstream_.connect(); }
  const CoordinatorFacts& facts() const { return facts_; }

 private:
  void introduce() {
    if (done_) return;
    facts_.proven = true;
    introduced_ = SteadyClock().now();
    proto::FromNode hello, heartbeat;
    *hello.mutable_hello() = membership::hello_of(kName);
    heartbeat.mutable_heartbeat();
    upstream_.send(hello);
    upstream_.send(heartbeat);
  }
  void on_message(const proto::ToNode& message) {
    if (done_ || (!message.has_heartbeat() && !message.has_leads())) return;  // what it tells every node
    facts_.answered = true;
    facts_.milliseconds = milliseconds(SteadyClock().now() - begun_);
    facts_.protocol = upstream_.spoken().version();
    if (const auto time = system_time_of(message.SerializeAsString())) {  // half of the way is not known
      facts_.clock_error_ms = milliseconds(SteadyClock().now() - introduced_) / 2;
      facts_.clock_ahead_ms = clock_ahead_ms(*time, system_time(), facts_.clock_error_ms);
    }
    if (message.has_leads()) {
      facts_.one_of_several = true;
      facts_.leads = message.leads().leads();
      facts_.stalled = message.leads().leads() && message.leads().stalled();
      facts_.term = message.leads().term();
      facts_.leader = message.leads().address();
    }
    end();
  }
  void on_down() {
    if (done_) return;
    facts_.why = upstream_.why_lost();
    facts_.refused = !facts_.proven && upstream_.was_refused();
    end();
  }
  void end() {
    done_ = true;
    over_();
  }

  CoordinatorFacts facts_;
  const TimePoint begun_;
  TimePoint introduced_{};
  const std::function<void()> over_;
  bool done_ = false;
  Upstream upstream_;
};

}  // namespace

// A host may have several addresses. It answers where one of them does, and otherwise as the one that has come
// farthest.
std::vector<CoordinatorFacts> probe_coordinators(const std::string& addresses, const JobKeys& keys,
                                                 std::chrono::milliseconds patience) {
  asio::io_context io(1);
  std::vector<CoordinatorFacts> all;
  std::vector<std::pair<std::size_t, std::unique_ptr<Call>>> calls;
  std::size_t under_way = 0;
  for (const auto& address : split(addresses, ',')) {
    CoordinatorFacts facts;
    facts.address = address;
    const auto parts = transport::SocketAddress::split(address);
    const auto found = parts ? addresses_of(parts->host, patience) : tl::unexpected(parts.error());
    if (!found) facts.why = found.error().message;
    for (const auto& host : found.value_or(std::vector<std::string>{})) {
      facts.remote |= !transport::SocketAddress::check_own({host, 0});
      const auto over = [&] {
        if (--under_way == 0) io.stop();
      };
      calls.emplace_back(all.size(), std::make_unique<Call>(io, transport::with_port(host, parts->port), parts->host,
                                                            keys, patience, facts, over));
    }
    all.push_back(std::move(facts));
  }
  under_way = calls.size();
  for (auto& [of, call] : calls) asio::post(io, [&call = *call] { call.begin(); });
  if (!calls.empty()) io.run_for(3 * patience);  // to connect, to show the key, to answer
  const auto progress = [](const CoordinatorFacts& one) {
    return one.answered ? 3 : one.proven ? 2 : one.refused ? 1 : one.why.empty() ? -1 : 0;
  };
  std::vector<bool> known(all.size());
  for (const auto& [of, call] : calls) {
    const bool remote = all[of].remote || call->facts().remote;
    if (!known[of] || progress(call->facts()) > progress(all[of])) all[of] = call->facts();
    known[of] = true;
    all[of].remote = remote;
  }
  return all;
}

Result<> probe_peer(const std::string& peer, const std::string& transport, const JobKeys& keys,
                    std::chrono::milliseconds patience) {
  if (transport == "shm")
    return fail(ErrorCode::invalid_argument,
                "shm has no addresses; give --transport, as the daemons of a job on several machines have it");
  auto engine = transport::make_engine(transport);
  if (!engine) return fail(ErrorCode::invalid_argument, "{}", engine.error().message);
  // Rails have addresses of their own, by numbers.
  const bool rails = peer.find('|') != std::string::npos;
  const auto address = rails ? Result<std::string>(peer) : resolved(peer, patience);
  if (!address) return tl::unexpected(address.error());
  (*engine)->set_secrets(keys.data_secrets());
  (*engine)->set_silence(patience);
  // Of several rails the first one is called, where no more addresses are known.
  const std::size_t uncalled = rails || (*engine)->rails().empty() ? 0 : (*engine)->rails().size() - 1;
  const auto endpoint = (*engine)->connect({*address + std::string(uncalled, '|'), keys.data_secrets().own}, {});
  if (!endpoint) return tl::unexpected(endpoint.error());
  const TimePoint until = SteadyClock().now() + patience;
  for (;;) {
    for (const auto& event : (*engine)->poll()) {
      if (event.endpoint != *endpoint) continue;
      if (event.kind == transport::EventKind::connected) return {};
      if (event.kind == transport::EventKind::closed)
        return event.error ? Result<>(tl::unexpected(*event.error))
                           : fail(ErrorCode::unavailable, "it closes the connection");
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - SteadyClock().now()).count();
    if (left <= 0) return fail(ErrorCode::timeout, "no answer in {} ms", patience.count());
    if (!(*engine)->arm()) continue;
    pollfd look{(*engine)->event_fd(), POLLIN, 0};
    if (::poll(&look, 1, static_cast<int>(std::min<std::int64_t>(left, 20))) < 0 && errno != EINTR)
      return fail_errno("poll");
  }
}

namespace {

// How full the first of etcd's members that answers is; and of which cluster each is.
Result<> ask_members(const StoreSettings& settings, std::chrono::milliseconds patience, StoreFacts& facts) {
  Result<etcd::StatusResponse> first = fail(ErrorCode::timeout, "no answer in {} ms", patience.count());
  for (const auto& endpoint : settings.endpoints()) {
    asio::io_context io(1);
    auto options = etcd_options(settings, patience);
    if (!options) return tl::unexpected(options.error());
    options->endpoints = {endpoint};
    const auto client = EtcdClient::create(io, *options);
    if (!client) return tl::unexpected(client.error());
    Result<etcd::StatusResponse> answer = fail(ErrorCode::timeout, "no answer in {} ms", patience.count());
    (*client)->status([&](Result<etcd::StatusResponse> said) { answer = std::move(said); });
    io.run_for(patience);  // until it has said so: nothing else is under way
    if (answer && answer->header().cluster_id() != 0)
      facts.clusters.emplace_back(endpoint, answer->header().cluster_id());
    if (!first) first = std::move(answer);
  }
  if (!first) return tl::unexpected(first.error());
  facts.bytes = static_cast<std::uint64_t>(std::max<std::int64_t>(0, first->db_size()));
  facts.quota = static_cast<std::uint64_t>(std::max<std::int64_t>(0, first->db_size_quota()));
  for (const auto& one : first->errors()) facts.alarms.push_back(printable(one, 200));
  return {};
}

}  // namespace

// What compares a revision that no leader has writes nothing, and yet etcd's members must agree on it and keep that
// they did, as with any write.
Result<StoreFacts> probe_store(const StoreSettings& settings, std::chrono::milliseconds patience) {
  constexpr int tries = 5;
  asio::io_context io(1);
  auto store = open_store(io, settings, patience);
  if (!store) return tl::unexpected(store.error());
  StoreFacts facts;
  std::optional<Error> error;
  membership::StoreRequest request;
  request.kind = membership::StoreRequest::Kind::renew;
  request.token = std::uint64_t{1} << 62;
  request.leader = kName;
  request.value = kName;
  TimePoint begun{};
  std::function<void()> next = [&] {
    begun = SteadyClock().now();
    (*store)->submit(request, [&](const membership::StoreAnswer& answer) {
      if (answer.outcome == membership::StoreAnswer::Outcome::unknown)
        error = Error{ErrorCode::unavailable, answer.error};
      else facts.milliseconds.push_back(milliseconds(SteadyClock().now() - begun));
      if (error || facts.milliseconds.size() == tries) return io.stop();
      asio::post(io, next);
    });
  };
  asio::post(io, next);
  const auto work = asio::make_work_guard(io);  // what is heard of etcd comes from other threads
  io.run_for(5 * patience);
  store->reset();
  if (const auto asked = ask_members(settings, patience, facts); !asked) facts.unknown = asked.error().message;
  if (!facts.alarms.empty()) return facts;  // which says why, where it takes no writes
  if (error) return tl::unexpected(*error);
  if (facts.milliseconds.empty())
    return fail(ErrorCode::timeout, "{}: no answer in {} ms", settings.store, (5 * patience).count());
  return facts;
}

}  // namespace rejoin::daemon
