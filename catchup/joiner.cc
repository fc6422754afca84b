#include "catchup/joiner.h"

#include <algorithm>

#include "base/digest.h"
#include "base/log.h"
#include "catchup/source.h"

namespace rejoin::catchup {

namespace {

constexpr std::uint32_t kWindow = 16;                     // slices under way from one source
constexpr std::size_t kQuestions = 2;                     // proofs under way
constexpr std::uint32_t kPartsAsked = shm::kMaxPins / 4;  // of one proof, so that two leave room for the stream

constexpr std::size_t kLookedAt = 256;  // slices, for one question

}  // namespace

Joiner::Joiner(transport::Engine& engine, shm::View& view, std::vector<transport::RegionId> state, TimePoint now)
    : engine_(engine),
      view_(view),
      state_(std::move(state)),
      planner_(static_cast<std::uint32_t>(view.manifest().slices().size()), kWindow),
      proven_(view.manifest().slices().size()),
      started_(now) {
  // The daemon before this one may have got far, and even have called the state whole: what has arrived and what the
  // trainer keeps current is only proven again. The clock is read first: a word that is behind it then is behind for
  // good.
  const shm::Clock clock = view.clock();
  for (std::uint32_t i = 0; i < view.manifest().slices().size(); ++i)
    for (bool settled = false; !settled;) {
      const shm::SliceWord word = view.slice(i);
      const bool kept = word.state == shm::SliceState::arrived ||
                        (word.state == shm::SliceState::current && word.version >= clock.version);
      if (kept) {
        planner_.on_present(i);
        unproven_.insert(i);
      }
      settled = kept || view.set_slice(i, word, {});
    }
}

Joiner::~Joiner() {
  for (auto& question : questions_) drop(question);
}

void Joiner::on_source_up(ReplicaId source, transport::EndpointId endpoint) {
  sources_[source] = endpoint;
  planner_.on_source_up(source);
}

void Joiner::on_source_down(ReplicaId source) {
  sources_.erase(source);
  planner_.on_source_down(source);
  for (std::uint32_t i = 0; i < view_.manifest().slices().size(); ++i) {
    // What it owed is absent again; the planner has put it back.
    const auto word = view_.slice(i);
    if (word.state == shm::SliceState::requested && word.version == source.value + 1) view_.set_slice(i, word, {});
  }
  std::erase_if(questions_, [&](Question& question) {
    if (question.source != source) return false;
    drop(question);
    return true;
  });
}

Result<> Joiner::on_message(ReplicaId source, const proto::Stream& message) {
  if (!sources_.contains(source)) return {};
  if (message.has_sent()) return on_sent(source, message.sent());
  if (message.has_proof()) return on_proof(source, message.proof());
  return fail(ErrorCode::corrupt, "a source sent a message that only joiners send");
}

void Joiner::on_written(std::uint64_t tag) {
  const auto& manifest = view_.manifest();
  const auto [part, column, coded] = ExtentTag::unpack(tag);
  if (coded || part >= manifest.parts().size()) return;     // nonsense: the digests at the end tell
  if (view_.kind() != transport::MemoryKind::host) return;  // no cache to profit from: all columns at once, at the end
  const shm::Part& range = manifest.parts()[part];
  if (column >= manifest.columns(range)) return;
  landed_[part][column] = view_.digest(view_.column(range, column));
}

// As it was found when its columns landed.
std::optional<std::uint64_t> Joiner::digest_of_landed(std::uint32_t part) {
  const auto known = landed_.extract(part);
  if (known.empty()) return std::nullopt;
  std::uint64_t result = 0;
  for (std::uint32_t column = 0; column < view_.manifest().columns(view_.manifest().parts()[part]); ++column) {
    if (!known.mapped()[column]) return std::nullopt;
    result = combine_digests(result, *known.mapped()[column]);
  }
  return result;
}

Result<> Joiner::on_sent(ReplicaId source, const proto::Sent& sent) {
  const auto& manifest = view_.manifest();
  if (sent.slice() >= manifest.slices().size() ||
      static_cast<std::uint32_t>(sent.digests().size()) != manifest.slices()[sent.slice()].parts)
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
      if (const auto ours = digest_of_landed(slice.first_part + i)) {
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
  // What has just been compared is a proof, if this replica's state is still at the version that came; else it is
  // proven when its kept gradients have been applied.
  const shm::Clock clock = view_.clock();
  if (!clock.updating && clock.version == arrival.sent.version()) prove(slice);
  else unproven_.insert(slice);
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
      if (view_.kind() == device::MemoryKind::host) landed_[part][column] = view_.digest(place);
    }
  }
  return true;
}

