#include "catchup/service.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"

namespace rejoin::catchup {

namespace {

constexpr Duration kRetry = std::chrono::milliseconds(50);

std::map<ReplicaId, Incarnation> replicas_of(const std::set<SourceAddress>& sources) {
  std::map<ReplicaId, Incarnation> replicas;
  for (const auto& source : sources) replicas[source.replica] = source.incarnation;
  return replicas;
}

std::map<ReplicaId, std::size_t> distances_of(const std::set<SourceAddress>& sources) {
  std::map<ReplicaId, std::size_t> distances;
  for (const auto& source : sources) distances[source.replica] = source.distance;
  return distances;
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
  rank.chain = {};
  rank.given_up.clear();
  rank.lost_why.clear();
  rank.retry_at = {};
  rank.reported = false;
  std::erase_if(caught_up_,
                [&](const CompletedRank& completed) { return completed.key == key; });  // it would be another's by then
  deregister(rank.target);
}

void Service::serve(RankKey key, std::optional<Incarnation> incarnation, std::uint64_t job, bool joining) {
  auto found = ranks_.find(key);
  if (found == ranks_.end()) return;
  LocalRank& rank = found->second;
  rank.job = job;
  const bool same = std::exchange(rank.serves, incarnation) == incarnation,
             joined = std::exchange(rank.serves_joining, joining);
  // A joiner says itself what is proven. When it has been promoted all is, for those that it serves already, too.
  if (incarnation && !joining) rank.proofs.all();
  else if (!joining || !same || !joined) rank.proofs.none();
  if (same) return;
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

void Service::catch_up(RankKey key, const std::set<SourceAddress>& sources, Step committed, TimePoint now,
                       const Chain& chain) {
  auto found = ranks_.find(key);
  if (found == ranks_.end()) return;
  LocalRank& rank = found->second;
  rank.committed = committed;
  // A plan comes with each step, and what could not be registered is tried again more seldom than steps may come.
  if (now >= rank.retry_at) {
    (void)start_joining(key, rank, now);
    rank.retry_at = now + kRetry;
  }
  std::vector<SourceAddress> gone;
  for (const auto& [source, endpoint] : rank.sources)
    if (!(fetching_.at(endpoint).fellow ? chain.fellows : sources).contains(source)) gone.push_back(source);
  for (const auto& source : gone) lose(rank.sources[source], "its part has changed");
  rank.wanted = sources;
  rank.chain = chain;
  std::erase_if(rank.given_up, [&](const auto& one) { return !chain.fellows.contains(one.first); });
  std::erase_if(rank.lost_why, [&](const auto& one) { return !sources.contains(one.first); });
  if (!rank.joiner) return;
  rank.joiner->set_distances(distances_of(rank.wanted));
  rank.joiner->expect(replicas_of(rank.wanted), now);
  connect_missing(key, rank, now);
}

bool Service::start_joining(RankKey key, LocalRank& rank, TimePoint now) {
  if (rank.joiner) return true;
  Result<> registered;
  if (!rank.registered) registered = register_rank(rank);
  if (registered) registered = register_state(*rank.view, transport::Access::remote_write, rank.target);
  if (!registered) {
    if (const auto left_out = rank.not_yet_told.may_say(now))
      logger().error("replica {} can't catch up yet: {} (tried {} times more since it was logged last)", key.replica,
                     registered.error().message, *left_out);
    return false;
  }
  rank.joiner = std::make_unique<Joiner>(engine_, *rank.view, rank.target, rank.proofs, rank.committed, silence_, now);
  return true;
}

// What did not work: nobody else will ask for it.
void Service::try_again(RankKey key, LocalRank& rank, TimePoint now) {
  if (now < rank.retry_at || !rank.tries_again()) return;
  rank.retry_at = now + kRetry;
  if (!rank.registered && !register_rank(rank)) return;
  if (rank.wanted.empty() || !start_joining(key, rank, now)) return;
  rank.joiner->set_distances(distances_of(rank.wanted));
  rank.joiner->expect(replicas_of(rank.wanted), now);
  connect_missing(key, rank, now);
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
    else if (message.has_follow()) source.on_follow();
    else handled = fail(ErrorCode::corrupt, "a joiner sent a message that only sources send");
  } else if (auto fetching = fetching_.find(endpoint); fetching != fetching_.end()) {
    handled = ranks_.at(fetching->second.rank).joiner->on_message(fetching->second.source.replica, message);
  }
  if (handled) return;
  if (auto fetching = fetching_.find(endpoint); fetching != fetching_.end() && fetching->second.fellow)
    return part_from(ranks_.at(fetching->second.rank), {fetching->second.source.replica, handled.error().message, true},
                     clock_.now());
  lose(endpoint, handled.error().message);
}

void Service::handle(const transport::Event& event, TimePoint now) {
  using transport::EventKind;
  switch (event.kind) {
    case EventKind::accepted: return on_accepted(event);
    case EventKind::connected: {
      auto found = fetching_.find(event.endpoint);
      if (found == fetching_.end()) return;
      found->second.asked.reset();
      Joiner& joiner = *ranks_.at(found->second.rank).joiner;
      if (found->second.fellow) joiner.on_fellow_up(found->second.source.replica, event.endpoint);
      else joiner.on_source_up(found->second.source.replica, event.endpoint);
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
        ranks_.at(found->second.rank).joiner->on_written(found->second.source.replica, event);
      return;
    }
    case EventKind::closed: return lose(event.endpoint, event.error ? event.error->message : "closed");
  }
}

std::vector<Service::CompletedRank> Service::poll(TimePoint now) {
  poll_again(now);
  return std::exchange(caught_up_, {});
}

Duration Service::wait(TimePoint polled, TimePoint now, Duration most) const {
  // What has come due since poll_again() looked is due at once.
  const auto until = [&](TimePoint due) {
    if (due > polled) most = std::min(most, std::max(Duration{}, due - now));
  };
  for (const auto& [endpoint, serving] : serving_) until(serving.source->due());
  for (const auto& [key, rank] : ranks_)
    if (rank.tries_again()) until(rank.retry_at);
  return most;
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
  // Whoever comes after the one that was served last is the first: what the limit allows is for all in turn.
  auto next = serving_.upper_bound(served_last_);
  for (std::size_t i = 0; i < serving_.size(); ++i, ++next) {
    if (next == serving_.end()) next = serving_.begin();
    Source& source = *next->second.source;
    const auto before = source.stats().bytes;
    source.work(now);
    if (source.stats().bytes != before) served_last_ = next->first;
    if (source.failed()) failed.push_back(next->first);
  }
  for (auto endpoint : failed) lose(endpoint, "sending to it failed");
  give_up_silent_sources(now);
  for (auto failing = ranks_.begin(); failing != ranks_.end();) {
    const auto& [key, rank] = *failing++;
    if (!rank.view->failure()) continue;
    // Nothing that it says of its memory is to be believed.
    logger().error("replica {} rank {} is not served any more: {}", key.replica, key.rank, *rank.view->failure());
    failed_.emplace_back(key, rank.instance);
    remove_rank(RankKey(key));
  }
  for (auto& [key, rank] : ranks_) {
    busy_ |= rank.view->populate_some();
    const bool joined = rank.joiner != nullptr;
    try_again(key, rank, now);
    if (!rank.joiner) continue;
    busy_ |= !joined;  // its trainer is not watched yet
    rank.joiner->work(now, busy_);
    tell_of_unreached(key, rank, now);
    for (const auto& source : rank.joiner->take_given_up()) part_from(rank, source, now);
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
  auto progress = found->second.joiner->progress(now);
  progress.passed_on = found->second.passed_on_to_gone;
  progress.unreached = why_unreached(found->second, now);
  for (const auto& [endpoint, serving] : serving_)
    if (serving.rank == key) progress.passed_on += serving.source->stats().passed_on;
  return progress;
}

std::uint64_t Service::bytes_served() const {
  std::uint64_t bytes = served_by_gone_;
  for (const auto& [endpoint, serving] : serving_) bytes += serving.source->stats().bytes;
  return bytes;
}

std::uint64_t Service::bytes_passed_on() const {
  std::uint64_t bytes = passed_on_by_gone_;
  for (const auto& [endpoint, serving] : serving_) bytes += serving.source->stats().passed_on;
  return bytes;
}

std::vector<std::pair<RankKey, Source::Stats>> Service::serving_now() const {
  std::vector<std::pair<RankKey, Source::Stats>> all;
  for (const auto& [endpoint, serving] : serving_) all.emplace_back(serving.rank, serving.source->stats());
  return all;
}

// Of who fetches and of who is fetched from; otherwise a step of the trainer's changes nothing here.
std::vector<local::View*> Service::views_in_use() const {
  std::set<RankKey> served;
  for (const auto& [endpoint, serving] : serving_) served.insert(serving.rank);
  std::vector<local::View*> views;
  for (const auto& [key, rank] : ranks_)
    if (rank.joiner || served.contains(key)) views.push_back(rank.view.get());
  return views;
}

std::vector<int> Service::doorbells() const {
  std::vector<int> fds;
  for (const auto* view : views_in_use()) fds.push_back(view->doorbell().get());
  return fds;
}

void Service::arm_doorbells() {
  for (auto* view : views_in_use()) view->wait_for_change();
}

}  // namespace rejoin::catchup
