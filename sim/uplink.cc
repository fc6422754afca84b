#include "sim/uplink.h"

#include <algorithm>

#include "base/deadlines.h"
#include "sim/world.h"

namespace rejoin::sim {

namespace {

using namespace std::chrono_literals;

constexpr Duration kRetry = 50ms;

}  // namespace

Uplink::Uplink(World& world, Process& of, std::uint32_t caller, std::vector<std::uint32_t> stations, std::string name,
               Handlers handlers)
    : world_(world),
      process_(of),
      caller_(caller),
      stations_(std::move(stations)),
      name_(std::move(name)),
      handlers_(std::move(handlers)),
      tracker_(name_, world.job.silence, stations_.size(), [this](proto::LeaderView& view) { handlers_.hosts(view); }),
      connections_(stations_.size()) {}

TimePoint Uplink::local_now() const { return world_.now_at(process_.machine); }

std::size_t Uplink::connection_of(std::uint64_t link) const {
  const auto found = std::ranges::find_if(
      connections_, [&](const Connection& one) { return link != 0 && (one.link == link || one.connecting == link); });
  return static_cast<std::size_t>(found - connections_.begin());
}

void Uplink::on_link_up(std::uint64_t answered) {
  const std::size_t i = connection_of(answered);
  if (i == connections_.size() || connections_[i].connecting != answered) return;
  connections_[i].connecting = 0;
  if (const auto silent = std::exchange(connections_[i].link, 0); silent != 0) {
    hang_up(silent);
    act(tracker_.on_disconnected(i, local_now()));
  }
  connections_[i].link = answered;
  connections_[i].heard = local_now();
  act(tracker_.on_connected(i, local_now()));
}

void Uplink::on_link_down(std::uint64_t gone) {
  const std::size_t i = connection_of(gone);
  if (i == connections_.size()) return;
  if (connections_[i].connecting == gone) connections_[i].connecting = 0;
  if (connections_[i].link == gone) lose(i);
}

void Uplink::lose(std::size_t i) {
  connections_[i].link = 0;
  if (connections_[i].connecting == 0) connections_[i].connect_at = local_now() + kRetry;
  act(tracker_.on_disconnected(i, local_now()));
}

void Uplink::on_control_message(std::uint64_t from, const proto::ToNode& message) {
  const std::size_t i = connection_of(from);
  if (i == connections_.size() || connections_[i].link != from) return;
  connections_[i].heard = local_now();
  if (const auto beside = std::exchange(connections_[i].connecting, 0); beside != 0) hang_up(beside);
  const auto actions = tracker_.on_message(i, message, local_now());
  act(actions);
  if (actions.pass) handlers_.message(message);
}

void Uplink::act(const membership::LeaderTracker::Actions& actions) {
  for (const auto& note : actions.notes) world_.note("{}: {}", name_, note.text);
  for (const auto& [to, message] : actions.send)
    if (connections_[to].link != 0) tell(connections_[to].link, message);
  if (actions.down) handlers_.down();
  if (actions.up) {
    hears_since_ = local_now();
    handlers_.up();
  }
  for (auto i : actions.close) {
    hang_up(connections_[i].link);
    lose(i);
  }
}

void Uplink::send(const proto::FromNode& message) {
  if (const auto leader = tracker_.leader(); leader && connections_[*leader].link != 0)
    tell(connections_[*leader].link, message);
}

void Uplink::tell(std::uint64_t link, const proto::FromNode& message) {
  world_.send(process_, [this, link, said = handlers_.said(message)] { world_.to_station(link, said); });
}

void Uplink::hang_up(std::uint64_t link) {
  world_.send(process_, [this, link] { world_.close_link(link); });
}

void Uplink::tick() { act(tracker_.on_tick(local_now())); }

void Uplink::check(TimePoint heard) {
  const auto leader = tracker_.leader();
  if (!leader || local_now() - heard <= world_.job.silence) return;
  hang_up(connections_[*leader].link);
  lose(*leader);
}

void Uplink::call_all() {
  for (std::size_t i = 0; i < connections_.size(); ++i) call(i);
}

// As Upstream does; also beside a connection over which nothing is heard.
void Uplink::call(std::size_t i) {
  Connection& to = connections_[i];
  const TimePoint now = local_now();
  if (to.connecting != 0 && now >= to.connect_at) hang_up(std::exchange(to.connecting, 0));
  const bool heard = to.link != 0 && now - to.heard <= deadlines::kForgotten.of(world_.job.silence);
  if (heard || to.connecting != 0 || now < to.connect_at) return;
  to.connecting = world_.connect(caller_, stations_[i]);
  to.connect_at = now + (to.connecting != 0 ? world_.job.silence : kRetry);
}

bool Uplink::hears(std::uint32_t coordinator, Duration since) const {
  const auto leader = tracker_.leader();
  return !process_.stopped && tracker_.hears_leader() && stations_[*leader] == coordinator &&
         local_now() - std::max(hears_since_, tracker_.hears_since()) >= since;
}

std::uint64_t Uplink::any_link(Random& chance) const {
  const std::size_t any = chance.pick(connections_.size());
  return connections_[chance.one_in(2) ? tracker_.leader().value_or(any) : any].link;
}

void Uplink::end() {
  for (const auto& one : connections_)
    for (auto number : {one.link, one.connecting})
      if (number != 0) world_.close_link(number);
}

}  // namespace rejoin::sim
