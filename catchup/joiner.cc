#include "catchup/joiner.h"

#include <algorithm>

#include "base/digest.h"
#include "base/fail.h"
#include "base/log.h"
#include "catchup/source.h"

namespace rejoin::catchup {

namespace {

constexpr std::uint32_t kWindow = 16;                     // slices under way from one source
constexpr std::size_t kQuestions = 2;                     // proofs under way
constexpr std::uint32_t kPartsAsked = shm::kMaxPins / 4;  // of one proof, so that two leave room for the stream

constexpr std::size_t kLookedAt = 256;  // slices, for one question

constexpr int kUnreachable = 5;  // silences for which a source is waited for that can't be connected with
constexpr Duration kDisputed = std::chrono::seconds(1);  // until sources that differed are asked again
constexpr int kSuspected = 4;  // differences from one source, until it is believed without the others' word

}  // namespace

Joiner::Joiner(transport::Engine& engine, shm::View& view, std::vector<transport::RegionId> state, Step committed,
               Duration silence, TimePoint now)
    : engine_(engine),
      view_(view),
      state_(std::move(state)),
      planner_(static_cast<std::uint32_t>(view.manifest().slices().size()), kWindow),
      oldest_(committed.value),
      at_first_(view.clock()),
      foreign_(at_first_.version > oldest_),
      silence_(silence),
      proven_(view.manifest().slices().size()),
      now_(now),
      started_(now) {
  // The daemon before this one may have got far: what has arrived or is kept current is only proven again; if it had
  // called all of it whole, it is. The clock is read first: a word that is behind it then is behind for good.
  bool whole = view.whole();
  for (std::uint32_t i = 0; i < view.manifest().slices().size(); ++i)
    for (bool settled = false; !settled;) {
      const shm::SliceWord word = view.slice(i);
      const bool kept = word.state == shm::SliceState::arrived ||
                        (word.state == shm::SliceState::current && word.version >= at_first_.version);
      if (kept) {
        planner_.on_present(i);
        unproven_.insert(i);
      }
      whole = whole && kept;
      settled = kept || view.set_slice(i, word, {});
    }
  if (!whole) return;
  proven_.assign(proven_.size(), true);
  proven_count_ = static_cast<std::uint32_t>(proven_.size());
  unproven_.clear();
  done_ = true;
  finished_ = now;
}

Joiner::~Joiner() {
  for (auto& question : questions_) drop(question);
}

void Joiner::expect(const std::map<ReplicaId, Incarnation>& sources, TimePoint now) {
  const auto same = [](const auto& known, const auto& told) {
    return known.first == told.first && known.second.incarnation == told.second;
  };
  if (std::equal(expected_.begin(), expected_.end(), sources.begin(), sources.end(), same)) return;
  auto before = std::exchange(expected_, {});
  for (const auto& [source, incarnation] : sources) {
    auto known = before.find(source);
    if (known != before.end() && known->second.incarnation == incarnation) expected_[source] = std::move(known->second);
    else expected_[source] = {incarnation, now, {}, std::vector<bool>(view_.manifest().slices().size())};
  }
  suspects_.clear();  // whoever was wrong may have gone
  look_at_proofs();
}

void Joiner::on_source_up(ReplicaId source, transport::EndpointId endpoint) {
  sources_[source] = endpoint;
  planner_.on_source_up(source);
  if (auto known = expected_.find(source); known != expected_.end()) known->second.connected_at = now_;
  look_at_proofs();
}

void Joiner::on_source_down(ReplicaId source) {
  sources_.erase(source);
  landed_.forget(source);
  planner_.on_source_down(source);
  for (std::uint32_t i = 0; i < view_.manifest().slices().size(); ++i) {
    // What it owed is absent again; the planner has put it back.
    const auto word = view_.slice(i);
    if (word.state == shm::SliceState::requested && word.version == source.value + 1) view_.set_slice(i, word, {});
  }
  for (auto& question : questions_)
    if (auto asked = question.asked.find(source); asked != question.asked.end()) asked->second.over = true;
  auto known = expected_.find(source);
  if (known != expected_.end() && !known->second.missing_since) known->second.missing_since = now_;
}

Result<> Joiner::on_message(ReplicaId source, const proto::Stream& message) {
  if (!sources_.contains(source)) return {};
  if (auto known = expected_.find(source); known != expected_.end()) heard(known->second);
  if (message.has_sent()) return on_sent(source, message.sent());
  if (message.has_proof()) return on_proof(source, message.proof());
  return fail(ErrorCode::corrupt, "a source sent a message that only joiners send");
}

void Joiner::on_written(ReplicaId source, std::uint64_t tag) {
  const auto& manifest = view_.manifest();
  const auto [part, column, coded, round] = ExtentTag::unpack(tag);
  if (coded || part >= manifest.parts().size()) return;     // nonsense: the digests at the end tell
  if (view_.kind() != transport::MemoryKind::host) return;  // no cache to profit from: all columns at once, at the end
  const shm::Part& range = manifest.parts()[part];
  if (column >= manifest.columns(range)) return;
  landed_.add({source, round}, part, column, view_.digest(view_.column(range, column)));
}

Result<> Joiner::on_sent(ReplicaId source, const proto::Sent& sent) {
  const auto& manifest = view_.manifest();
  if (sent.slice() >= manifest.slices().size() ||
      static_cast<std::uint32_t>(sent.digests().size()) != manifest.slices()[sent.slice()].parts ||
      sent.rounds().size() != sent.digests().size())
    return fail(ErrorCode::corrupt, "a source sent slice {} with {} digests", sent.slice(), sent.digests().size());
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
  std::vector<shm::Columns> parts;
  for (auto& arrival : arrivals) {
    const auto& slice = manifest.slices()[arrival.sent.slice()];
    arrival.whole = decode(arrival);
    for (std::uint32_t i = 0; i < slice.parts && arrival.whole; ++i) {
      const auto theirs = arrival.sent.digests(static_cast<int>(i));
      const std::uint32_t part = slice.first_part + i;
      if (const auto ours = landed_.take(arrival.round(i), part, manifest.columns(manifest.parts()[part]))) {
        arrival.whole = *ours == theirs;
      } else {
        compared.push_back({&arrival, theirs});
        parts.push_back(view_.columns(manifest.part(arrival.sent.slice(), i)));
      }
    }
  }
  if (!parts.empty()) {
    const auto ours = view_.digests(parts);
    for (std::size_t i = 0; i < compared.size(); ++i)
      compared[i].arrival->whole = compared[i].arrival->whole && ours[i] == compared[i].theirs;
  }
  for (const auto& arrival : arrivals) settle(arrival);
}

void Joiner::settle(const Arrival& arrival) {
  const std::uint32_t slice = arrival.sent.slice();
  const auto word = view_.slice(slice);
  if (!arrival.whole) {
    spdlog::warn("slice {} from replica {} is damaged; it is fetched again", slice, arrival.source);
    return fetch_again(slice);
  }
  if (word.state != shm::SliceState::requested ||
      !view_.set_slice(slice, word, {shm::SliceState::arrived, arrival.sent.version()})) {
    planner_.narrow();  // the trainer gave it up: its kept gradients ran over the budget
    return fetch_again(slice);
  }
  const std::uint64_t bytes = view_.manifest().bytes_of(view_.manifest().slices()[slice].whole);
  bytes_ += bytes;
  wire_bytes_ += arrival.wire_bytes;
  from_[arrival.source] += bytes;
  arrived_.put(slice, arrival.sent.version(), {arrival.sent.digests().begin(), arrival.sent.digests().end()});
  // What has just been compared is a proof, if this replica's state is still at the version that came; else it is
  // proven when its kept gradients have been applied.
  const shm::Clock clock = view_.clock();
  unproven_.insert(slice);
  if (!clock.updating && clock.version == arrival.sent.version()) agree(arrival.source, slice);
}

// In place; false where the bytes can't be decoded.
bool Joiner::decode(Arrival& arrival) {
  const auto& manifest = view_.manifest();
  const shm::Slice& slice = manifest.slices()[arrival.sent.slice()];
  const std::uint32_t columns = manifest.columns(slice.whole);
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
      if (view_.kind() == device::MemoryKind::host) landed_.add(arrival.round(i), part, column, view_.digest(place));
    }
  }
  return true;
}

