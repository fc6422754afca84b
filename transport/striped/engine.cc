#include "transport/striped/engine.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "base/deadlines.h"
#include "base/fail.h"
#include "base/log.h"
#include "base/number.h"
#include "transport/epoll.h"

namespace rejoin::transport::striped {

namespace {

// The same host at a port that is larger by so much; where the system picks one, or there is none, as it is.
std::string with_later_port(const std::string& address, std::size_t by) {
  const auto colon = address.rfind(':');
  std::uint32_t port = 0;
  if (by == 0 || colon == std::string::npos || !parse_number(std::string_view(address).substr(colon + 1), port) ||
      port == 0)
    return address;
  return fmt::format("{}:{}", address.substr(0, colon), port + by);
}

}  // namespace

Result<std::unique_ptr<Engine>> make_engine(std::vector<std::unique_ptr<Engine>> rails, const Options& options,
                                            const Clock& clock) {
  if (rails.empty() || rails.size() > kMaxRails)
    return fail(ErrorCode::invalid_argument, "{} rails; there must be 1 to {}", rails.size(), kMaxRails);
  if (options.smallest_piece == 0 || options.largest_piece < options.smallest_piece)
    return fail(ErrorCode::invalid_argument,
                "pieces of {} to {} bytes: the smallest must be above 0 and at most the largest",
                options.smallest_piece, options.largest_piece);
  auto engine = std::make_unique<StripedEngine>(std::move(rails), options, clock);
  if (auto started = engine->start(); !started) return tl::unexpected(started.error());
  return engine;
}

StripedEngine::StripedEngine(std::vector<std::unique_ptr<Engine>> rails, const Options& options, const Clock& clock)
    : rails_(std::move(rails)),
      own_down_(rails_.size(), Seldom(kSameLineAgain)),
      other_number_told_(kSameLineAgain),
      options_(options),
      clock_(clock),
      check_every_(looks_every()),
      by_link_(rails_.size()),
      batches_(rails_.size()),
      now_(clock.now()) {}

// Sleeping: one epoll over the rails' descriptors and a timer. Simulated rails have none; then neither has this.
Result<> StripedEngine::start() {
  if (auto any = look_at_own_rails(); !any) return any;
  for (const auto& rail : rails_)
    if (rail->event_fd() < 0) return {};
  epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  timer_ = Fd(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!epoll_ || !timer_) return fail_errno("epoll or timer of a striped engine");
  if (auto added = add_to(epoll_, timer_.get()); !added) return added;
  for (const auto& rail : rails_)
    if (auto added = add_to(epoll_, rail->event_fd()); !added) return added;
  return {};
}

// A rail that is down at the start is as one that dies later; only without any there is nothing to start with.
Result<> StripedEngine::look_at_own_rails() {
  Result<> first;
  std::size_t down = 0;
  const std::size_t own = std::min(rails_.size(), options_.first_bulk_rail);
  std::vector<Result<>> all;
  for (std::uint32_t rail = 0; rail < own; ++rail) {
    all.push_back(own_rail(rail));
    if (all.back()) continue;
    if (all.back().error().code == ErrorCode::invalid_argument) return all.back();
    if (down++ == 0) first = all.back();
  }
  if (down == own) return first;
  for (std::uint32_t rail = 0; rail < own; ++rail)
    if (!all[rail]) say_down(rail, all[rail].error());
  return {};
}

// Rails for bulk have the local addresses of those before them.
Result<> StripedEngine::own_rail(std::uint32_t rail) { return rails_[rail % options_.first_bulk_rail]->usable(); }

void StripedEngine::say_down(std::uint32_t rail, const Error& why) {
  if (const auto before = own_down_[rail % options_.first_bulk_rail].may_say(now_))
    logger().warn("rail {} of this process is down: {}; the others carry on, and it is tried again", rail, why);
}

StripedEngine::~StripedEngine() {
  while (!endpoints_.empty()) close(EndpointId(endpoints_.begin()->first));
}

// ---- regions

Result<RegionId> StripedEngine::register_region(std::span<std::byte> memory, MemoryKind kind, Access access) {
  return register_on_rails(memory, access, [&](Engine& rail) { return rail.register_region(memory, kind, access); });
}

Result<RegionId> StripedEngine::register_dma_buf(const DmaBuf& buffer, Access access) {
  return register_on_rails(buffer.memory, access, [&](Engine& rail) { return rail.register_dma_buf(buffer, access); });
}

Result<RegionId> StripedEngine::register_on_rails(std::span<std::byte> memory, Access access,
                                                  const std::function<Result<RegionId>(Engine&)>& on_rail) {
  RailRegions on_rails;
  std::optional<Error> error;
  for (auto& rail : rails_) {
    auto registered = on_rail(*rail);
    if (!registered) error = registered.error();
    on_rails.push_back(registered ? std::optional(*registered) : std::nullopt);
  }
  // One whose device is not there takes everything, and may take none of it when it is.
  bool any = false;
  for (std::uint32_t rail = 0; rail < rails_.size() && !any; ++rail) any = on_rails[rail] && (!error || own_rail(rail));
  if (!any) {
    for (std::uint32_t rail = 0; rail < rails_.size(); ++rail)
      if (on_rails[rail]) rails_[rail]->deregister(*on_rails[rail]);
    return tl::unexpected(*error);
  }
  if (error)
    logger().warn("a rail can't register {} of memory and is not used for it: {}", human_bytes(memory.size()), *error);
  const RegionId id = regions_.add(memory, access);
  rail_regions_[id.value] = std::move(on_rails);
  return id;
}

void StripedEngine::deregister(RegionId id) {
  auto on_rails = rail_regions_.extract(id.value);
  if (on_rails.empty()) return;
  regions_.remove(id);
  for (std::size_t rail = 0; rail < rails_.size(); ++rail)
    if (on_rails.mapped()[rail]) rails_[rail]->deregister(*on_rails.mapped()[rail]);
}

// Rails that are tried again later prove what their listener takes then: a connection outlives a change of the job's
// key.
void StripedEngine::set_secrets(const Secrets& secrets) {
  const Secrets before = std::exchange(secrets_, secrets);
  for (auto& [id, endpoint] : endpoints_)
    for (auto& address : endpoint->addresses)
      if (address.secret == before.own || (before.other && address.secret == *before.other))
        address.secret = secrets.own;
  for (auto& rail : rails_) rail->set_secrets(secrets);
}

void StripedEngine::set_silence(Duration silence) {
  options_.stall = deadlines::kRailStall.of(silence);
  options_.first_retry = deadlines::kFirstRailRetry.of(silence);
  options_.longest_retry = deadlines::kLongestRailRetry.of(silence);
  options_.greeting = deadlines::kDataProof.of(silence);
  check_every_ = looks_every();
  for (auto& rail : rails_) rail->set_silence(silence);
}

Duration StripedEngine::looks_every() const { return std::min(options_.stall / 8, options_.first_retry / 2); }

RemoteRegion StripedEngine::remote(RegionId region) const { return regions_.remote(region); }

std::uint64_t StripedEngine::refused() const {
  return std::accumulate(rails_.begin(), rails_.end(), regions_.refused(),
                         [](std::uint64_t sum, const auto& rail) { return sum + rail->refused(); });
}

// ---- connecting

Result<Address> StripedEngine::listen(const Address& where) {
  const auto parts = split(where.text, '|');
  if (parts.size() != 1 && parts.size() != rails_.size())
    return fail(ErrorCode::invalid_argument, "'{}' names {} addresses for {} rails: give one, or one for each",
                where.text, parts.size(), rails_.size());
  Address all;
  for (std::size_t rail = 0; rail < rails_.size(); ++rail) {
    const std::string& given = parts[parts.size() == 1 ? 0 : rail];
    // Rails for bulk have the local addresses of those before them.
    const std::string own = parts.size() == 1 ? with_later_port(given, rail / options_.first_bulk_rail) : given;
    auto one = rails_[rail]->listen({own});
    if (!one) return one;
    all.text += (rail > 0 ? "|" : "") + one->text;
  }
  return all;
}

StripedEngine::Endpoint& StripedEngine::make_endpoint(Stage stage) {
  auto endpoint = std::make_unique<Endpoint>();
  endpoint->id = EndpointId(unguessable_.next());
  endpoint->stage = stage;
  endpoint->rails.resize(rails_.size());
  for (auto& rail : endpoint->rails) rail.backoff = options_.first_retry;
  Endpoint& made = *endpoint;
  endpoints_[made.id.value] = std::move(endpoint);
  return made;
}

Result<EndpointId> StripedEngine::connect(const Address& peer, BytesView hello) {
  if (auto checked = check_hello(hello); !checked) return tl::unexpected(checked.error());
  now_ = clock_.now();  // the last poll() may be long ago, and the rails' greetings begin now
  Endpoint& endpoint = make_endpoint(Stage::connecting);
  endpoint.initiator = endpoint.announced = true;
  endpoint.connection = {unguessable_.next(), unguessable_.next()};
  for (auto& address : split(peer.text, '|')) endpoint.addresses.push_back({std::move(address), peer.secret});
  send_control(endpoint, {.kind = wire::Kind::hello}, hello);
  // A lone one is called all the same, so that it says so, too.
  if (endpoint.addresses.size() == 1) endpoint.lone = wire::other_number(1, rails_.size());
  else note_other_number(endpoint.addresses.size());
  Result<> connecting;
  const std::size_t count = std::min(rails_.size(), endpoint.addresses.size());
  for (std::uint32_t rail = 0; rail < count; ++rail)
    if (auto one = connect_rail(endpoint, rail); !one) connecting = one;
  if (endpoint.links.empty()) {
    Error error = endpoint.lone.empty() ? connecting.error() : Error{ErrorCode::invalid_argument, endpoint.lone};
    endpoints_.erase(endpoint.id.value);
    return tl::unexpected(std::move(error));
  }
  return endpoint.id;
}

// ---- time

TimePoint StripedEngine::next_timer() const {
  TimePoint next = TimePoint::max();
  for (const auto& [id, endpoint] : endpoints_) {
    if (endpoint->stage == Stage::failed) continue;
    // Such a time may be over before anybody looks.
    const auto look_at = [&](TimePoint then) { next = std::min(next, std::max(then, checked_ + check_every_)); };
    if (endpoint->primary == kNoRail && endpoint->stage != Stage::connecting) look_at(endpoint->expected_until);
    for (const auto& rail : endpoint->rails)
      if (rail.link != nullptr && !rail.link->open) look_at(rail.link->last_heard + options_.greeting);
    if (endpoint->stage != Stage::open) continue;
    if (!endpoint->missing_told) look_at(endpoint->expected_until);
    std::size_t open = 0, busy = 0;
    for (const auto& rail : endpoint->rails) {
      if (rail.link == nullptr) next = std::min(next, rail.retry_at);
      open += rail.link != nullptr && rail.link->open;
      busy += rail.link != nullptr && waiting_since(*endpoint, *rail.link) != TimePoint::max();
    }
    if (open > 1 && busy > 0) next = std::min(next, now_ + options_.stall / 8);
  }
  return next;
}

bool StripedEngine::arm() {
  if (!events_.empty() || !dirty_.empty() || to_sweep_) return false;
  for (auto& rail : rails_)
    if (!rail->arm()) return false;
  if (!timer_) return true;
  if (const TimePoint next = next_timer(); next != timer_at_) {
    timer_at_ = next;
    itimerspec when{};
    if (next != TimePoint::max()) {
      const auto since = std::max<std::int64_t>(1, next.time_since_epoch().count());
      when.it_value = {since / 1'000'000'000, since % 1'000'000'000};
    }
    REJOIN_CHECK(::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr) == 0, "timerfd_settime");
  }
  return true;
}

