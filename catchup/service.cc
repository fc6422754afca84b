#include "catchup/service.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "base/refusals.h"

namespace rejoin::catchup {

namespace {

constexpr Duration kRetry = std::chrono::milliseconds(50);

std::map<ReplicaId, Incarnation> replicas_of(const std::set<SourceAddress>& sources) {
  std::map<ReplicaId, Incarnation> replicas;
  for (const auto& source : sources) replicas[source.replica] = source.incarnation;
  return replicas;
}

}  // namespace

Service::~Service() {
  while (!ranks_.empty()) remove_rank(ranks_.begin()->first);
}

Result<> Service::add_rank(RankKey key, std::uint64_t instance, local::View view) {
  if (ranks_.contains(key)) remove_rank(key);
  LocalRank& rank = ranks_[key];
  rank.instance = instance;
  rank.view = std::make_unique<local::View>(std::move(view));
  return register_rank(rank);
}

Result<> Service::register_rank(LocalRank& rank) {
  if (auto state = register_state(*rank.view, transport::Access::local, rank.state); !state) return state;
  auto shadow =
      register_memory(rank.view->shadow(), rank.view->kind(), transport::Access::local, rank.view->shadow_dma_buf());
  if (!shadow) {
    deregister(rank.state);
    return tl::unexpected(shadow.error());
  }
  rank.shadow = *shadow;
  rank.registered = true;
  return {};
}

Result<> Service::register_state(const local::View& view, transport::Access access,
                                 std::vector<transport::RegionId>& regions) {
  for (std::size_t i = 0; i < view.memory_ranges().size(); ++i) {
    auto region = register_memory(view.memory_ranges()[i], view.kind(), access, view.dma_buf(i));
    if (!region) {
      deregister(regions);
      return tl::unexpected(region.error());
    }
    regions.push_back(*region);
  }
  return {};
}

// By its trainer's dma-buf; where the transport can't, as it can.
Result<transport::RegionId> Service::register_memory(std::span<std::byte> memory, device::MemoryKind kind,
                                                     transport::Access access,
                                                     const std::optional<device::DmaBuf>& buffer) {
  if (buffer)
    if (auto region = engine_.register_dma_buf(*buffer, access)) return region;
  return engine_.register_region(memory, kind, access);
}

void Service::deregister(std::vector<transport::RegionId>& regions) {
  for (const auto region : std::exchange(regions, {})) engine_.deregister(region);
}

void Service::finish(RankKey key) {
  auto found = ranks_.find(key);
  if (found == ranks_.end()) return;
  std::vector<transport::EndpointId> endpoints;
  for (const auto& [endpoint, from] : fetching_)
    if (from.rank == key) endpoints.push_back(endpoint);
  for (auto endpoint : endpoints) {
    engine_.close(endpoint);
    fetching_.erase(endpoint);
  }
  LocalRank& rank = found->second;
  rank.joiner.reset();
  rank.sources.clear();
  rank.wanted.clear();
  rank.reported = false;
  std::erase_if(caught_up_,
                [&](const CompletedRank& completed) { return completed.key == key; });  // it would be another's by then
  deregister(rank.target);
}

void Service::serve(RankKey key, std::optional<Incarnation> incarnation, std::uint64_t job) {
  auto found = ranks_.find(key);
  if (found == ranks_.end()) return;
  found->second.job = job;
  if (std::exchange(found->second.serves, incarnation) == incarnation) return;
  std::vector<transport::EndpointId> endpoints;
  for (const auto& [endpoint, serving] : serving_)
    if (serving.rank == key) endpoints.push_back(endpoint);
  for (auto endpoint : endpoints) lose(endpoint, "its source contributes no longer");
}

void Service::remove_rank(RankKey key) {
  auto found = ranks_.find(key);
  if (found == ranks_.end()) return;
  serve(key, std::nullopt);
  finish(key);
  deregister(found->second.state);
  if (found->second.registered) engine_.deregister(found->second.shadow);
  ranks_.erase(found);
}

void Service::catch_up(RankKey key, const std::set<SourceAddress>& sources, Step committed, TimePoint now) {
  auto found = ranks_.find(key);
  if (found == ranks_.end()) return;
  LocalRank& rank = found->second;
  rank.committed = committed;
  if (auto started = start_joining(rank, now); !started)
    spdlog::error("replica {} can't catch up yet: {}", key.replica, started.error());
  std::vector<SourceAddress> gone;
  for (const auto& [source, endpoint] : rank.sources)
    if (!sources.contains(source)) gone.push_back(source);
  for (const auto& source : gone) lose(rank.sources[source], "it no longer contributes");
  rank.wanted = sources;
  rank.retry_at = now + kRetry;
  if (!rank.joiner) return;
  rank.joiner->expect(replicas_of(rank.wanted), now);
  connect_missing(key, rank, now);
}

Result<> Service::start_joining(LocalRank& rank, TimePoint now) {
  if (rank.joiner) return {};
  if (!rank.registered)
    if (auto registered = register_rank(rank); !registered) return registered;
  if (auto target = register_state(*rank.view, transport::Access::remote_write, rank.target); !target) return target;
  rank.joiner = std::make_unique<Joiner>(engine_, *rank.view, rank.target, rank.committed, silence_, now);
  return {};
}

// What did not work: nobody else will ask for it.
void Service::try_again(RankKey key, LocalRank& rank, TimePoint now) {
  if (now < rank.retry_at || (rank.registered && rank.wanted.empty())) return;
  rank.retry_at = now + kRetry;
  if (!rank.registered && !register_rank(rank)) return;
  if (rank.wanted.empty() || !start_joining(rank, now)) return;
  rank.joiner->expect(replicas_of(rank.wanted), now);
  connect_missing(key, rank, now);
}

void Service::connect_missing(RankKey key, LocalRank& rank, TimePoint now) {
  for (const auto& source : rank.wanted) {
    if (rank.sources.contains(source)) continue;
    const Hello hello{source.job, source.replica.value, key.rank.value, source.incarnation.value,
                      rank.view->manifest().hash()};
    auto endpoint = engine_.connect({source.address.text, secret_}, bytes_of(hello));
    if (!endpoint) {
      tell_of_loss(source, endpoint.error().message);
      continue;
    }
    rank.sources[source] = *endpoint;
    fetching_[*endpoint] = {key, source, now};
  }
}

// Of a connection that nobody answers, nobody tells.
void Service::give_up_silent_sources(TimePoint now) {
  std::vector<transport::EndpointId> silent;
  for (const auto& [endpoint, from] : fetching_)
    if (from.asked && now - *from.asked > silence_) silent.push_back(endpoint);
  for (auto endpoint : silent) lose(endpoint, fmt::format("no answer for {:.0f} ms", milliseconds(silence_)));
}

void Service::on_accepted(const transport::Event& event) {
  Hello hello{};
  BytesView bytes = event.message;
  const bool known = take(bytes, hello);
  const RankKey key{ReplicaId(hello.replica), RankId(hello.rank)};
  auto found = known ? ranks_.find(key) : ranks_.end();
  using refusals::Why;
  const auto [why, refusal] =
      !known                  ? std::pair{Why::protocol, "it does not say whose state it wants"}
      : found == ranks_.end() ? std::pair{Why::absent, "its trainer is not here, or gives no sign of life"}
      : found->second.serves && found->second.job != hello.job  ? std::pair{Why::job, "it is of another job"}
      : !found->second.registered                               ? std::pair{Why::absent, "its memory is not registered"}
      : found->second.view->manifest().hash() != hello.manifest ? std::pair{Why::declaration, "another state"}
                                                                : std::pair{Why{}, nullptr};
  if (refusal != nullptr) {
    refusals::count(why);
    if (const auto left_out = refusals_.may_say(clock_.now()))
      spdlog::warn("a connection to catch up{} was refused: {} ({} others were since the last such line)",
                   known ? fmt::format(" from replica {} rank {}", hello.replica, hello.rank) : "", refusal, *left_out);
    return engine_.close(event.endpoint);
  }
  // It comes again, if it knows something newer than we do; otherwise it hears of the newer soon.
  if (found->second.serves != Incarnation(hello.incarnation)) return engine_.close(event.endpoint);
  LocalRank& rank = found->second;
  serving_[event.endpoint] = {
      key, std::make_unique<Source>(engine_, event.endpoint, Source::Memory{rank.view.get(), rank.state, rank.shadow},
                                    compression_, pacer_, clock_)};
}

void Service::lose(transport::EndpointId endpoint, const std::string& why) {
  engine_.close(endpoint);  // the fence, before anyone else is asked for the same slices
  if (auto serving = serving_.extract(endpoint); !serving.empty()) {
    served_by_gone_ += serving.mapped().source->stats().bytes;
    return;
  }
  auto fetching = fetching_.extract(endpoint);
  if (fetching.empty()) return;
  const auto& [key, source, asked] = fetching.mapped();
  tell_of_loss(source, why);
  LocalRank& rank = ranks_.at(key);
  rank.sources.erase(source);
  if (rank.joiner) rank.joiner->on_source_down(source.replica);
}

void Service::tell_of_loss(const SourceAddress& source, const std::string& why) {
  constexpr std::size_t most = 1024;  // as many replicas as a job can have
  if (losses_.size() >= most && !losses_.contains(source)) losses_.clear();
  const auto left_out = losses_.try_emplace(source, kSameLineAgain).first->second.may_say(clock_.now());
  if (!left_out) return;
  spdlog::info("catch-up source replica {} is out: {}{}", source.replica, why,
               *left_out > 0 ? fmt::format(" (and {} times more since it was logged last)", *left_out) : "");
}

void Service::on_message(transport::EndpointId endpoint, BytesView bytes) {
  proto::Stream message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())))
    return lose(endpoint, "it sent bytes that are no message");
  Result<> handled;
  if (auto serving = serving_.find(endpoint); serving != serving_.end()) {
    Source& source = *serving->second.source;
    if (message.has_fetch()) handled = source.on_fetch(message.fetch());
    else if (message.has_verify()) handled = source.on_verify(message.verify());
    else handled = fail(ErrorCode::corrupt, "a joiner sent a message that only sources send");
  } else if (auto fetching = fetching_.find(endpoint); fetching != fetching_.end()) {
    handled = ranks_.at(fetching->second.rank).joiner->on_message(fetching->second.source.replica, message);
  }
  if (!handled) lose(endpoint, handled.error().message);
}