void Joiner::fetch_again(std::uint32_t slice) {
  while (!view_.set_slice(slice, view_.slice(slice), {})) {
  }
  set_proven(slice, false);
  arrived_.forget(slice);
  unproven_.erase(slice);
  suspects_.erase(slice);
  for (auto& [source, known] : expected_) known.agrees[slice] = false;
  planner_.on_again(slice);
}

void Joiner::work(TimePoint now, bool busy) {
  if (done_) return;
  for (auto& [source, known] : expected_) {
    const bool before = waited_for(known);
    if (known.missing_since && sources_.contains(source) && now - known.connected_at > silence_) heard(known);
    if (before && known.missing_since && now - *known.missing_since > kUnreachable * silence_) {
      spdlog::warn("the state is not compared with replica {}'s: it can't be reached", source);
      now_ = now;
      look_at_proofs();
    }
  }
  now_ = now;
  if (!arrivals_.empty()) take_in_arrivals();
  std::erase_if(questions_, [&](Question& question) { return settle(question); });
  if (view_.clock() != seen_) {
    seen_ = view_.clock();
    // Given up by the trainer after they had arrived: their kept gradients had a gap.
    for (std::uint32_t i = 0; i < proven_.size(); ++i)
      if (planner_.has(i) && view_.slice(i).state == shm::SliceState::abandoned) fetch_again(i);
  }
  ask_for_slices();
  if (!busy || planner_.all_arrived()) ask_for_proof();
  if (proven_count_ == view_.manifest().slices().size()) {
    done_ = true;
    finished_ = now;
    view_.set_whole();
  }
}

