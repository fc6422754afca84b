// Links: how they come up, are watched, fenced and swept away.
#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "base/refusals.h"
#include "transport/striped/engine.h"

namespace rejoin::transport::striped {

namespace {

constexpr std::size_t kClosedRemembered = 4096;

}  // namespace

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
  const wire::Greeting greeting{.connection = {endpoint.connection[0], endpoint.connection[1]},
                                .rail = rail,
                                .generation = state.generations,
                                .rails = static_cast<std::uint32_t>(rails_.size())};
  auto at = rails_[rail]->connect(endpoint.addresses[rail], bytes_of(greeting));
  if (!at) {
    if (state.generations == 0) state.never_up = at.error().message;
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
    refusals::count(refusals::Why::protocol);
    logger().warn("a connection on rail {} was refused: {}", rail, why);
    rails_[rail]->close(event.endpoint);
  };
  if (!take(bytes, greeting) || greeting.magic != wire::kMagic)
    return refuse(
        "it is no striped one of this version; both ends must have the same number of rails (addresses, each with its "
        "threads)");
  if (greeting.rails < 2) return refuse(wire::other_number(greeting.rails, rails_.size()));  // transport/lone/
  if (greeting.rail != rail) return refuse(fmt::format("the peer takes it for its rail {}", greeting.rail));
  const std::array<std::uint64_t, 2> connection{greeting.connection[0], greeting.connection[1]};
  auto found = by_connection_.find(connection);
  if (found == by_connection_.end()) {
    if (greeting.generation > 0 || closed_connections_.contains(connection))
      return rails_[rail]->close(event.endpoint);  // closed here meanwhile
    note_other_number(greeting.rails);
    Endpoint& made = make_endpoint(Stage::accepting);
    made.connection = connection;
    made.expected_rails = std::min(greeting.rails, static_cast<std::uint32_t>(rails_.size()));
    made.expected_until = now_ + 2 * options_.stall;
    found = by_connection_.emplace(connection, &made).first;
  }
  Endpoint& endpoint = *found->second;
  RailState& state = endpoint.rails[rail];
  if (greeting.generation < state.generations) return refuse("it is older than one already seen");
  // Its end came over another rail before it did, and the peer has been told that nothing can land over it any more.
  if (greeting.generation < state.fenced_below) return rails_[rail]->close(event.endpoint);
  if (state.link != nullptr) end_link(endpoint, *state.link, "the peer connected it anew");
  if (endpoint.stage != Stage::accepting && endpoint.stage != Stage::open) return rails_[rail]->close(event.endpoint);
  on_link_open(endpoint, *add_link(endpoint, rail, greeting.generation, event.endpoint));
}

void StripedEngine::on_link_open(Endpoint& endpoint, Link& link) {
  if (!endpoint.lone.empty()) return fail_endpoint(endpoint, ErrorCode::invalid_argument, "");
  link.open = endpoint.rails[link.rail].was_up = true;
  if (link.generation > 0) logger().info("rail {} to the peer is up again", link.rail);
  // The peer takes each message once, whichever rail brings it first.
  if (endpoint.primary == kNoRail || (is_for_bulk(endpoint.primary) && !is_for_bulk(link.rail))) {
    endpoint.primary = link.rail;
    repeat_messages(endpoint);
  }
  if (endpoint.stage == Stage::connecting) {
    endpoint.stage = Stage::open;
    endpoint.expected_until = now_ + 2 * options_.stall;
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

  const bool any_open = std::any_of(endpoint.rails.begin(), endpoint.rails.end(),
                                    [](const RailState& rail) { return rail.link != nullptr && rail.link->open; });
  if (!any_open && !rails_expected(endpoint)) return fail_endpoint(endpoint, ErrorCode::unavailable, why);
  if (!was_open) {
    if (link.generation == 0) state.never_up = why;
    return;
  }
  state.down = why;
  if (endpoint.primary == link.rail) {
    endpoint.primary = kNoRail;  // until one is up, messages are kept
    for (auto rail = endpoint.rails.rbegin(); rail != endpoint.rails.rend(); ++rail)  // those for bulk are the last
      if (rail->link != nullptr && rail->link->open) endpoint.primary = rail->link->rail;
    if (any_open) repeat_messages(endpoint);
  }
  report_fenced(endpoint, link.rail, link.generation, link.landed);
  report_landed(endpoint, link, std::exchange(link.completed, {}));
}

void StripedEngine::report_landed(Endpoint& endpoint, const Link& link, const std::deque<std::uint64_t>& completed) {
  std::vector<std::uint64_t> tags;
  const auto report = [&] {
    if (tags.empty()) return;
    send_control(endpoint, {.kind = wire::Kind::landed, .a = link.rail, .b = link.generation},
                 std::as_bytes(std::span(tags)));
    tags.clear();
  };
  for (const auto tag : completed) {
    if (wire::number_of(tag) < endpoint.all_in_there_below) continue;
    tags.push_back(tag);
    if (tags.size() == wire::kMaxTags) report();
  }
  report();
}

// Whether a rail that has not been up yet may come up soon: the one that was the first to be up need not outlive that.
bool StripedEngine::rails_expected(const Endpoint& endpoint) const {
  const auto any = [&](auto end, const auto& expected) { return std::any_of(endpoint.rails.begin(), end, expected); };
  if (endpoint.stage == Stage::connecting)
    return any(endpoint.rails.end(), [](const RailState& rail) { return rail.link != nullptr; });
  if (now_ >= endpoint.expected_until) return false;  // at both ends, or one would wait for whom the other has given up
  if (endpoint.initiator)
    return any(endpoint.rails.end(),
               [](const RailState& rail) { return rail.link != nullptr && rail.link->generation == 0; });
  return any(endpoint.rails.begin() + endpoint.expected_rails,
             [](const RailState& rail) { return rail.generations == 0; });
}

void StripedEngine::report_fenced(Endpoint& endpoint, std::uint32_t rail, std::uint32_t generation,
                                  const std::deque<std::uint64_t>& landed) {
  if (generation < endpoint.rails[rail].fenced_below) return;
  endpoint.rails[rail].fenced_below = generation + 1;
  const std::vector<std::uint64_t> tags(landed.begin(), landed.end());
  send_control(endpoint, {.kind = wire::Kind::rail_down, .a = rail, .b = generation}, std::as_bytes(std::span(tags)));
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
  endpoint.failure = endpoint.lone.empty() ? why : endpoint.lone;
  shut(endpoint, Stage::failed, {code, endpoint.failure});
  deliver_kept(endpoint, ~std::uint64_t{0});  // what they wait for does not come any more
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
                    .error = endpoint.lone.empty()
                                 ? Error{ErrorCode::unavailable, "the peer is gone: " + endpoint.failure}
                                 : Error{ErrorCode::invalid_argument, endpoint.lone}});
      ++it;
    } else {
      it = endpoints_.erase(it);  // the caller never heard of it
    }
  }
}