std::vector<Rail> StripedEngine::rails() const {
  std::vector<Rail> all(rails_.size());
  for (const auto& [id, endpoint] : endpoints_) {
    if (endpoint->stage != Stage::open) continue;
    for (std::uint32_t i = 0; i < rails_of_both(*endpoint); ++i) {
      ++all[i].peers;
      const Link* link = endpoint->rails[i].link;
      if (link != nullptr && link->open) ++all[i].up;
    }
  }
  return all;
}

// Of the shortest path.
std::optional<Duration> StripedEngine::round_trip(EndpointId id) const {
  const auto found = endpoints_.find(id.value);
  if (found == endpoints_.end()) return std::nullopt;
  std::optional<Duration> least;
  for (const auto& link : found->second->links) {
    if (!link->open) continue;
    const auto its = rails_[link->rail]->round_trip(link->endpoint);
    if (its && (!least || *its < *least)) least = its;
  }
  return least;
}

// Of one rail that stands while others move, check_rails() takes care.
std::optional<std::uint64_t> StripedEngine::acknowledged(EndpointId id) const {
  const auto found = endpoints_.find(id.value);
  if (found == endpoints_.end()) return std::nullopt;
  std::optional<std::uint64_t> all;
  for (const auto& link : found->second->links) {
    if (!link->open) continue;
    const auto its = rails_[link->rail]->acknowledged(link->endpoint);
    if (!its) return std::nullopt;
    all = all.value_or(0) + *its;
  }
  return all;
}

std::span<const Event> StripedEngine::poll() {
  now_ = clock_.now();
  if (timer_ && now_ >= timer_at_) {
    std::uint64_t expirations = 0;
    (void)!::read(timer_.get(), &expirations, sizeof expirations);  // nothing there: it was set anew meanwhile
    timer_at_ = TimePoint::max();
  }
  for (std::uint32_t rail = 0; rail < rails_.size(); ++rail)
    for (const auto& event : rails_[rail]->poll()) on_rail_event(rail, event);
  if (now_ - checked_ >= check_every_) {
    checked_ = now_;
    for (auto& [id, endpoint] : endpoints_) check_rails(*endpoint);
  }
  for (auto id : std::exchange(dirty_, {}))
    if (Endpoint* endpoint = find(id)) {
      endpoint->dirty = false;
      pump(*endpoint);
    }
  sweep();
  return events_.take();
}

}  // namespace rejoin::transport::striped