void Joiner::ask_for_slices() {
  for (const auto& [source, endpoint] : sources_) {
    const auto slices = planner_.next(source);
    if (slices.empty()) continue;
    proto::Stream message;
    auto& fetch = *message.mutable_fetch();
    std::map<std::uint32_t, std::uint32_t> regions;  // by segment: which of the message's
    const auto say_where = [&](std::uint32_t slice) {
      const shm::Part& whole = view_.manifest().slices()[slice].whole;
      for (std::uint32_t column = 0; column < view_.manifest().columns(whole); ++column) {
        const shm::Place place = view_.place(whole, column);
        const auto [known, first] = regions.try_emplace(place.segment, fetch.regions_size());
        if (first) {
          const auto target = engine_.remote(state_[place.segment]);
          auto& region = *fetch.add_regions();
          region.set_key(target.key);
          region.set_length(target.length);
        }
        fetch.add_places(known->second);
        fetch.add_offsets(place.offset);
      }
    };
    for (auto slice : slices) {
      // First marked, then the clock is read: the library first moves the clock, then looks at the marks. So either it
      // keeps the gradients of the update under way, or we ask for a version that contains it.
      while (!view_.set_slice(slice, view_.slice(slice), {shm::SliceState::requested, source.value + 1ull})) {
      }
      fetch.add_slices(slice);
      say_where(slice);
    }
    const shm::Clock clock = view_.clock();
    foreign_ = foreign_ && clock.version == at_first_.version;
    fetch.set_at_least(std::max(foreign_ ? 0 : clock.version, oldest_) + (clock.updating ? 1 : 0));
    if (!say(endpoint, message)) return;
  }
}

// Whether this source has yet to say what it has of a slice.
bool Joiner::asks(const Expected& source, std::uint32_t slice) const {
  return !source.agrees[slice] || suspects_.contains(slice);  // suspects are compared among all at one version
}