void Service::handle(const transport::Event& event, TimePoint now) {
  using transport::EventKind;
  switch (event.kind) {
    case EventKind::accepted: return on_accepted(event);
    case EventKind::connected: {
      auto found = fetching_.find(event.endpoint);
      if (found == fetching_.end()) return;
      found->second.asked.reset();
      ranks_.at(found->second.rank).joiner->on_source_up(found->second.source.replica, event.endpoint);
      return;
    }
    case EventKind::message: return on_message(event.endpoint, event.message);
    case EventKind::completed: {
      auto found = serving_.find(event.endpoint);
      if (found != serving_.end()) found->second.source->on_write_completed(event.value, !event.error, now);
      return;
    }
    case EventKind::written: {
      auto found = fetching_.find(event.endpoint);
      if (found != fetching_.end())
        ranks_.at(found->second.rank).joiner->on_written(found->second.source.replica, event.value);
      return;
    }
    case EventKind::closed: return lose(event.endpoint, event.error ? event.error->message : "closed");
  }
}

std::vector<Service::CompletedRank> Service::poll(TimePoint now) {
  poll_again(now);
  return std::exchange(caught_up_, {});
}

std::vector<RankKey> Service::joining() const {
  std::vector<RankKey> keys;
  for (const auto& [key, rank] : ranks_)
    if (rank.joiner) keys.push_back(key);
  return keys;
}

