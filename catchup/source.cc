#include "catchup/source.h"

#include <algorithm>

#include "base/deadlines.h"
#include "base/digest.h"
#include "base/fail.h"
#include "catchup/pause.h"

namespace rejoin::catchup {

namespace {

constexpr std::size_t kMaxRequests = 1 << 18;
constexpr std::size_t kMaxQuestions = 64;
// A joiner's own catching up has the pins that are left over.
constexpr std::uint32_t kPinsOfJoiner = local::kMaxPins / 2;
// Of a contributor, so that questions for digests don't wait for slices that are on their way.
constexpr std::uint32_t kPinsOfQuestions = local::kMaxPins / 4;
constexpr std::uint32_t kOffersAtOnce = 1024;

}  // namespace

Source::Source(transport::Engine& engine, transport::EndpointId joiner, Memory memory, Compression compression,
               Pacer& pacer, const Clock& clock, Duration silence)
    : engine_(engine),
      joiner_(joiner),
      memory_(memory),
      pacer_(pacer),
      clock_(clock),
      decision_(compression, pacer.limit()),
      silence_(silence) {}

Source::~Source() {
  for (auto& [number, job] : jobs_)
    for (auto& part : job.parts)
      if (!part.digest && !part.detached) memory_.view->release(part.pinned);
  for (auto& question : questions_)
    for (std::size_t i = 0; i < question.pinned.size(); ++i)
      if (!question.digests[i]) memory_.view->release(question.pinned[i]);
  if (slots_.size() > 0) engine_.deregister(slots_region_);
}

Source::Stats Source::stats() const {
  return {bytes_sent_,
          wire_bytes_,
          passed_on_,
          decision_.on(),
          decision_.link_bytes_per_second(),
          decision_.coder_bytes_per_second(),
          decision_.ratio()};
}

Result<> Source::on_fetch(const proto::Fetch& fetch) {
  const auto& manifest = memory_.view->manifest();
  if (fetch.region_indexes_size() != fetch.offsets_size())
    return fail(ErrorCode::corrupt, "{} region indexes with {} offsets", fetch.region_indexes_size(),
                fetch.offsets_size());
  int next = 0;  // column of the message
  for (auto slice : fetch.slices()) {
    if (slice >= manifest.slices().size() || requests_.size() >= kMaxRequests)
      return fail(ErrorCode::corrupt, "it asks for slice {} of {}", slice, manifest.slices().size());
    const local::Part& whole = manifest.slices()[slice].range;
    Request request{.slice = slice, .at_least = fetch.at_least()};
    for (std::uint32_t column = 0; column < manifest.columns(whole); ++column, ++next) {
      if (next >= fetch.region_indexes_size() ||
          fetch.region_indexes(next) >= static_cast<std::uint32_t>(fetch.regions_size()))
        return fail(ErrorCode::corrupt, "it does not say where slice {} begins", slice);
      const auto& region = fetch.regions(static_cast<int>(fetch.region_indexes(next)));
      if (!in_range(fetch.offsets(next), manifest.length(whole, column), region.length()))
        return fail(ErrorCode::mismatch, "slice {} does not fit where the joiner wants it", slice);
      request.columns[column] = {{region.key(), region.length()}, fetch.offsets(next)};
    }
    requests_.push_back(request);
  }
  if (fetch.sign()) {
    proto::Stream message;
    message.mutable_sign();
    send(message);
  }
  if (next != fetch.region_indexes_size())
    return fail(ErrorCode::corrupt, "{} region indexes too many", fetch.region_indexes_size() - next);
  return {};
}

Result<> Source::on_verify(const proto::Verify& verify) {
  const auto& manifest = memory_.view->manifest();
  std::uint64_t parts = 0;
  for (auto slice : verify.slices()) {
    if (slice >= manifest.slices().size()) return fail(ErrorCode::corrupt, "it asks about slice {}", slice);
    parts += manifest.slices()[slice].parts;
  }
  if (parts == 0 || parts > local::kMaxPins || questions_.size() >= kMaxQuestions)
    return fail(ErrorCode::corrupt, "it asks about {} parts at once", parts);
  questions_.push_back({verify.request(), verify.version(), {verify.slices().begin(), verify.slices().end()}, {}, {}});
  return {};
}

std::vector<std::uint32_t> Source::parts_of(std::uint32_t slice) const {
  const auto& s = memory_.view->manifest().slices()[slice];
  std::vector<std::uint32_t> parts;
  for (std::uint32_t i = 0; i < s.parts; ++i) parts.push_back(s.first_part + i);
  return parts;
}

std::uint64_t Source::bytes_of(std::uint32_t slice) const {
  return memory_.view->manifest().bytes_of(memory_.view->manifest().slices()[slice].range);
}

// A daemon that is stopped takes nothing any more, and what is on its way to it holds pins that others wait for. If it
// lives it connects again. What this process itself was paused for counts for nobody.
void Source::mind_standing_joiner(TimePoint now) {
  const Duration paused = now - std::exchange(looked_at_, now);
  if (is_pause(paused, silence_)) moved_at_ = std::min(moved_at_ + paused, now);
  if (writes_under_way_ > 0 && now - moved_at_ > deadlines::kUnacknowledged.of(silence_)) failed_ = true;
}

void Source::work(TimePoint now) {
  mind_standing_joiner(now);
  if (failed_) return;
  for (auto it = questions_.begin(); it != questions_.end();) it = advance(*it) ? questions_.erase(it) : std::next(it);
  std::vector<SliceJob*> jobs;
  for (auto& [number, job] : jobs_) {
    if (!still_proven(job)) return;
    jobs.push_back(&job);
  }
  write_parts(jobs);
  for (const auto* each : jobs) {
    const SliceJob& job = *each;
    const auto& parts = job.parts;
    if (std::all_of(parts.begin(), parts.end(), [](const PartJob& part) { return part.digest.has_value(); })) {
      proto::Stream message;
      message.mutable_sent()->set_slice(job.request.slice);
      message.mutable_sent()->set_version(job.version);
      bool coded = false;
      for (const auto& part : parts) {
        message.mutable_sent()->add_digests(*part.digest);
        message.mutable_sent()->add_generations(part.generation);
        for (auto length : part.coded) coded |= length > 0;
      }
      const auto& manifest = memory_.view->manifest();
      for (std::size_t i = 0; coded && i < parts.size(); ++i)
        for (std::uint32_t c = 0; c < manifest.columns(manifest.parts()[parts[i].pinned.part]); ++c)
          message.mutable_sent()->add_coded(parts[i].coded[c]);
      link_.on_end(job.begun, bytes_of(job.request.slice), now);
      jobs_.erase(job.number);
      send(message);
    }
  }
  if (followed_) offer();
  start_slices(now);
}

TimePoint Source::due() const {
  return !requests_.empty() && memory_.view->phase() == local::Phase::reduce ? link_.due() : TimePoint{};
}

bool Source::may_start(TimePoint now) {
  return !requests_.empty() && link_.may_begin(memory_.view->phase() == local::Phase::reduce, now) &&
         pacer_.may_send(now) && memory_.view->clock().version >= requests_.front().at_least;
}

// Pins the slice where it can be sent at this moment. What was offered and is not proven any more ends the connection:
// the joiner asks for it elsewhere.
std::optional<Source::SliceJob> Source::begin(const Request& request) {
  local::View& view = *memory_.view;
  const auto parts = parts_of(request.slice);
  const auto proof = memory_.proofs->of(request.slice);
  failed_ = failed_ || !proof;
  if (failed_) return std::nullopt;
  const auto status = view.slice(request.slice);
  const bool joining = !memory_.proofs->is_all();
  const auto pins = std::min<std::size_t>(local::kMaxPins, (joining ? kPinsOfJoiner : kPinsOfQuestions) + parts.size());
  const auto version = view.clock().version;
  if (ahead({request.slice}, version)) return std::nullopt;
  if ((joining && status.version() != version) || view.free_pins() < pins) return std::nullopt;
  auto pinned = view.pin(parts);
  if (!pinned) return std::nullopt;
  SliceJob job{.number = next_job_, .request = request, .version = pinned->first, .proof = *proof, .parts = {}};
  if (joining && status.version() != job.version) {  // an update came and went between the two looks
    for (const auto& one : pinned->second) view.release(one);
    return std::nullopt;
  }
  ++next_job_;
  for (const auto& one : pinned->second) job.parts.push_back({.pinned = one});
  return job;
}

// What is written now is still what was proven. Otherwise nobody is told that it is there.
bool Source::still_proven(const SliceJob& job) {
  const auto proof = memory_.proofs->of(job.request.slice);
  if (memory_.proofs->is_all() || proof == job.proof) return true;
  failed_ = true;
  return false;
}

void Source::offer() {
  const auto& log = memory_.proofs->log();
  const bool all = memory_.proofs->is_all();
  const auto slices = static_cast<std::uint32_t>(memory_.view->manifest().slices().size());
  if (all && !std::exchange(offered_all_, true)) offered_ = 0;
  while (offered_ < (all ? slices : log.size()) && !failed_) {
    proto::Stream message;
    auto& offers = *message.mutable_offers();
    for (; offered_ < (all ? slices : log.size()) && offers.slices_size() < static_cast<int>(kOffersAtOnce); ++offered_)
      if (const std::uint32_t slice = all ? offered_ : log[offered_]; memory_.proofs->of(slice))
        offers.add_slices(slice);
    if (!offers.slices().empty()) send(message);
  }
}

void Source::start_slices(TimePoint now) {
  // What is begun is paid for when it is written: with a limit one by one.
  const std::size_t at_once = pacer_.limit() > 0 ? 1 : memory_.view->digests_at_once();
  for (bool held_back = false; !held_back && !failed_;) {
    std::vector<SliceJob*> begun;
    while (begun.size() < at_once) {
      auto job = may_start(now) ? begin(requests_.front()) : std::nullopt;
      if (!job) {
        held_back = true;
        break;
      }
      job->begun = link_.on_begin(bytes_of(job->request.slice), now);
      requests_.pop_front();
      begun.push_back(&jobs_.emplace(job->number, std::move(*job)).first->second);
    }
    write_parts(begun);
  }
}

// Of these jobs, what is neither written nor being copied to the shadow buffer.
void Source::write_parts(std::span<SliceJob* const> jobs) {
  std::vector<std::pair<SliceJob*, std::size_t>> ready;
  for (auto* job : jobs)
    for (std::size_t i = 0; i < job->parts.size(); ++i)
      if (!job->parts[i].digest && !job->parts[i].writing) ready.emplace_back(job, i);
  const std::size_t at_once = memory_.view->digests_at_once();
  for (std::span rest(ready); !rest.empty() && !failed_; rest = rest.subspan(std::min(at_once, rest.size()))) {
    const auto some = rest.first(std::min(at_once, rest.size()));
    // The digests first: they are of the pinned version if the pin lasts until the bytes are there.
    std::vector<local::View::Pinned> pinned;
    for (const auto& [job, index] : some) pinned.push_back(job->parts[index].pinned);
    const auto digests = pinned_digests(*memory_.view, pinned);
    for (std::size_t i = 0; i < some.size() && !failed_; ++i)
      if (digests[i]) write_part(*some[i].first, some[i].second, *digests[i]);
  }
}

// Writes a part's columns from where they are. From the state it is a gamble that no update begins meanwhile; a lost
// one is written again from the shadow buffer, and the joiner believes nothing before `Sent`.
void Source::write_part(SliceJob& job, std::size_t index, std::uint64_t digest) {
  const auto& manifest = memory_.view->manifest();
  PartJob& part = job.parts[index];
  const local::Part& range = manifest.parts()[part.pinned.part];
  const auto where = memory_.view->where(part.pinned);
  if (where == local::View::Where::copying) return;  // from there, later
  part.digest_sent = digest;
  part.generation = generations_ = (generations_ + 1) % WriteTag::kGenerations;
  part.from_shadow = where == local::View::Where::shadow;
  part.coded = {};
  if (decision_.on() && !encode(part)) return;
  if (decision_.wants_sample()) sample(part);
  std::vector<transport::Write> writes;
  const std::uint64_t shadow = memory_.view->shadow_offset(part.pinned),
                      into = range.first - manifest.slices()[job.request.slice].range.first;  // elements
  std::uint64_t slot = part.slot.value_or(0) * local::kPartBytes;
  part.wire_bytes = 0;
  for (std::uint32_t column = 0; column < manifest.columns(range); ++column) {
    const local::ColumnLocation location = memory_.view->location(range, column);
    transport::RemoteRange remote = job.request.columns[column];
    const std::uint64_t whole = manifest.length(range, column);
    remote.offset += into * size_of(manifest.tensors()[range.tensor].type_of(column));
    const bool coded = part.coded[column] > 0;
    const std::uint64_t length = coded ? part.coded[column] : whole;
    writes.push_back(
        {.context = job.number << 8 | index,
         .local = coded ? transport::LocalRange{slots_region_, slot}
                  : part.from_shadow
                      ? transport::LocalRange{memory_.shadow, shadow + manifest.packed_offset(range, column)}
                      : transport::LocalRange{memory_.state[location.memory_range], location.offset},
         .remote = remote,
         .length = length,
         .notify = WriteTag{part.pinned.part, column, coded, part.generation}.packed(),
         .streamed = !coded,
         .digested = !coded});
    slot += whole;
    part.wire_bytes += length;
  }
  if (!engine_.write(joiner_, writes)) {
    failed_ = true;
    return;
  }
  part.writing = true;
  part.outstanding = static_cast<std::uint32_t>(writes.size());
  if (writes_under_way_ == 0) moved_at_ = looked_at_;
  writes_under_way_ += writes.size();
  bytes_sent_ += manifest.bytes_of(range);
  if (!memory_.proofs->is_all()) passed_on_ += manifest.bytes_of(range);
  wire_bytes_ += part.wire_bytes;
  pacer_.spend(part.wire_bytes);
  decision_.on_posted(part.wire_bytes, clock_.now());
}

void Source::on_write_completed(std::uint64_t context, bool success, TimePoint now) {
  auto found = jobs_.find(context >> 8);
  if (found == jobs_.end() || (context & 0xff) >= found->second.parts.size()) return;
  --writes_under_way_;
  moved_at_ = now;
  PartJob& part = found->second.parts[context & 0xff];
  if (!success) failed_ = true;
  if (--part.outstanding > 0 || failed_) return;
  part.writing = false;
  decision_.on_completed(part.wire_bytes, now);
  if (part.slot) free_slots_.push_back(*std::exchange(part.slot, std::nullopt));
  if (part.detached) {
    part.digest = part.digest_sent;
    return;
  }
  if (part.from_shadow) memory_.view->release(part.pinned);
  else if (!memory_.view->release_if_untouched(part.pinned))
    return;  // an update got in between: again, from the shadow buffer
  part.digest = part.digest_sent;
}

bool Source::advance(Question& question) {
  auto& view = *memory_.view;
  // Asked by somebody who has heard sooner than this daemon that this replica contributes.
  if (!memory_.proofs->is_all()) return false;
  const auto answer = [&](bool too_late) {
    proto::Stream message;
    message.mutable_verify_reply()->set_request(question.request);
    message.mutable_verify_reply()->set_too_late(too_late);
    std::size_t part = 0;
    for (std::size_t i = 0; !too_late && i < question.slices.size(); ++i) {
      std::uint64_t whole = 0;
      for (std::uint32_t p = 0; p < view.manifest().slices()[question.slices[i]].parts; ++p)
        whole = combine_digests(whole, *question.digests[part++]);
      message.mutable_verify_reply()->add_digests(whole);
    }
    send(message);
    return true;
  };
  if (question.pinned.empty()) {
    if (view.clock().version > question.version) return answer(true);
    if (view.clock().version < question.version) return false;  // not there yet
    if (ahead(question.slices, question.version)) return answer(true);
    std::vector<std::uint32_t> parts;
    for (auto slice : question.slices)
      for (auto part : parts_of(slice)) parts.push_back(part);
    auto pinned = view.pin(parts);
    if (!pinned) return false;
    question.pinned = pinned->second;
    question.digests.resize(question.pinned.size());
    if (pinned->first != question.version) {  // an update came and went between the two looks
      for (const auto& one : std::exchange(question.pinned, {})) view.release(one);
      return answer(true);
    }
  }
  return settle_pins(view, question.pinned, question.digests) && answer(false);
}

void Source::send(const proto::Stream& message) {
  const std::string bytes = message.SerializeAsString();
  if (!engine_.send(joiner_, as_bytes(bytes))) failed_ = true;
}

}  // namespace rejoin::catchup