void Joiner::ask_for_proof() {
  if (questions_.size() >= kQuestions || sources_.empty()) return;
  const shm::Clock clock = view_.clock();
  if (clock.updating || clock.version < oldest_) return;
  Question question;
  question.version = clock.version;
  std::vector<std::uint32_t> parts;
  for (std::size_t looked_at = 0; looked_at < std::min(kLookedAt, unproven_.size()); ++looked_at) {
    auto next = unproven_.upper_bound(asked_up_to_);
    if (next == unproven_.end()) next = unproven_.begin();
    const std::uint32_t i = *next;
    const auto& slice = view_.manifest().slices()[i];
    if (!parts.empty() && parts.size() + slice.parts > kPartsAsked) break;
    asked_up_to_ = i;
    const auto word = view_.slice(i);
    const bool asked = std::any_of(questions_.begin(), questions_.end(), [&](const Question& q) {
      return std::find(q.slices.begin(), q.slices.end(), i) != q.slices.end();
    });
    if (asked || word.state != shm::SliceState::current || word.version != clock.version) continue;
    if (auto suspect = suspects_.find(i); suspect != suspects_.end() && now_ < suspect->second.again_at) continue;
    bool any = false;
    for (const auto& [source, known] : expected_) {
      if (!sources_.contains(source) || !asks(known, i)) continue;
      question.asked[source].which.push_back(question.slices.size());
      any = true;
    }
    if (!any) continue;
    question.slices.push_back(i);
    for (std::uint32_t p = 0; p < slice.parts; ++p) parts.push_back(slice.first_part + p);
  }
  if (parts.empty()) return;
  auto held = view_.hold(parts);
  if (!held) return;
  question.held = std::move(held->second);
  question.ours.resize(question.held.size());
  if (held->first != question.version) return drop(question);
  for (std::size_t i = 0, part = 0; i < question.slices.size(); ++i) {
    const auto* known = arrived_.at(question.slices[i], question.version);
    for (std::uint32_t p = 0; p < view_.manifest().slices()[question.slices[i]].parts; ++p, ++part) {
      if (known == nullptr) continue;
      view_.release(question.held[part]);
      question.ours[part] = (*known)[p];
    }
  }
  question.number = next_question_++;
  std::vector<std::pair<transport::EndpointId, proto::Stream>> messages;
  for (const auto& [source, asked] : question.asked) {
    auto& prove = *messages.emplace_back(sources_.at(source), proto::Stream()).second.mutable_prove();
    prove.set_request(question.number);
    prove.set_version(question.version);
    for (auto which : asked.which) prove.add_slices(question.slices[which]);
  }
  questions_.push_back(std::move(question));
  for (const auto& [endpoint, message] : messages)
    (void)say(endpoint, message);  // a failed connection ends in on_source_down, which waits for it no longer
}

Result<> Joiner::on_proof(ReplicaId source, const proto::Proof& proof) {
  auto found = std::find_if(questions_.begin(), questions_.end(),
                            [&](const Question& q) { return q.number == proof.request() && q.asked.contains(source); });
  if (found == questions_.end()) return {};
  Asked& asked = found->asked.at(source);
  if (asked.over) return {};
  if (!proof.passed() && static_cast<std::size_t>(proof.digests().size()) != asked.which.size())
    return fail(ErrorCode::corrupt, "a source proved {} slices of {}", proof.digests().size(), asked.which.size());
  asked.over = true;
  if (!proof.passed()) asked.theirs.assign(proof.digests().begin(), proof.digests().end());
  return {};
}

// True when the question is over.
bool Joiner::settle(Question& question) {
  const bool heard =
      std::all_of(question.asked.begin(), question.asked.end(), [](const auto& a) { return a.second.over; });
  if (!settle_held(view_, question.held, question.ours) || !heard) return false;
  std::vector<std::map<ReplicaId, std::uint64_t>> theirs(question.slices.size());
  for (const auto& [source, asked] : question.asked)
    for (std::size_t i = 0; i < asked.theirs.size(); ++i) theirs[asked.which[i]][source] = asked.theirs[i];
  std::size_t part = 0;
  for (std::size_t i = 0; i < question.slices.size(); ++i) {
    std::uint64_t ours = 0;
    for (std::uint32_t p = 0; p < view_.manifest().slices()[question.slices[i]].parts; ++p)
      ours = combine_digests(ours, *question.ours[part++]);
    if (unproven_.contains(question.slices[i])) settle_slice(question.slices[i], question.version, ours, theirs[i]);
  }
  return true;
}

// What sources have of a slice at one version, and this replica.
void Joiner::settle_slice(std::uint32_t slice, std::uint64_t version, std::uint64_t ours,
                          const std::map<ReplicaId, std::uint64_t>& theirs) {
  if (theirs.empty()) return;  // all were past that version
  const auto differs = [&](const auto& one) { return one.second != theirs.begin()->second; };
  if (std::any_of(theirs.begin(), theirs.end(), differs)) return report_drift(slice, version, theirs);
  if (theirs.begin()->second == ours) {
    if (theirs.size() >= sources_.size()) suspects_.erase(slice);  // all agree, at one version
    for (const auto& [source, digest] : theirs) agree(source, slice);
    return;
  }
  // Either this replica's bytes are wrong, or those of the sources that agreed with them before: all must say at one
  // version, if they can.
  Suspect& suspect = suspects_[slice];
  if (theirs.size() < sources_.size() && ++suspect.times < kSuspected) return;
  spdlog::warn("slice {} differs from replica {}'s at version {}; it is fetched again", slice, theirs.begin()->first,
               version);
  fetch_again(slice);
}