void Joiner::fetch_again(std::uint32_t slice) {
  while (!view_.set_slice(slice, view_.slice(slice), {})) {
  }
  if (proven_[slice]) --proven_count_;
  proven_[slice] = false;
  unproven_.erase(slice);
  planner_.on_again(slice);
}

void Joiner::work(TimePoint now, bool busy) {
  if (done_) return;
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
    fetch.set_at_least(clock.version + (clock.updating ? 1 : 0));
    if (!say(endpoint, message)) return;
  }
}

void Joiner::ask_for_proof() {
  if (questions_.size() >= kQuestions || sources_.empty()) return;
  const shm::Clock clock = view_.clock();
  if (clock.updating) return;
  Question question;
  question.version = clock.version;
  std::vector<std::uint32_t> parts;
  std::size_t looked_at = 0;
  for (auto i : unproven_) {
    if (parts.size() >= kPartsAsked || ++looked_at > kLookedAt) break;
    const auto word = view_.slice(i);
    const bool asked = std::any_of(questions_.begin(), questions_.end(), [&](const Question& q) {
      return std::find(q.slices.begin(), q.slices.end(), i) != q.slices.end();
    });
    if (asked || word.state != shm::SliceState::current || word.version != clock.version) continue;
    const auto& slice = view_.manifest().slices()[i];
    if (!parts.empty() && parts.size() + slice.parts > kPartsAsked) continue;
    question.slices.push_back(i);
    for (std::uint32_t p = 0; p < slice.parts; ++p) parts.push_back(slice.first_part + p);
  }
  if (parts.empty()) return;
  auto held = view_.hold(parts);
  if (!held) return;
  question.held = std::move(held->second);
  question.ours.resize(question.held.size());
  if (held->first != question.version) return drop(question);
  auto source = std::next(sources_.begin(), static_cast<std::ptrdiff_t>(next_question_ % sources_.size()));
  question.number = next_question_++;
  question.source = source->first;
  proto::Stream message;
  message.mutable_prove()->set_request(question.number);
  message.mutable_prove()->set_version(question.version);
  for (auto slice : question.slices) message.mutable_prove()->add_slices(slice);
  const auto endpoint = source->second;
  questions_.push_back(std::move(question));
  (void)say(endpoint, message);  // a failed connection ends in on_source_down, which drops the question
}

Result<> Joiner::on_proof(ReplicaId source, const proto::Proof& proof) {
  auto found = std::find_if(questions_.begin(), questions_.end(),
                            [&](const Question& q) { return q.number == proof.request() && q.source == source; });
  if (found == questions_.end()) return {};
  if (proof.passed()) {
    drop(*found);
    questions_.erase(found);
    return {};
  }
  if (static_cast<std::size_t>(proof.digests().size()) != found->slices.size())
    return fail(ErrorCode::corrupt, "a source proved {} slices of {}", proof.digests().size(), found->slices.size());
  found->theirs.assign(proof.digests().begin(), proof.digests().end());
  return {};
}

// True when the question is over.
bool Joiner::settle(Question& question) {
  if (!settle_held(view_, question.held, question.ours) || question.theirs.empty()) return false;
  std::size_t part = 0;
  for (std::size_t i = 0; i < question.slices.size(); ++i) {
    const std::uint32_t slice = question.slices[i];
    std::uint64_t ours = 0;
    for (std::uint32_t p = 0; p < view_.manifest().slices()[slice].parts; ++p)
      ours = combine_digests(ours, *question.ours[part++]);
    if (ours == question.theirs[i]) {
      prove(slice);
    } else {
      spdlog::warn("slice {} differs from replica {}'s at version {}; it is fetched again", slice, question.source,
                   question.version);
      fetch_again(slice);
    }
  }
  return true;
}

void Joiner::prove(std::uint32_t slice) {
  if (!proven_[slice]) ++proven_count_;
  proven_[slice] = true;
  unproven_.erase(slice);
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