void Service::poll_again(TimePoint now) {
  busy_ = false;
  for (const auto& event : engine_.poll()) {
    handle(event, now);
    busy_ = true;
  }
  std::vector<transport::EndpointId> failed;
  for (auto& [endpoint, serving] : serving_) {
    serving.source->work(now);
    if (serving.source->failed()) failed.push_back(endpoint);
  }
  for (auto endpoint : failed) lose(endpoint, "sending to it failed");
  give_up_silent_sources(now);
  for (auto failing = ranks_.begin(); failing != ranks_.end();) {
    const auto& [key, rank] = *failing++;
    if (!rank.view->failure()) continue;
    // Nothing that it says of its memory is to be believed.
    spdlog::error("replica {} rank {} is not served any more: {}", key.replica, key.rank, *rank.view->failure());
    failed_.push_back(key);
    remove_rank(RankKey(key));
  }
  for (auto& [key, rank] : ranks_) {
    busy_ |= rank.view->populate_some();
    try_again(key, rank, now);
    if (!rank.joiner) continue;
    rank.joiner->work(now, busy_);
    for (auto& drift : rank.joiner->take_drifts()) drifts_.emplace_back(key, std::move(drift));
    if (rank.joiner->done() && !rank.reported) {
      rank.reported = true;
      caught_up_.push_back({key, rank.instance});
    }
  }
}

std::optional<CatchUpProgress> Service::progress(RankKey key, TimePoint now) const {
  auto found = ranks_.find(key);
  if (found == ranks_.end() || !found->second.joiner) return std::nullopt;
  return found->second.joiner->progress(now);
}

std::uint64_t Service::bytes_served() const {
  std::uint64_t bytes = served_by_gone_;
  for (const auto& [endpoint, serving] : serving_) bytes += serving.source->stats().bytes;
  return bytes;
}

std::vector<std::pair<RankKey, Source::Stats>> Service::serving_now() const {
  std::vector<std::pair<RankKey, Source::Stats>> all;
  for (const auto& [endpoint, serving] : serving_) all.emplace_back(serving.rank, serving.source->stats());
  return all;
}

std::vector<int> Service::doorbells() const {
  std::vector<int> fds;
  for (const auto& [key, rank] : ranks_) fds.push_back(rank.view->doorbell().get());
  return fds;
}

void Service::arm_doorbells() {
  for (auto& [key, rank] : ranks_) {
    drain_eventfd(rank.view->doorbell());
    rank.view->wait_for_change();
  }
}

}  // namespace rejoin::catchup