// Fetched again from one, it would fit that one. So it waits until it is known who is wrong.
void Joiner::report_drift(std::uint32_t slice, std::uint64_t version,
                          const std::map<ReplicaId, std::uint64_t>& theirs) {
  const auto& manifest = view_.manifest();
  const shm::Slice& what = manifest.slices()[slice];
  suspects_[slice].again_at = now_ + kDisputed;
  Drift drift{.tensor = manifest.tensors()[what.whole.tensor].name,
              .first = what.whole.first,
              .count = what.whole.count,
              .version = version,
              .digests = {theirs.begin(), theirs.end()}};
  for (std::uint32_t i = 0; i < manifest.parts().size(); ++i) {
    if (i < what.first_part) drift.place += manifest.length(manifest.parts()[i]);
    drift.places += manifest.length(manifest.parts()[i]);
  }
  spdlog::error("the sources of this state differ at version {} in tensor '{}', elements {} to {}", version,
                drift.tensor, drift.first, drift.first + drift.count);
  drifts_.push_back(std::move(drift));
}

void Joiner::agree(ReplicaId source, std::uint32_t slice) {
  auto known = expected_.find(source);
  if (known == expected_.end()) return;
  known->second.agrees[slice] = true;
  if (all_agree(slice)) set_proven(slice, true);
}

// Whoever is waited for has the same bytes, and at least one has.
bool Joiner::all_agree(std::uint32_t slice) const {
  if (suspects_.contains(slice)) return false;
  bool any = false;
  for (const auto& [source, known] : expected_) {
    if (waited_for(known) && !known.agrees[slice]) return false;
    any = any || known.agrees[slice];
  }
  return any;
}

void Joiner::set_proven(std::uint32_t slice, bool proven) {
  if (proven == proven_[slice]) return;
  proven_[slice] = proven;
  if (proven) ++proven_count_, unproven_.erase(slice), arrived_.forget(slice);
  else --proven_count_, unproven_.insert(slice);
}

bool Joiner::waited_for(const Expected& source) const {
  return !source.missing_since || now_ - *source.missing_since <= kUnreachable * silence_;
}

void Joiner::heard(Expected& source) {
  const bool again = !waited_for(source);
  source.missing_since.reset();
  if (again) look_at_proofs();
}

// Whose word is needed has changed.
void Joiner::look_at_proofs() {
  if (done_) return;
  for (std::uint32_t i = 0; i < proven_.size(); ++i)
    if (planner_.has(i)) set_proven(i, all_agree(i));
}

void Joiner::drop(Question& question) {
  for (std::size_t i = 0; i < question.held.size(); ++i)
    if (!question.ours[i]) view_.release(question.held[i]);
  question.held.clear();
}

bool Joiner::say(transport::EndpointId endpoint, const proto::Stream& message) {
  const std::string bytes = message.SerializeAsString();
  return engine_.send(endpoint, as_bytes(bytes)).has_value();
}

Progress Joiner::progress(TimePoint now) const {
  const auto& manifest = view_.manifest();
  Progress progress;
  progress.total_bytes = manifest.bytes();
  progress.bytes = bytes_;
  progress.wire_bytes = wire_bytes_;
  progress.slices = planner_.arrived();
  progress.total_slices = static_cast<std::uint32_t>(manifest.slices().size());
  progress.proven = proven_count_;
  progress.refetched = planner_.refetched();
  progress.sources = static_cast<std::uint32_t>(sources_.size());
  progress.sources_used = static_cast<std::uint32_t>(from_.size());
  progress.done = done_;
  progress.seconds = seconds((done_ ? finished_ : now) - started_);
  progress.bytes_per_second = progress.seconds > 0 ? static_cast<double>(bytes_) / progress.seconds : 0;
  return progress;
}

}  // namespace rejoin::catchup
