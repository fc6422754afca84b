#include "transport/striped/engine.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "transport/epoll.h"

namespace rejoin::transport::striped {

namespace {

constexpr std::size_t kMaxRails = 16;
constexpr std::size_t kClosedRemembered = 4096;

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
      options_(options),
      clock_(clock),
      check_every_(std::min(options.stall / 8, options.first_retry / 2)),
      by_link_(rails_.size()),
      batches_(rails_.size()),
      now_(clock.now()) {}

// Sleeping: one epoll over the rails' descriptors and a timer. Simulated rails have none; then neither has this.
Result<> StripedEngine::start() {
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

StripedEngine::~StripedEngine() {
  while (!endpoints_.empty()) close(EndpointId(endpoints_.begin()->first));
}

// ---- regions

Result<RegionId> StripedEngine::register_region(std::span<std::byte> memory, MemoryKind kind) {
  return register_on_rails(memory, [&](Engine& rail) { return rail.register_region(memory, kind); });
}

Result<RegionId> StripedEngine::register_dma_buf(const DmaBuf& buffer) {
  return register_on_rails(buffer.memory, [&](Engine& rail) { return rail.register_dma_buf(buffer); });
}

Result<RegionId> StripedEngine::register_on_rails(std::span<std::byte> memory,
                                                  const std::function<Result<RegionId>(Engine&)>& on_rail) {
  RailRegions on_rails;
  std::optional<Error> error;
  for (auto& rail : rails_) {
    auto registered = on_rail(*rail);
    if (!registered) error = registered.error();
    on_rails.push_back(registered ? std::optional(*registered) : std::nullopt);
  }
  if (std::none_of(on_rails.begin(), on_rails.end(), [](const auto& region) { return region.has_value(); }))
    return tl::unexpected(*error);
  if (error)
    spdlog::warn("a rail can't register {} of memory and is not used for it: {}", human_bytes(memory.size()), *error);
  const RegionId id = regions_.add(memory);
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

RemoteRegion StripedEngine::remote(RegionId region) const { return regions_.remote(region); }

// ---- connecting

Result<Address> StripedEngine::listen(const Address& where) {
  const auto parts = split(where.text, '|');
  if (parts.size() != 1 && parts.size() != rails_.size())
    return fail(ErrorCode::invalid_argument, "'{}' names {} addresses for {} rails: give one, or one for each",
                where.text, parts.size(), rails_.size());
  Address all;
  for (std::size_t rail = 0; rail < rails_.size(); ++rail) {
    auto one = rails_[rail]->listen({parts[parts.size() == 1 ? 0 : rail]});
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
  Endpoint& endpoint = make_endpoint(Stage::connecting);
  endpoint.initiator = endpoint.announced = true;
  endpoint.connection = {unguessable_.next(), unguessable_.next()};
  for (auto& address : split(peer.text, '|')) endpoint.addresses.push_back({std::move(address)});
  say(endpoint, {.kind = wire::Kind::hello}, hello);
  Result<> connecting;
  const std::size_t count = std::min(rails_.size(), endpoint.addresses.size());
  for (std::uint32_t rail = 0; rail < count; ++rail)
    if (auto one = connect_rail(endpoint, rail); !one) connecting = one;
  if (endpoint.links.empty()) {
    endpoints_.erase(endpoint.id.value);
    return tl::unexpected(connecting.error());
  }
  return endpoint.id;
}

StripedEngine::Link* StripedEngine::add_link(Endpoint& endpoint, std::uint32_t rail, std::uint32_t generation,
                                             EndpointId at) {
  auto& link = endpoint.links.emplace_back(std::make_unique<Link>());
  link->rail = rail;
  link->generation = generation;
  link->endpoint = at;
  link->last_heard = now_;
  endpoint.rails[rail].link = link.get();
  endpoint.rails[rail].generations = generation + 1;
  by_link_[rail][at.value] = {&endpoint, link.get()};
  return link.get();
}

Result<> StripedEngine::connect_rail(Endpoint& endpoint, std::uint32_t rail) {
  RailState& state = endpoint.rails[rail];
  const wire::Greeting greeting{
      .connection = {endpoint.connection[0], endpoint.connection[1]}, .rail = rail, .generation = state.generations};
  auto at = rails_[rail]->connect(endpoint.addresses[rail], bytes_of(greeting));
  if (!at) {
    ++state.generations;
    retry_later(state);
    return tl::unexpected(at.error());
  }
  state.retry_at = TimePoint::max();
  add_link(endpoint, rail, state.generations, *at);
  return {};
}

void StripedEngine::retry_later(RailState& rail) {
  rail.retry_at = now_ + rail.backoff;
  rail.backoff = std::min(rail.backoff * 2, options_.longest_retry);
}

void StripedEngine::on_accepted(std::uint32_t rail, const Event& event) {
  wire::Greeting greeting;
  BytesView bytes = event.message;
  const auto refuse = [&](std::string_view why) {
    spdlog::warn("a connection on rail {} was refused: {}", rail, why);
    rails_[rail]->close(event.endpoint);
  };
  if (!take(bytes, greeting) || greeting.magic != wire::kMagic)
    return refuse("it is no striped one of this version; both ends must name as many rails");
  if (greeting.rail != rail) return refuse(fmt::format("the peer takes it for its rail {}", greeting.rail));
  const std::array<std::uint64_t, 2> connection{greeting.connection[0], greeting.connection[1]};
  auto found = by_connection_.find(connection);
  if (found == by_connection_.end()) {
    if (greeting.generation > 0 || closed_connections_.contains(connection))
      return rails_[rail]->close(event.endpoint);  // closed here meanwhile
    Endpoint& made = make_endpoint(Stage::accepting);
    made.connection = connection;
    found = by_connection_.emplace(connection, &made).first;
  }
  Endpoint& endpoint = *found->second;
  RailState& state = endpoint.rails[rail];
  if (greeting.generation < state.generations) return refuse("it is older than one already seen");
  if (state.link != nullptr) end_link(endpoint, *state.link, "the peer connected it anew");
  if (endpoint.stage != Stage::accepting && endpoint.stage != Stage::open) return rails_[rail]->close(event.endpoint);
  on_link_open(endpoint, *add_link(endpoint, rail, greeting.generation, event.endpoint));
}

// ---- links

void StripedEngine::on_link_open(Endpoint& endpoint, Link& link) {
  link.open = true;
  if (link.generation > 0) spdlog::info("rail {} to the peer is up again", link.rail);
  if (endpoint.primary == kNoRail) {
    endpoint.primary = link.rail;
    repeat_messages(endpoint);
  }
  if (endpoint.stage == Stage::connecting) {
    endpoint.stage = Stage::open;
    events_.emit({.kind = EventKind::connected, .endpoint = endpoint.id});
  }
  touch(endpoint);
}

// Fences the link and says so; what it carried comes back as its completions arrive.
void StripedEngine::end_link(Endpoint& endpoint, Link& link, const std::string& why) {
  const bool was_open = std::exchange(link.open, false);
  link.ended = true;
  rails_[link.rail]->close(link.endpoint);
  RailState& state = endpoint.rails[link.rail];
  if (state.link == &link) state.link = nullptr;
  if (endpoint.initiator) retry_later(state);
  to_sweep_ = true;
  if (endpoint.stage == Stage::failed || endpoint.stage == Stage::closed) return;

  const auto current = [&](bool open) {
    return std::any_of(endpoint.rails.begin(), endpoint.rails.end(),
                       [&](const RailState& rail) { return rail.link != nullptr && (rail.link->open || !open); });
  };
  if (endpoint.stage == Stage::connecting ? !current(false) : !current(true))
    return fail_endpoint(endpoint, ErrorCode::unavailable, why);
  if (!was_open) return;
  state.down = why;
  if (endpoint.primary == link.rail) {
    for (const auto& rail : endpoint.rails)
      if (rail.link != nullptr && rail.link->open) endpoint.primary = rail.link->rail;
    repeat_messages(endpoint);
  }
  say_fenced(endpoint, link.rail, link.generation, link.landed);
}

void StripedEngine::say_fenced(Endpoint& endpoint, std::uint32_t rail, std::uint32_t generation,
                               const std::deque<std::uint64_t>& landed) {
  if (generation < endpoint.rails[rail].fenced_below) return;
  endpoint.rails[rail].fenced_below = generation + 1;
  const std::vector<std::uint64_t> tags(landed.begin(), landed.end());
  say(endpoint, {.kind = wire::Kind::rail_down, .a = rail, .b = generation}, std::as_bytes(std::span(tags)));
}

// Ends all links; operations end as soon as no rail holds a piece of theirs.
void StripedEngine::shut(Endpoint& endpoint, Stage stage, const Error& error) {
  endpoint.stage = stage;
  for (auto& link : endpoint.links)
    if (!link->ended) end_link(endpoint, *link, error.message);
  endpoint.pending.clear();
  for (auto it = endpoint.operations.begin(); it != endpoint.operations.end();) {
    auto& [number, operation] = *it++;
    if (!operation.error) operation.error = error;
    if (operation.in_flight == 0) complete(endpoint, number);
  }
  if (!endpoint.initiator && by_connection_.erase(endpoint.connection) > 0) {
    closed_connections_.insert(endpoint.connection);
    closed_order_.push_back(endpoint.connection);
    if (closed_order_.size() > kClosedRemembered) {
      closed_connections_.erase(closed_order_.front());
      closed_order_.pop_front();
    }
  }
  to_sweep_ = true;
}

void StripedEngine::fail_endpoint(Endpoint& endpoint, ErrorCode code, const std::string& why) {
  if (endpoint.stage == Stage::failed || endpoint.stage == Stage::closed) return;
  endpoint.failure = why;
  shut(endpoint, Stage::failed, {code, why});
}

void StripedEngine::close(EndpointId id) {
  auto found = endpoints_.find(id.value);
  if (found == endpoints_.end()) return;
  auto endpoint = std::move(found->second);
  endpoints_.erase(found);
  shut(*endpoint, Stage::closed, {ErrorCode::cancelled, "the endpoint was closed"});
  closing_.push_back(std::move(endpoint));
}

bool StripedEngine::drained(Endpoint& endpoint) {
  const bool over = endpoint.stage == Stage::failed || endpoint.stage == Stage::closed;
  std::erase_if(endpoint.links, [&](const std::unique_ptr<Link>& link) {
    if (!link->ended || !link->in_flight.empty() || (!link->orphans.empty() && !over)) return false;
    by_link_[link->rail].erase(link->endpoint.value);
    return true;
  });
  return endpoint.links.empty();
}

void StripedEngine::sweep() {
  if (!std::exchange(to_sweep_, false)) return;
  std::erase_if(closing_, [&](const auto& endpoint) { return drained(*endpoint); });
  for (auto it = endpoints_.begin(); it != endpoints_.end();) {
    Endpoint& endpoint = *it->second;
    const bool empty = drained(endpoint);
    if (endpoint.stage != Stage::failed || !empty || endpoint.announced_end) {
      ++it;
      continue;
    }
    endpoint.announced_end = true;
    if (endpoint.announced) {
      events_.emit({.kind = EventKind::closed,
                    .endpoint = endpoint.id,
                    .error = Error{ErrorCode::unavailable, "the peer is gone: " + endpoint.failure}});
      ++it;
    } else {
      it = endpoints_.erase(it);  // the caller never heard of it
    }
  }
}

// ---- time

// Dead rails are tried again; a rail that holds on to a piece while others go on is dead.
void StripedEngine::check_rails(Endpoint& endpoint) {
  if (endpoint.stage != Stage::open) return;
  for (std::uint32_t rail = 0; rail < endpoint.rails.size(); ++rail)
    if (const auto why = std::exchange(endpoint.rails[rail].down, {}); !why.empty())
      spdlog::warn("rail {} to a peer is down ({}); the others carry on", rail, why);
  if (endpoint.initiator)
    for (std::uint32_t rail = 0; rail < endpoint.rails.size(); ++rail)
      if (endpoint.rails[rail].link == nullptr && endpoint.rails[rail].retry_at <= now_)
        (void)connect_rail(endpoint, rail);
  for (auto& state : endpoint.rails) {
    if (state.link == nullptr || !state.link->open) continue;
    const TimePoint since = waiting_since(endpoint, *state.link);
    if (since == TimePoint::max() || now_ - since < options_.stall / 2) continue;
    probe(endpoint);
    const bool others_live = std::any_of(endpoint.rails.begin(), endpoint.rails.end(), [&](const RailState& other) {
      return other.link != nullptr && other.link != state.link && other.link->open &&
             other.link->last_heard > since + options_.stall / 2;
    });
    if (now_ - since > options_.stall && others_live)
      end_link(endpoint, *state.link, fmt::format("nothing moves on it for {:.1f} s", seconds(now_ - since)));
  }
}

// Since when this link owes us something without having moved: the end of a piece, or word of a message.
TimePoint StripedEngine::waiting_since(const Endpoint& endpoint, const Link& link) const {
  TimePoint since = TimePoint::max();
  for (const auto& [number, piece] : link.in_flight)
    since = std::min(since, std::max(piece.posted, link.last_finished));
  if (endpoint.primary == link.rail && !endpoint.unreceived.empty())
    since = std::min(since, std::max(endpoint.unreceived.front().posted, link.last_heard));
  return since;
}

void StripedEngine::probe(Endpoint& endpoint) {
  for (const auto& state : endpoint.rails) {
    if (state.link == nullptr || !state.link->open || now_ - state.link->last_probed < options_.stall / 8) continue;
    state.link->last_probed = now_;
    const wire::Header header{.kind = wire::Kind::probe};
    (void)rails_[state.link->rail]->send(state.link->endpoint, bytes_of(header));  // refused: it is about to end
  }
}

TimePoint StripedEngine::next_timer() const {
  TimePoint next = TimePoint::max();
  for (const auto& [id, endpoint] : endpoints_) {
    if (endpoint->stage != Stage::open) continue;
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
