#include "transport/sim/fabric.h"

#include <fmt/format.h>

#include "transport/sim/engine.h"

namespace rejoin::transport::sim {

namespace {

// All engines that a fabric is told about are its own, and its to change.
SimEngine& made_here(const Engine& engine) { return const_cast<SimEngine&>(static_cast<const SimEngine&>(engine)); }

}  // namespace

std::unique_ptr<Engine> Fabric::make_engine() {
  const std::uint32_t number = engines_made_++;
  auto engine = std::make_unique<SimEngine>(*this, number);
  engines_[number] = engine.get();
  return engine;
}

SimEngine* Fabric::engine(std::uint32_t number) const {
  auto found = engines_.find(number);
  return found == engines_.end() || found->second->dead_ ? nullptr : found->second;
}

std::uint32_t Fabric::engine_at(std::uint32_t address) const {
  const auto found = moved_.find(address);
  return found == moved_.end() ? address : found->second;
}

Address Fabric::move(const Engine& engine) {
  const std::uint32_t number = made_here(engine).number_, address = engines_made_++;
  for (auto& [before, whose] : moved_)
    if (whose == number) whose = kNobody;
  moved_[number] = kNobody;
  moved_[address] = number;
  return {fmt::format("sim:{}", address)};
}

void Fabric::after(Duration delay, std::function<void()> action) {
  agenda_.emplace(std::pair(clock_.now() + delay, sequence_++), std::move(action));
}

Duration Fabric::pick(Duration least, Duration most) {
  return Duration(std::uniform_int_distribution<std::int64_t>(least.count(), most.count())(random_));
}

bool Fabric::step() {
  if (agenda_.empty()) return false;
  auto next = agenda_.begin();
  if (next->first.first > clock_.now()) clock_.set(next->first.first);
  auto action = std::move(next->second);
  agenda_.erase(next);
  action();
  return true;
}

TimePoint Fabric::next_event() const { return agenda_.empty() ? TimePoint::max() : agenda_.begin()->first.first; }

void Fabric::cut(const Engine& engine) {
  auto& mine = made_here(engine);
  for (auto& [id, endpoint] : mine.endpoints_) break_there(mine, EndpointId(id), options_.detection, "connection lost");
}

void Fabric::kill(const Engine& engine) {
  auto& victim = made_here(engine);
  victim.dead_ = true;
  for (const auto& [id, endpoint] : victim.endpoints_) {
    if (endpoint.forgotten) continue;
    const auto peer_engine = endpoint.peer_engine;
    const auto peer = endpoint.peer;
    const auto later = options_.spread > Duration{} ? pick(Duration{}, options_.spread) : Duration{};
    after(options_.detection + later, [this, peer_engine, peer] {
      if (auto* other = this->engine(peer_engine)) other->fail_endpoint(peer, "process died");
    });
  }
}

void Fabric::stop(const Engine& engine) { made_here(engine).stopped_ = true; }

void Fabric::slow(const Engine& engine, Duration out, Duration in, TimePoint until) {
  auto& slowed = made_here(engine);
  slowed.slow_out_ = out;
  slowed.slow_in_ = in;
  slowed.slow_until_ = until;
}

Duration Fabric::slowness(std::uint32_t from, std::uint32_t to) {
  const SimEngine* sender = engine(from);
  const SimEngine* receiver = engine(to);
  const TimePoint now = clock_.now();
  const auto hole = blocked_.find({from, to});
  const Duration blocked = hole != blocked_.end() && hole->second > now ? hole->second - now : Duration{};
  return std::max(blocked, parted(from, to)) + (far(from, to) ? options_.between_rooms : Duration{}) +
         (sender != nullptr && sender->slow_until_ > now ? sender->slow_out_ : Duration{}) +
         (receiver != nullptr && receiver->slow_until_ > now ? receiver->slow_in_ : Duration{});
}

Duration Fabric::parted(std::uint32_t from, std::uint32_t to) const {
  const SimEngine *sender = engine(from), *receiver = engine(to);
  if (parted_.empty() || sender == nullptr || receiver == nullptr) return {};
  const auto cut = parted_.find({sender->place_, receiver->place_});
  return cut == parted_.end() ? Duration{} : std::max(Duration{}, cut->second - clock_.now());
}

bool Fabric::far(std::uint32_t one, std::uint32_t other) const {
  const SimEngine *here = engine(one), *there = engine(other);
  return here != nullptr && there != nullptr && here->room_ != there->room_;
}

Duration Fabric::least_latency(std::uint32_t from, std::uint32_t to) const {
  return options_.min_delay + (far(from, to) ? options_.between_rooms : Duration{});
}

void Fabric::stand(const Engine& engine, std::uint32_t room) { made_here(engine).room_ = room; }

void Fabric::block(const Engine& from, const Engine& to, TimePoint until) {
  TimePoint& hole = blocked_[{made_here(from).number_, made_here(to).number_}];
  hole = std::max(hole, until);
}

void Fabric::belong(const Engine& engine, std::uint32_t place) { made_here(engine).place_ = place; }

void Fabric::part(std::uint32_t from, std::uint32_t to, TimePoint until) {
  TimePoint& cut = parted_[{from, to}];
  cut = std::max(cut, until);
}

void Fabric::reset(const Engine& engine, std::uint64_t which) {
  auto& mine = made_here(engine);
  if (mine.endpoints_.empty()) return;
  const auto one = std::next(mine.endpoints_.begin(), static_cast<std::ptrdiff_t>(which % mine.endpoints_.size()));
  break_there(mine, EndpointId(one->first), options_.detection, "connection reset");
}

void Fabric::forget(const Engine& engine, Duration until_found) {
  auto& mine = made_here(engine);
  for (auto& [id, endpoint] : mine.endpoints_) {
    auto* other = this->engine(endpoint.peer_engine);
    auto* there = other == nullptr ? nullptr : other->open(endpoint.peer);
    if (there == nullptr || !endpoint.connected || !there->connected || endpoint.failed) continue;
    endpoint.forgotten = there->forgotten = true;
    const auto end = [this, until_found](std::uint32_t number, EndpointId which) {
      after(until_found, [this, number, which] {
        if (auto* living = this->engine(number)) living->fail_endpoint(which, "it acknowledges nothing");
      });
    };
    end(mine.number_, EndpointId(id));
    end(endpoint.peer_engine, endpoint.peer);
  }
}

void Fabric::break_there(SimEngine& engine, EndpointId id, Duration heard, const std::string& why) {
  const auto* endpoint = engine.open(id);
  if (endpoint == nullptr) return;
  if (!endpoint->forgotten)
    after(heard, [this, peer_engine = endpoint->peer_engine, peer = endpoint->peer, why] {
      if (auto* other = this->engine(peer_engine)) other->fail_endpoint(peer, why);
    });
  engine.fail_endpoint(id, why);
}

void Fabric::refuse_memory(const Engine& engine, std::uint64_t times) { made_here(engine).refuse_memory_ = times; }

void Fabric::slow_memory(const Engine& engine, Duration takes) { made_here(engine).slow_memory_ = takes; }

Duration Fabric::take_registering(const Engine& engine) { return std::exchange(made_here(engine).registering_, {}); }

Fabric::Held Fabric::held(const Engine& engine) const {
  const auto& of = made_here(engine);
  Held held{.endpoints = of.endpoints_.size(), .regions = of.regions_.size()};
  for (const auto& [id, endpoint] : of.endpoints_) held.unheard = std::max(held.unheard, *endpoint.unheard);
  return held;
}

void Fabric::damage_next_write(const Engine& engine) { made_here(engine).damage_ = true; }

void Fabric::resume(const Engine& engine) {
  auto& stopped = made_here(engine);
  stopped.stopped_ = false;
  for (auto& action : std::exchange(stopped.held_, {})) action();
}

}  // namespace rejoin::transport::sim