std::uint32_t StripedEngine::rails_of_both(const Endpoint& endpoint) const {
  const std::size_t of_both = endpoint.initiator ? endpoint.addresses.size() : endpoint.expected_rails;
  return static_cast<std::uint32_t>(std::min(rails_.size(), of_both));
}

void StripedEngine::note_other_number(std::size_t theirs) {
  if (theirs == rails_.size()) return;
  if (const auto before = other_number_told_.may_say(now_))
    logger().warn("{}. Until then the first {} of both are used", wire::other_number(theirs, rails_.size()),
                  std::min(theirs, rails_.size()));
}

// A rail that was dead before there was a connection is told of as one that dies later; one of our own once for all.
void StripedEngine::note_missing(Endpoint& endpoint) {
  if (endpoint.missing_told || now_ < endpoint.expected_until) return;
  endpoint.missing_told = true;
  for (std::uint32_t rail = 0; rail < rails_of_both(endpoint); ++rail) {
    RailState& state = endpoint.rails[rail];
    if (state.was_up) continue;
    if (const auto own = own_rail(rail); !own) {  // to all peers
      say_down(rail, own.error());
      continue;
    }
    state.down = state.never_up.empty() ? fmt::format("it has not come up in {:.1f} s", seconds(2 * options_.stall))
                                        : fmt::format("it has not come up: {}", state.never_up);
  }
}

// Dead rails are tried again; a rail that holds on to a piece while others go on is dead.
void StripedEngine::check_rails(Endpoint& endpoint) {
  for (auto& state : endpoint.rails)
    if (state.link != nullptr && !state.link->open && now_ - state.link->last_heard >= options_.greeting)
      end_link(endpoint, *state.link, fmt::format("it does not answer in {:.1f} s", seconds(options_.greeting)));
  if (endpoint.primary == kNoRail && !rails_expected(endpoint))
    return fail_endpoint(endpoint, ErrorCode::unavailable, "its other rails did not come up in time");
  if (endpoint.stage != Stage::open) return;
  note_missing(endpoint);
  for (std::uint32_t rail = 0; rail < endpoint.rails.size(); ++rail)
    if (const auto why = std::exchange(endpoint.rails[rail].down, {}); !why.empty())
      if (const auto before = endpoint.rails[rail].reports.may_say(now_))
        logger().warn("rail {} to a peer is down ({}); the others carry on{}", rail, why,
                      *before > 0 ? fmt::format(". It was down {} times since this was last logged", *before) : "");
  if (endpoint.initiator)
    for (std::uint32_t rail = 0; rail < endpoint.rails.size(); ++rail)
      if (endpoint.rails[rail].link == nullptr && endpoint.rails[rail].retry_at <= now_)
        (void)connect_rail(endpoint, rail);
  for (auto& state : endpoint.rails) {
    if (state.link == nullptr || !state.link->open) continue;
    const TimePoint since = waiting_since(endpoint, *state.link);
    if (since == TimePoint::max() || now_ - since < options_.stall / 4) continue;
    probe(endpoint);
    const bool others_live = std::any_of(endpoint.rails.begin(), endpoint.rails.end(), [&](const RailState& other) {
      return other.link != nullptr && other.link != state.link && other.link->open &&
             other.link->last_heard > since + options_.stall / 2;
    });
    const bool awake = now_ - endpoint.awake_since >= options_.stall / 4;  // long enough for this rail to be heard, too
    if (now_ - since > options_.stall && others_live && awake)
      end_link(endpoint, *state.link, fmt::format("nothing moves on it for {:.1f} s", seconds(now_ - since)));
  }
}

// Since when this link has something outstanding for us without having moved: the end of a piece, or the
// acknowledgement of a message.
TimePoint StripedEngine::waiting_since(const Endpoint& endpoint, const Link& link) const {
  TimePoint since = TimePoint::max();
  if (!link.in_flight.empty())  // the oldest is the first
    since = std::max(link.in_flight.begin()->second.posted, link.last_finished);
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

}  // namespace rejoin::transport::striped
