// All-reduces for small buckets, whose bytes go in messages: between few members all to all, between many in rounds of
// doubling.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "base/digest.h"
#include "ftar/operation.h"
#include "ftar/reduce.h"

namespace rejoin::ftar {

namespace {

constexpr std::uint32_t kMostPlaces = std::bit_width(kMaxMembers) + 1;  // of Doubling

}  // namespace

// ---- room

// Which buckets may go directly: as many as there is memory for in a ring of the most members, so that all members
// choose the same ones.
void Communicator::choose_direct() {
  const std::size_t most = reducer_ ? options_.device_direct_bytes : options_.direct_bytes;
  std::vector<std::size_t> order(buckets_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return buckets_[a].bytes() < buckets_[b].bytes(); });
  // Two inboxes, and of a device pinned room.
  const std::size_t copies = 2 * std::size_t{std::max(options_.direct_members, kMostPlaces)} + 2;
  std::size_t left = options_.direct_memory;
  for (const std::size_t index : order) {
    const std::size_t bytes = round_up(buckets_[index].bytes(), 64);
    if (buckets_[index].bytes() > most || bytes > left / copies) return;
    left -= bytes * copies;
    buckets_[index].small = true;
  }
}

// Pinned room for small buckets of a device.
Result<> Communicator::reserve_direct() {
  if (!reducer_) return {};
  std::size_t total = 0;
  for (const auto& bucket : buckets_)
    if (bucket.small) total += 2 * round_up(bucket.bytes(), 64);
  if (total == 0) return {};
  auto pinned = options_.device->allocate_pinned(total);
  if (!pinned) return tl::unexpected(pinned.error());
  direct_room_ = std::move(*pinned);
  auto rest = direct_room_.bytes;
  for (auto& bucket : buckets_)
    if (bucket.small)
      for (auto* room : {&bucket.own, &bucket.result}) {
        *room = rest.first(bucket.bytes());
        rest = rest.subspan(round_up(bucket.bytes(), 64));
      }
  return {};
}

bool Communicator::direct(const Bucket& bucket) const {
  return bucket.small && ring_.size() <= options_.direct_members &&
         ring_.size() <= group_.links.full_mesh_members.value_or(kMaxMembers);
}

bool Communicator::doubled(const Bucket& bucket) const { return bucket.small && !direct(bucket); }

Doubling Communicator::doubling() const { return {contributors_, static_cast<std::uint32_t>(ring_.size()), position_}; }

// Of a bucket's inbox, as large as this epoch's members need it.
std::uint32_t Communicator::places(const Bucket& bucket) const {
  return !bucket.small ? 0 : direct(bucket) ? contributors_ : doubling().result() + 1;
}

// ---- what comes in

bool Communicator::on_direct_part(Peer& peer, Bucket& bucket, Step step, BytesView message) {
  auto& inbox = bucket.inbox[step.value % 2];
  DirectPart part{};
  if (!take(message, part) || message.empty() || part.place >= inbox.arrived.size()) return false;
  if (direct(bucket) ? part.place != peer.position : doubling().sender(part.place) != peer.position) return false;
  const std::size_t arrived = inbox.step == step ? inbox.arrived[part.place] : 0;
  if (part.offset != arrived || message.size() > bucket.bytes() - arrived) return false;
  if (inbox.step != step) {
    inbox.step = step;
    std::fill(inbox.arrived.begin(), inbox.arrived.end(), std::size_t{0});
  }
  const auto room = std::span(inbox.data).subspan(part.place * bucket.bytes(), bucket.bytes());
  std::memcpy(room.data() + arrived, message.data(), message.size());
  inbox.arrived[part.place] += message.size();
  last_progress_ = now_;
  if (inbox.arrived[part.place] < bucket.bytes()) return true;
  if (direct(bucket) || part.place > 0)
    damage_if_due(step, room);  // what is folded in is the same for all from here on
  if (bucket.running) bucket.running->on_direct();
  return true;
}

BytesView Communicator::received(const Bucket& bucket, std::uint32_t place) const {
  const auto& inbox = bucket.inbox[bucket.step.value % 2];
  if (inbox.step != bucket.step || inbox.arrived[place] < bucket.bytes()) return {};
  return BytesView(inbox.data).subspan(place * bucket.bytes(), bucket.bytes());
}

// ---- any of them

void SmallOperation::start() {
  own_here_ = !owner_.reducer_ || !contributes();
  if (own_here_) {
    begin();
    return on_direct();
  }
  auto copied = owner_.reducer_->copy(bucket_.own.data(), bucket_.spec.input.data(), bucket_.bytes());
  if (owner_.reduced_on_device(copied)) fetching_ = *copied;
}

