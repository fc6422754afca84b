#include "catchup/joiner.h"

#include <algorithm>

#include "base/deadlines.h"
#include "base/events.h"
#include "base/fail.h"
#include "base/log.h"
#include "catchup/source.h"

namespace rejoin::catchup {

namespace {

constexpr std::uint32_t kWindow = 16;  // slices under way from one source

}  // namespace

Joiner::Joiner(transport::Engine& engine, local::View& view, std::vector<transport::RegionId> state, Proofs& proofs,
               Step committed, Duration silence, TimePoint now)
    : engine_(engine),
      view_(view),
      state_(std::move(state)),
      proofs_(proofs),
      planner_(static_cast<std::uint32_t>(view.manifest().slices().size()), kWindow),
      oldest_(committed.value),
      at_first_(view.clock()),
      foreign_(at_first_.version > oldest_),
      silence_(silence),
      came_at_(now),
      verified_(view.manifest().slices().size()),
      now_(now),
      started_(now) {
  // The daemon before this one may have got far: what has arrived or is kept current is only verified again; if it had
  // called all of it complete, it is. The clock is read first: a status that is behind it then is behind for good.
  bool complete = view.complete();
  if (at_first_.updating) update_of_void_ = at_first_;  // what is void may have been voided under that update
  proofs_.begin(verified_.size());
  for (std::uint32_t i = 0; i < view.manifest().slices().size(); ++i)
    for (bool settled = false; !settled;) {
      const local::SliceStatus status = view.slice(i);
      const bool kept = status.state == local::SliceState::arrived ||
                        (status.state == local::SliceState::current && status.version() >= at_first_.version);
      if (kept) {
        planner_.on_present(i);
        unverified_.insert(i);
        unproven_.insert(i);
      }
      complete = complete && kept;
      settled = kept || view.set_slice(i, status, {});
    }
  if (!complete) return;
  verified_.assign(verified_.size(), true);
  verified_count_ = static_cast<std::uint32_t>(verified_.size());
  unverified_.clear();
  unproven_.clear();
  for (std::uint32_t i = 0; i < verified_.size(); ++i) proofs_.add(i);
  done_ = true;
  finished_ = now;
}

Joiner::~Joiner() {
  for (auto& question : questions_) drop(question);
}

void Joiner::expect(const std::map<ReplicaId, Incarnation>& sources, TimePoint now) {
  const auto same = [](const auto& known, const auto& given) {
    return known.first == given.first && known.second.incarnation == given.second;
  };
  if (std::equal(expected_.begin(), expected_.end(), sources.begin(), sources.end(), same)) return;
  auto before = std::exchange(expected_, {});
  for (const auto& [source, incarnation] : sources) {
    auto known = before.find(source);
    if (known != before.end() && known->second.incarnation == incarnation) expected_[source] = std::move(known->second);
    else expected_[source] = {incarnation, now, {}, std::vector<bool>(view_.manifest().slices().size())};
  }
  ranks_.reset();
  suspects_.clear();  // whoever was wrong may have gone
  recheck_verified();
}

void Joiner::on_source_up(ReplicaId source, transport::EndpointId endpoint) {
  sources_[source] = {.endpoint = endpoint, .moved_at = now_};
  events::record(events::Kind::source_up, {.replica = source.value});
  if (const auto round_trip = engine_.round_trip(endpoint)) round_trips_[source] = length_of(*round_trip);
  ranks_.reset();
  if (!stands_still(source)) planner_.on_source_up(source);
  if (auto known = expected_.find(source); known != expected_.end()) known->second.connected_at = now_;
  recheck_verified();
  ask_for_sign(sources_[source]);
  if (stands_still(source)) ask_for_any_answer(sources_[source]);
}

void Joiner::on_source_down(ReplicaId source) {
  if (sources_.erase(source) + fellows_.erase(source) > 0)
    events::record(events::Kind::source_lost, {.replica = source.value});
  round_trips_.erase(source);
  ranks_.reset();
  landed_.forget(source);
  planner_.on_source_down(source);
  for (std::uint32_t i = 0; i < view_.manifest().slices().size(); ++i) {
    // What was outstanding from it is absent again; the planner has put it back.
    if (const auto status = view_.slice(i); status.requested_from(source.value)) view_.set_slice(i, status, {});
  }
  for (auto& question : questions_)
    if (auto asked = question.asked.find(source); asked != question.asked.end()) asked->second.over = true;
  auto known = expected_.find(source);
  if (known != expected_.end() && !known->second.missing_since) known->second.missing_since = now_;
}

Result<> Joiner::on_message(ReplicaId source, const proto::Stream& message) {
  const bool fellow = fellows_.contains(source);
  if (!sources_.contains(source) && !fellow) return {};
  if (auto known = expected_.find(source); known != expected_.end()) heard(known->second);
  if (auto connected = sources_.find(source); connected != sources_.end()) {
    Source& its = connected->second;
    its.moved_at = now_;
    its.older = its.older || (!its.gives_signs && !message.has_sign());
    if (message.has_sign()) {
      its.gives_signs = true;
      its.asked_at.reset();
      return {};
    }
  }
  if (message.has_sent()) heard_of(source);
  if (message.has_sent()) return on_sent(source, message.sent());
  if (fellow && message.has_offers()) return on_offers(source, message.offers());
  if (fellow) return fail(ErrorCode::corrupt, "another joiner sent a message that it has no business to send");
  if (message.has_verify_reply()) return on_verify_reply(source, message.verify_reply());
  return fail(ErrorCode::corrupt, "a source sent a message that only joiners send");
}

void Joiner::on_written(ReplicaId source, const transport::Event& event) {
  heard_of(source);
  const auto& manifest = view_.manifest();
  const auto [part, column, coded, generation] = WriteTag::unpack(event.value);
  if (coded || part >= manifest.parts().size()) return;     // nonsense: the digests at the end tell
  if (view_.kind() != transport::MemoryKind::host) return;  // no cache to profit from: all columns at once, at the end
  const local::Part& range = manifest.parts()[part];
  if (column >= manifest.columns(range)) return;
  const auto place = view_.column(range, column);
  const auto known = event.digested ? event.digested->of(place) : std::nullopt;
  landed_.add({source, generation}, part, column, known ? *known : view_.digest(place));
}

Result<> Joiner::on_sent(ReplicaId source, const proto::Sent& sent) {
  const auto& manifest = view_.manifest();
  if (sent.slice() >= manifest.slices().size() ||
      static_cast<std::uint32_t>(sent.digests().size()) != manifest.slices()[sent.slice()].parts ||
      sent.generations().size() != sent.digests().size())
    return fail(ErrorCode::corrupt, "a source sent slice {} with {} digests", sent.slice(), sent.digests().size());
  if (sent.version() >= local::SliceStatus::kVersions)
    return fail(ErrorCode::corrupt, "a source sent slice {} at version {}", sent.slice(), sent.version());
  arrivals_.push_back({source, sent});
  if (arrivals_.size() >= view_.digests_at_once()) take_in_arrivals();
  return {};
}

// Decodes what is coded, in place, and compares digests.
void Joiner::take_in_arrivals() {
  const auto& manifest = view_.manifest();
  auto arrivals = std::exchange(arrivals_, {});
  view_.flush_remote_writes();
  std::erase_if(arrivals, [&](const Arrival& arrival) {  // those asked for again meanwhile
    return !planner_.on_arrived(arrival.source, arrival.sent.slice());
  });
  struct Compared {
    Arrival* arrival;
    std::uint64_t theirs;
  };
  std::vector<Compared> compared;
  std::vector<local::Columns> parts;
  for (auto& arrival : arrivals) {
    const auto& slice = manifest.slices()[arrival.sent.slice()];
    arrival.intact = decode(arrival);
    for (std::uint32_t i = 0; i < slice.parts && arrival.intact; ++i) {
      const auto theirs = arrival.sent.digests(static_cast<int>(i));
      const std::uint32_t part = slice.first_part + i;
      if (const auto ours = landed_.take(arrival.generation(i), part, manifest.columns(manifest.parts()[part]))) {
        arrival.intact = *ours == theirs;
      } else {
        compared.push_back({&arrival, theirs});
        parts.push_back(view_.columns(manifest.part(arrival.sent.slice(), i)));
      }
    }
  }
  if (!parts.empty()) {
    const auto ours = view_.digests(parts);
    for (std::size_t i = 0; i < compared.size(); ++i)
      compared[i].arrival->intact = compared[i].arrival->intact && ours[i] == compared[i].theirs;
  }
  for (const auto& arrival : arrivals) settle(arrival);
}

void Joiner::settle(const Arrival& arrival) {
  const std::uint32_t slice = arrival.sent.slice();
  const auto status = view_.slice(slice);
  if (!arrival.intact) {
    if (const auto left_out = damaged_told_.may_say(now_))
      logger().warn(
          "slice {} from replica {} is damaged; it is fetched again ({} others were since the last such line)", slice,
          arrival.source, *left_out);
    sent_wrong(slice, arrival.source);
    fetch_again(slice);
    if (planner_.on_spoilt(arrival.source, slice))
      logger().error(
          "slice after slice comes damaged from replica {}: it is asked for no more while others can be; look at links "
          "and memory of its node, and of this one",
          arrival.source);
    return;
  }
  planner_.on_sound(arrival.source, slice);
  if (status.state != local::SliceState::requested ||
      !view_.set_slice(slice, status, {local::SliceState::arrived, arrival.sent.version()})) {
    planner_.narrow();  // the trainer gave it up: of its kept gradients some had no room
    return fetch_again(slice);
  }
  events::record(events::Kind::slice_arrived,
                 {.replica = arrival.source.value, .a = slice, .b = arrival.sent.version()});
  const std::uint64_t bytes = view_.manifest().bytes_of(view_.manifest().slices()[slice].range);
  bytes_ += bytes;
  wire_bytes_ += arrival.wire_bytes;
  from_[arrival.source] += bytes;
  if (fellows_.contains(arrival.source)) came_from_[slice] = arrival.source, from_joiners_ += bytes;
  arrived_.put(slice, arrival.sent.version(), {arrival.sent.digests().begin(), arrival.sent.digests().end()});
  // What has just been compared is verified, unless this replica's state is past the version that came: then it is
  // verified when its kept gradients have been applied.
  unverified_.insert(slice);
  unproven_.insert(slice);
  const auto clock = view_.clock();
  const std::uint64_t version = arrival.sent.version();
  if (version > newest(clock)) return;  // see newest()
  if (auto known = expected_.find(arrival.source); known != expected_.end())
    known->second.at_least = std::max(known->second.at_least, version);
  if (!clock.updating && version >= std::max(clock.version, oldest_)) agree(arrival.source, slice);
}

// In place; false where the bytes can't be decoded.
bool Joiner::decode(Arrival& arrival) {
  const auto& manifest = view_.manifest();
  const local::Slice& slice = manifest.slices()[arrival.sent.slice()];
  const std::uint32_t columns = manifest.columns(slice.range);
  const bool coded = arrival.sent.coded_size() > 0;
  if (coded && static_cast<std::uint32_t>(arrival.sent.coded_size()) != slice.parts * columns) return false;
  Bytes packed, plain;
  for (std::uint32_t i = 0; i < slice.parts; ++i) {
    const std::uint32_t part = slice.first_part + i;
    for (std::uint32_t column = 0; column < columns; ++column) {
      const std::span<std::byte> place = view_.column(manifest.parts()[part], column);
      const std::uint32_t length = coded ? arrival.sent.coded(static_cast<int>(i * columns + column)) : 0;
      arrival.wire_bytes += length > 0 ? length : place.size();
      if (length == 0) continue;
      if (length > place.size()) return false;
      packed.resize(length);
      plain.resize(place.size());
      view_.read(place.first(length), packed.data());
      if (!coder_.decode(packed, plain)) return false;
      view_.write(place.data(), plain);
      if (view_.kind() == device::MemoryKind::host)
        landed_.add(arrival.generation(i), part, column, view_.digest(place));
    }
  }
  return true;
}

void Joiner::fetch_again(std::uint32_t slice) {
  events::record(events::Kind::slice_again, {.a = slice});
  auto before = view_.slice(slice);
  while (!view_.set_slice(slice, before, {})) before = view_.slice(slice);
  // First made void, then the clock is read: an update that begins later leaves the slice alone. One that runs may have
  // been given it.
  const bool was_there = before.state == local::SliceState::arrived || before.state == local::SliceState::current;
  if (const auto clock = view_.clock(); was_there && clock.updating) update_of_void_ = clock;
  doubt(slice);
  set_verified(slice, false);
  arrived_.forget(slice);
  came_from_.erase(slice);
  unverified_.erase(slice);
  unproven_.erase(slice);
  suspects_.erase(slice);
  for (auto& [source, known] : expected_) known.agrees[slice] = false;
  planner_.on_again(slice);
}

void Joiner::work(TimePoint now, bool busy) {
  if (done_) return;
  make_up_for_pause(now);
  for (auto& [source, known] : expected_) {
    const bool before = waited_for(known);
    if (known.missing_since && !known.stood_still && sources_.contains(source) && now - known.connected_at > silence_)
      heard(known);
    if (before && known.missing_since && now - *known.missing_since > deadlines::kUnreachableSource.of(silence_)) {
      logger().warn("the state is not compared with replica {}'s: it can't be reached", source);
      now_ = now;
      recheck_verified();
    }
  }
  mind_fellows(now);
  now_ = now;
  mind_sources(now);
  planner_.on_time(now);
  if (!arrivals_.empty()) take_in_arrivals();
  std::erase_if(questions_, [&](Question& question) { return settle(question); });
  if (view_.clock() != seen_) {
    seen_ = view_.clock();
    foreign_ = foreign_ && seen_.version == at_first_.version;
    for (std::uint32_t i = 0; i < verified_.size(); ++i) {
      if (!planner_.has(i)) continue;
      const auto status = view_.slice(i);
      const bool impossible = status.version() > newest(seen_);
      if (impossible) sent_wrong(i, std::nullopt);
      // Given up by the trainer after they had arrived: their kept gradients had a gap, as the budget has it.
      if (status.state == local::SliceState::abandoned) planner_.narrow();
      if (impossible || status.state == local::SliceState::abandoned) fetch_again(i);
    }
  }
  ask_for_slices();
  // What fellows have sent is proven as it comes, so that it can be passed on in turn.
  if (!busy || planner_.all_arrived()) request_verification(unverified_, asked_up_to_);
  else if (!fellows_.empty()) request_verification(unproven_, proving_up_to_);
  if (verified_count_ == view_.manifest().slices().size()) {
    done_ = true;
    finished_ = now;
    view_.set_complete();
  }
}

bool Joiner::waited_for(const Expected& source) const {
  return !source.missing_since || now_ - *source.missing_since <= deadlines::kUnreachableSource.of(silence_);
}

void Joiner::heard(Expected& source) {
  const bool again = !waited_for(source);
  source.missing_since.reset();
  if (std::exchange(source.stood_still, false)) {
    ranks_.reset();  // it may be asked again
    source.advised = false;
    source.doubled = std::min(2 * source.doubled, kMostDoubled);
  }
  if (again) recheck_verified();
}

bool Joiner::send(transport::EndpointId endpoint, const proto::Stream& message) {
  const std::string bytes = message.SerializeAsString();
  return engine_.send(endpoint, as_bytes(bytes)).has_value();
}

std::optional<TimePoint> Joiner::unreached_since(TimePoint now) const {
  if (done_ || expected_.empty()) return std::nullopt;
  TimePoint since{};
  for (const auto& [source, known] : expected_) {
    if (!known.missing_since) return std::nullopt;
    since = std::max(since, *known.missing_since);
  }
  return now - since > deadlines::kUnreachableSource.of(silence_) ? std::optional(since) : std::nullopt;
}

CatchUpProgress Joiner::progress(TimePoint now) const {
  const auto& manifest = view_.manifest();
  CatchUpProgress progress;
  progress.total_bytes = manifest.bytes();
  progress.bytes = bytes_;
  progress.wire_bytes = wire_bytes_;
  progress.slices = planner_.arrived();
  progress.total_slices = static_cast<std::uint32_t>(manifest.slices().size());
  progress.verified = verified_count_;
  progress.refetched = planner_.refetched();
  progress.sources = static_cast<std::uint32_t>(sources_.size());
  progress.fellows = static_cast<std::uint32_t>(fellows_.size());
  progress.from_joiners = from_joiners_;
  progress.sources_used = static_cast<std::uint32_t>(from_.size());
  progress.done = done_;
  progress.seconds = seconds((done_ ? finished_ : now) - started_);
  progress.bytes_per_second = progress.seconds > 0 ? static_cast<double>(bytes_) / progress.seconds : 0;
  return progress;
}

}  // namespace rejoin::catchup
