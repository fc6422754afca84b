#include "catchup/source.h"

#include <algorithm>

#include "base/digest.h"

namespace rejoin::catchup {

namespace {

constexpr std::size_t kMaxRequests = 1 << 18;
constexpr std::size_t kMaxQuestions = 64;
constexpr std::uint32_t kSlots = 16;              // coded parts on their way
constexpr std::uint64_t kSampleBytes = 16 * KiB;  // of each column
// While the trainer exchanges gradients the stream starts nothing new, but never for longer than this.
constexpr Duration kYield = std::chrono::milliseconds(20);

}  // namespace

Source::Source(transport::Engine& engine, transport::EndpointId joiner, Memory memory, Compression compression,
               Pacer& pacer, const Clock& clock)
    : engine_(engine),
      joiner_(joiner),
      memory_(memory),
      pacer_(pacer),
      clock_(clock),
      decision_(compression, pacer.limit()) {}

Source::~Source() {
  for (auto& [number, job] : jobs_)
    for (auto& part : job.parts)
      if (!part.digest && !part.detached) memory_.view->release(part.held);
  for (auto& question : questions_)
    for (std::size_t i = 0; i < question.held.size(); ++i)
      if (!question.digests[i]) memory_.view->release(question.held[i]);
  if (slots_.size() > 0) engine_.deregister(slots_region_);
}

Source::Stats Source::stats() const {
  return {bytes_sent_,
          wire_bytes_,
          decision_.on(),
          decision_.link_bytes_per_second(),
          decision_.coder_bytes_per_second(),
          decision_.ratio()};
}

Result<> Source::on_fetch(const proto::Fetch& fetch) {
  const auto& manifest = memory_.view->manifest();
  if (fetch.length() != manifest.state_bytes())
    return fail(ErrorCode::mismatch, "the joiner's state has {} bytes, ours {}", fetch.length(),
                manifest.state_bytes());
  for (auto slice : fetch.slices()) {
    if (slice >= manifest.slices().size() || requests_.size() >= kMaxRequests)
      return fail(ErrorCode::corrupt, "it asks for slice {} of {}", slice, manifest.slices().size());
    requests_.push_back({slice, fetch.at_least(), {fetch.key(), fetch.length()}});
  }
  return {};
}

Result<> Source::on_prove(const proto::Prove& prove) {
  const auto& manifest = memory_.view->manifest();
  std::uint64_t parts = 0;
  for (auto slice : prove.slices()) {
    if (slice >= manifest.slices().size()) return fail(ErrorCode::corrupt, "it asks about slice {}", slice);
    parts += manifest.slices()[slice].parts;
  }
  if (parts == 0 || parts > shm::kMaxPins || questions_.size() >= kMaxQuestions)
    return fail(ErrorCode::corrupt, "it asks about {} parts at once", parts);
  questions_.push_back({prove.request(), prove.version(), {prove.slices().begin(), prove.slices().end()}, {}, {}});
  return {};
}

std::vector<std::uint32_t> Source::parts_of(std::uint32_t slice) const {
  const auto& s = memory_.view->manifest().slices()[slice];
  std::vector<std::uint32_t> parts;
  for (std::uint32_t i = 0; i < s.parts; ++i) parts.push_back(s.first_part + i);
  return parts;
}

bool Source::work(TimePoint now) {
  if (failed_) return false;
  for (auto it = questions_.begin(); it != questions_.end();) it = advance(*it) ? questions_.erase(it) : std::next(it);
  std::vector<std::uint64_t> numbers;
  for (const auto& [number, job] : jobs_) numbers.push_back(number);
  for (auto number : numbers) {
    advance(jobs_.at(number));
    const auto& parts = jobs_.at(number).parts;
    if (std::all_of(parts.begin(), parts.end(), [](const PartJob& part) { return part.digest.has_value(); })) {
      const SliceJob& job = jobs_.at(number);
      proto::Stream message;
      message.mutable_sent()->set_slice(job.request.slice);
      message.mutable_sent()->set_version(job.version);
      bool coded = false;
      for (const auto& part : parts) {
        message.mutable_sent()->add_digests(*part.digest);
        for (auto length : part.coded) coded |= length > 0;
      }
      const auto& manifest = memory_.view->manifest();
      for (std::size_t i = 0; coded && i < parts.size(); ++i)
        for (std::uint32_t c = 0; c < manifest.columns(manifest.parts()[parts[i].held.part]); ++c)
          message.mutable_sent()->add_coded(parts[i].coded[c]);
      jobs_.erase(number);
      say(message);
    }
  }
  start_slices(now);
  return !requests_.empty() || !jobs_.empty() || !questions_.empty();
}

void Source::start_slices(TimePoint now) {
  while (!requests_.empty()) {
    if (memory_.view->phase() == shm::Phase::exchange && now - last_start_ < kYield) return;
    if (!pacer_.may_send(now)) return;
    if (memory_.view->clock().version < requests_.front().at_least) return;
    auto held = memory_.view->hold(parts_of(requests_.front().slice));
    if (!held) return;
    const std::uint64_t number = next_job_++;
    SliceJob& job = jobs_[number];
    job.number = number;
    job.request = requests_.front();
    job.version = held->first;
    requests_.pop_front();
    last_start_ = now;
    for (const auto& one : held->second) job.parts.push_back({.held = one});
    advance(job);
  }
}

void Source::advance(SliceJob& job) {
  for (std::size_t i = 0; i < job.parts.size() && !failed_; ++i) {
    PartJob& part = job.parts[i];
    if (part.digest || part.writing) continue;
    const auto where = memory_.view->where(part.held);
    if (where == shm::View::Where::copying) continue;
    write_part(job, i);
  }
}

// Writes a part's columns from where they are. From the state it is a gamble that no update begins meanwhile; a lost
// one is written again from aside, and the joiner believes nothing before `Sent`.
void Source::write_part(SliceJob& job, std::size_t index) {
  const auto& manifest = memory_.view->manifest();
  PartJob& part = job.parts[index];
  const shm::Part& range = manifest.parts()[part.held.part];
  // The digest first: it is of the held version if the hold lasts until the bytes are there.
  part.digest_sent = digest_held(*memory_.view, part.held);
  if (!part.digest_sent) return;  // being copied: from there, later
  part.from_aside = memory_.view->where(part.held) == shm::View::Where::aside;
  part.coded = {};
  if (decision_.on() && !encode(part)) return;
  if (decision_.wants_sample()) sample(part);
  std::vector<transport::Write> writes;
  std::uint64_t aside = memory_.view->aside_offset(part.held), slot = part.slot.value_or(0) * shm::kPartBytes;
  part.wire_bytes = 0;
  for (std::uint32_t column = 0; column < manifest.columns(range); ++column) {
    const shm::Extent extent = manifest.extent(range, column);
    const bool coded = part.coded[column] > 0;
    const std::uint64_t length = coded ? part.coded[column] : extent.length;
    writes.push_back({.context = job.number << 8 | index,
                      .local = coded             ? transport::LocalRange{slots_region_, slot}
                               : part.from_aside ? transport::LocalRange{memory_.aside, aside}
                                                 : transport::LocalRange{memory_.state, extent.offset},
                      .remote = {job.request.target, extent.offset},
                      .length = length,
                      .notify = ExtentTag{part.held.part, column, coded}.packed()});
    aside += manifest.packed_stride(range);
    slot += extent.length;
    part.wire_bytes += length;
  }
  if (!engine_.write(joiner_, writes)) {
    failed_ = true;
    return;
  }
  part.writing = true;
  part.outstanding = static_cast<std::uint32_t>(writes.size());
  bytes_sent_ += manifest.bytes_of(range);
  wire_bytes_ += part.wire_bytes;
  pacer_.spend(part.wire_bytes);
  decision_.on_posted(part.wire_bytes, clock_.now());
}

// Codes the columns that shrink. False: not now (no slot, or an update got in between), to be tried again.
bool Source::encode(PartJob& part) {
  if (slots_.size() == 0) {
    auto slots = Mapping::anonymous(kSlots * shm::kPartBytes);
    if (!slots) return true;  // no memory: plain
    auto region = engine_.register_region(slots->span(), transport::MemoryKind::host);
    if (!region) return true;
    slots_ = std::move(*slots);
    slots_region_ = *region;
    for (std::uint32_t i = 0; i < kSlots; ++i) free_slots_.push_back(i);
  }
  if (!part.slot && free_slots_.empty()) return false;
  if (!part.slot) part.slot = free_slots_.back(), free_slots_.pop_back();
  const auto& manifest = memory_.view->manifest();
  const TimePoint start = clock_.now();
  std::uint64_t at = *part.slot * shm::kPartBytes, plain = 0, coded = 0;
  bool all = true;
  for (std::uint32_t c = 0; c < manifest.columns(manifest.parts()[part.held.part]); ++c) {
    const BytesView bytes = memory_.view->column(part.held, c, part.from_aside);
    plain_.resize(bytes.size());
    memory_.view->read(bytes, plain_.data());
    const auto length = coder_.encode(plain_, slots_.span().subspan(at, bytes.size()));
    part.coded[c] = static_cast<std::uint32_t>(length.value_or(0));
    all = all && length.has_value();
    at += bytes.size();
    plain += bytes.size();
    coded += length.value_or(bytes.size());
  }
  decision_.on_coded(plain, coded, clock_.now() - start);
  // What was coded from the state is the held version's only if no update has begun.
  if (!part.from_aside && memory_.view->where(part.held) != shm::View::Where::state) return false;
  part.detached = all;
  if (all) memory_.view->release(part.held);
  return true;
}

void Source::sample(const PartJob& part) {
  const auto& manifest = memory_.view->manifest();
  Bytes out(kSampleBytes);
  std::uint64_t plain = 0, coded = 0;
  const TimePoint start = clock_.now();
  for (std::uint32_t c = 0; c < manifest.columns(manifest.parts()[part.held.part]); ++c) {
    BytesView bytes = memory_.view->column(part.held, c, part.from_aside);
    bytes = bytes.subspan(bytes.size() / 2);
    bytes = bytes.first(std::min<std::uint64_t>(bytes.size(), kSampleBytes));
    plain += bytes.size();
    plain_.resize(bytes.size());
    memory_.view->read(bytes, plain_.data());
    coded += coder_.encode(plain_, out).value_or(bytes.size());
  }
  if (plain > 0) decision_.on_coded(plain, coded, clock_.now() - start);
}

void Source::on_write_completed(std::uint64_t context, bool success, TimePoint now) {
  auto found = jobs_.find(context >> 8);
  if (found == jobs_.end() || (context & 0xff) >= found->second.parts.size()) return;
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
  if (part.from_aside) memory_.view->release(part.held);
  else if (!memory_.view->release_if_untouched(part.held)) return;  // an update got in between: again, from aside
  part.digest = part.digest_sent;
}

bool Source::advance(Question& question) {
  auto& view = *memory_.view;
  const auto answer = [&](bool passed) {
    proto::Stream message;
    message.mutable_proof()->set_request(question.request);
    message.mutable_proof()->set_passed(passed);
    std::size_t part = 0;
    for (std::size_t i = 0; !passed && i < question.slices.size(); ++i) {
      std::uint64_t whole = 0;
      for (std::uint32_t p = 0; p < view.manifest().slices()[question.slices[i]].parts; ++p)
        whole = combine_digests(whole, *question.digests[part++]);
      message.mutable_proof()->add_digests(whole);
    }
    say(message);
    return true;
  };
  if (question.held.empty()) {
    if (view.clock().version > question.version) return answer(true);
    if (view.clock().version < question.version) return false;  // not there yet
    std::vector<std::uint32_t> parts;
    for (auto slice : question.slices)
      for (auto part : parts_of(slice)) parts.push_back(part);
    auto held = view.hold(parts);
    if (!held) return false;
    question.held = held->second;
    question.digests.resize(question.held.size());
    if (held->first != question.version) {  // an update came and went between the two looks
      for (const auto& one : std::exchange(question.held, {})) view.release(one);
      return answer(true);
    }
  }
  bool whole = true;
  for (std::size_t i = 0; i < question.held.size(); ++i) {
    if (question.digests[i]) continue;
    question.digests[i] = digest_held(view, question.held[i]);
    if (question.digests[i]) view.release(question.held[i]);
    whole = whole && question.digests[i].has_value();
  }
  return whole && answer(false);
}

void Source::say(const proto::Stream& message) {
  const std::string bytes = message.SerializeAsString();
  if (!engine_.send(joiner_, as_bytes(bytes))) failed_ = true;
}

}  // namespace rejoin::catchup