void SmallOperation::on_reduced(std::uint64_t number) {
  if (fetching_ && number >= *fetching_) {
    fetching_.reset();
    own_here_ = true;
    begin();
    on_direct();
  }
  if (storing_ && number >= *storing_) done_ = true;
}

void SmallOperation::on_direct() {
  if (!own_here_ || storing_ || done_ || !go_on()) return;
  if (!owner_.reducer_) {
    if (owner_.digesting_) digest_ = combine_digests(0, rejoin::digest(bucket_.spec.output));
    done_ = true;
    return;
  }
  auto copied = owner_.reducer_->copy(bucket_.spec.output.data(), out(), bucket_.bytes());
  if (owner_.reduced_on_device(copied)) storing_ = *copied;
}

BytesView SmallOperation::received(std::uint32_t place) const { return owner_.received(bucket_, place); }

void SmallOperation::send(std::uint32_t position, std::uint32_t place, BytesView bytes) {
  Bytes body;
  for (std::size_t at = 0; at < bytes.size(); at += DirectPart::kMost) {
    const BytesView some = bytes.subspan(at, std::min(DirectPart::kMost, bytes.size() - at));
    const DirectPart part{.place = place, .offset = at};
    body.assign(bytes_of(part).begin(), bytes_of(part).end());
    body.insert(body.end(), some.begin(), some.end());
    if (!owner_.send(*owner_.ring_peers_[position], MessageHeader::direct, bucket_.index, bucket_.step.value, body))
      return;  // its `closed` event ends this operation
  }
}

std::optional<Wait> SmallOperation::wait() const {
  if (fetching_ || storing_) return Wait{.what = "its GPU's copies"};
  if (const auto from = waits_for())
    return Wait{.on = owner_.ring_[*from].member, .what = fmt::format("its part of bucket {}", bucket_.index)};
  return std::nullopt;
}

// ---- all to all

void DirectOperation::begin() {
  if (!contributes()) return;
  for (std::uint32_t to = 0; to < owner_.ring_.size(); ++to)
    if (to != owner_.position_) send(to, owner_.position_, bucket_.contribution());
}

BytesView DirectOperation::input(std::uint32_t contributor) const {
  return contributor == owner_.position_ ? bucket_.contribution() : received(contributor);
}

bool DirectOperation::go_on() {
  const std::uint32_t n = owner_.contributors_;
  for (std::uint32_t i = 0; i < n; ++i)
    if (input(i).empty()) return false;
  if (n == 1) bucket_.take(input(0), out());
  for (std::uint32_t i = 1; i < n; ++i)
    add(bucket_.spec.type, out(), i == 1 ? input(0).data() : out(), input(i).data(), bucket_.spec.count,
        i == n - 1 ? bucket_.divisor : 0);
  return true;
}

std::optional<std::uint32_t> DirectOperation::waits_for() const {
  for (std::uint32_t i = 0; i < owner_.contributors_; ++i)
    if (input(i).empty()) return i;
  return std::nullopt;
}

// ---- in rounds

DoublingOperation::DoublingOperation(Communicator& owner, Communicator::Bucket& bucket)
    : SmallOperation(owner, bucket), doubling_(owner.doubling()) {}

void DoublingOperation::begin() {
  sum_ = bucket_.contribution();
  if (!doubling_.in_core()) {
    place_ = doubling_.result();
    if (contributes()) send(doubling_.proxy(), 0, sum_);
  } else if (!doubling_.sender(0)) {
    offer();
  }
}

// The next round, in which the other side gets what is here by now.
void DoublingOperation::offer() {
  if (++place_ > doubling_.rounds()) return;
  if (owner_.digesting_) bucket_.offered[place_] = rejoin::digest(sum_);
  send(*doubling_.sender(place_), place_, sum_);
}

bool DoublingOperation::go_on() {
  while (const auto from = doubling_.sender(place_)) {
    const BytesView theirs = received(place_);
    if (theirs.empty()) return false;
    if (!doubling_.in_core()) {
      std::memcpy(out(), theirs.data(), theirs.size());
      return hand_on();
    }
    const bool last = place_ == doubling_.rounds();
    const auto [first, second] = std::minmax(owner_.position_, *from);
    add(bucket_.spec.type, out(), first == *from ? theirs.data() : sum_.data(),
        second == *from ? theirs.data() : sum_.data(), bucket_.spec.count, last ? bucket_.divisor : 0);
    sum_ = {out(), bucket_.bytes()};
    offer();
  }
  if (sum_.data() != out()) bucket_.take(sum_, out());  // nobody else contributes
  return hand_on();
}

bool DoublingOperation::hand_on() {
  for (auto to : doubling_.beyond()) send(to, doubling_.result(), {out(), bucket_.bytes()});
  return true;
}

std::optional<std::uint32_t> DoublingOperation::waits_for() const { return doubling_.sender(place_); }

}  // namespace rejoin::ftar
