// Chunks that travel coded, where the link is slower than the coder: who codes what, and when it is decoded. See "Coded
// gradients" in docs/design-notes.md.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/fail.h"
#include "base/log.h"
#include "ftar/operation.h"

namespace rejoin::ftar {

using coding::Width;

namespace {

constexpr double kGain = 1.5;         // a hop must take so many times as long without coding
constexpr double kFewer = 12;         // times as much is lost in 4 bits as in 8
constexpr double kClear = 0.8;        // of the bound: only what loses less is coded in fewer bits
constexpr double kWeight = 0.25;      // of the last step
constexpr std::uint32_t kPause = 64;  // all-reduces

}  // namespace

bool is_slow(double link, double rate, DataType type, Width width) {
  const double ratio =
      static_cast<double>(coding::kPlainBlock) / static_cast<double>(coding::bytes_of_block(type, width));
  return 1 / link > kGain * (1 / (ratio * link) + 1 / rate);
}

void BucketCoding::measure() {
  // Squares in float32 are nothing of values that are smaller, and too much of larger ones: nothing is known then.
  constexpr double least = 1e-30, most = 1e36;
  if (!(loss->of > least && loss->of < most)) return;  // nor where nothing was coded
  const double now = std::sqrt(loss->lost / loss->of);
  if (!std::isfinite(now)) return;
  error = error ? *error + (now - *error) * kWeight : now;
}

void BucketCoding::adapt(double bound) {
  if (plain_for > 0) {
    --plain_for;
    return;
  }
  measure();
  if (!error) return;
  if (width == Width::eight && *error > bound) {
    plain_for = kPause;
    error.reset();
  } else if (width == Width::eight && *error * kFewer < bound * kClear) {
    width = Width::four;
    *error *= kFewer;
  } else if (width == Width::four && *error > bound) {
    width = Width::eight;
    *error /= kFewer;
  }
}

// ---- room, and who has it

Result<> Communicator::reserve_coding() {
  if (options_.coding == Coding::off) return {};
  if (reducer_ && !reducer_->codes())
    return fail(ErrorCode::invalid_argument, "coding '{}' with a reducer of a GPU that adds only",
                to_string(options_.coding));
  std::size_t total = 0;
  for (auto& bucket : buckets_) {
    if (bucket.small || !coding::codes(bucket.spec.type)) continue;
    auto feedback = Feedback::make(*coder_, bucket.bytes());
    if (!feedback) return tl::unexpected(feedback.error());
    bucket.coding = std::make_unique<BucketCoding>();
    bucket.coding->type = bucket.spec.type;
    bucket.coding->feedback = std::move(*feedback);
    bucket.coding->room = total;
    if (options_.coding == Coding::four) bucket.coding->width = Width::four;
    total += BucketCoding::room_for(bucket.spec.type, bucket.bytes());
  }
  if (total == 0) return {};
  const auto device = options_.device ? options_.device : device::make_host();
  auto memory = device->allocate(total);
  if (!memory) return tl::unexpected(memory.error());
  coded_room_ = std::move(*memory);
  auto region = engine_.register_region(coded_room_.bytes, device->kind(), transport::Access::remote_write);
  if (!region) return tl::unexpected(region.error());
  coded_region_ = *region;
  coding_rate_ = options_.coding_rate;
  if (options_.coding != Coding::automatic || coding_rate_ > 0) return {};
  return coder_->rate().map([&](double measured) { coding_rate_ = measured; });
}

// Behind the introduction. Who knows of no coding drops it.
bool Communicator::offer_coding(Peer& peer) {
  if (coded_room_.bytes.empty()) return true;
  const auto region = engine_.remote(coded_region_);
  const auto sent = send(peer, MessageHeader::coding, 0, MessageHeader::kCodingLayout, bytes_of(region));
  if (!sent) lose(peer, sent.error());
  return sent.has_value();
}

void Communicator::on_coding(Peer& peer, std::uint64_t layout, BytesView rest) {
  transport::RemoteRegion region;
  if (coded_room_.bytes.empty() || layout != MessageHeader::kCodingLayout || !take(rest, region)) return;
  if (region.length == coded_room_.bytes.size()) peer.coded_room = region;
}

bool Communicator::codes_to(Peer* peer, const Bucket& bucket) {
  if (peer == nullptr || !peer->coded_room || bucket.coding == nullptr) return false;
  if (options_.coding != Coding::automatic) return true;
  const auto rate = peer->rate.bytes_per_second();
  // By one type, whatever the bucket's: a link is slow or it is not.
  const bool slow = rate && is_slow(*rate, coding_rate_, DataType::float32, Width::eight);
  if (slow != std::exchange(peer->slow, slow))
    logger().info("the link to replica {} takes {:.0f} MB/s: what goes over it is {} coded", peer->member.replica,
                  *rate * 1e-6, slow ? "now" : "no longer");
  return slow;
}

void Communicator::adapt_coding(Bucket& bucket) {
  if (bucket.coding == nullptr) return;
  BucketCoding& coding = *bucket.coding;
  coding.feedback.on_done();
  if (options_.coding != Coding::automatic) return coding.measure();
  const auto before = std::pair(coding.width, coding.plain_for > 0);
  coding.adapt(options_.coding_error);
  if (before == std::pair(coding.width, coding.plain_for > 0)) return;
  const std::string now = coding.plain_for > 0 ? fmt::format("not coded for {} steps", coding.plain_for)
                                               : fmt::format("coded in {} bits", static_cast<int>(coding.width));
  const std::string why = coding.loss->of > 0 ? fmt::format(": coding lost {:.2g} % of it",
                                                            100 * std::sqrt(coding.loss->lost / coding.loss->of))
                                              : "";
  logger().info("over slow links bucket {} is {} from here on{}", bucket.index, now, why);
}

void Communicator::scale_feedback(Step step, float factor) {
  for (auto& bucket : buckets_)
    if (bucket.coding) bucket.coding->feedback.scale(step, factor);
}

// ---- one all-reduce

void RingOperation::begin_coding() {
  coding_ = bucket_.coding.get();
  if (coding_ == nullptr) return;
  forms_.resize(partial_.size(), Tag::kPlain);
  decoding_.resize(partial_.size());
  coding_->loss = std::make_shared<coding::Loss>();
  if (contributes_) coding_->feedback.begin(bucket_.step, bucket_.divisor);
  else coding_->feedback.forget();
  const Width width = coding_->plain_for > 0 || bucket_.spec.exact ? Width::plain : coding_->width;
  const bool right = owner_.codes_to(right_.to, bucket_), left = owner_.codes_to(left_.to, bucket_);
  const bool scatter = owner_.codes_to(scatter_to_, bucket_);
  slow_ = right || left || scatter;
  scatter_width_ = scatter ? width : Width::plain;
  final_width_ = width;
}

bool RingOperation::takes_coded(const Gather& gather) const { return gather.to == nullptr || gather.to->coded_room; }

std::uint32_t RingOperation::form_of(Width width, bool slow) {
  if (width == Width::eight) return Tag::kEight;
  if (width == Width::four) return Tag::kFour;
  return slow ? Tag::kPlainAfterSlow : Tag::kPlain;
}

Width RingOperation::width_of(std::uint32_t form) {
  return form == Tag::kEight ? Width::eight : form == Tag::kFour ? Width::four : Width::plain;
}

std::size_t RingOperation::length_of(std::uint32_t chunk, std::uint32_t form) const {
  return coding::coded_bytes(bucket_.spec.type, schedule_.chunk(chunk).length, width_of(form));
}

std::byte* RingOperation::coded_place(std::uint32_t chunk) const {
  return owner_.coded_room_.bytes.data() + coding_->place(schedule_, chunk);
}

// Where what is sent of a chunk is.
RingOperation::Source RingOperation::source_of(std::uint32_t chunk, bool own, bool takes_coded) const {
  const Range range = schedule_.chunk(chunk);
  const std::uint32_t form = coding_ == nullptr || !takes_coded ? Tag::kPlain : forms_[chunk];
  if (width_of(form) != Width::plain)
    return {{owner_.coded_region_, coding_->place(schedule_, chunk)}, length_of(chunk, form), form};
  return {{own && !partial_[chunk] ? bucket_.input : bucket_.output, range.offset}, range.length, form};
}

// Chunks of this member's own, which nobody has added to yet, are coded in order: the next one to be sent, and where
// that takes its time, as many more as there is room for.
bool RingOperation::own_is_coded() {
  const std::size_t most = std::min(scatter_own_, scatter_next_ + scatter_to_->free_slots.size());
  while (scatter_coded_ <= scatter_next_ && scatter_given_ < most) code_own(scatter_sends_[scatter_given_++]);
  return scatter_coded_ > scatter_next_;
}

void RingOperation::code_own(std::uint32_t chunk) {
  const Range range = schedule_.chunk(chunk);
  const bool as_it_is = scatter_width_ == Width::plain && coding_->feedback.before({}) == nullptr;
  forms_[chunk] = form_of(scatter_width_, slow_);
  if (!as_it_is) return give(combine(chunk, nullptr, Tag::kPlain, scatter_width_, false), GivenWork::own(chunk));
  ++scatter_coded_;
  if (std::byte* zeros = coding_->feedback.after_nothing(range))
    give(owner_.coder_->clear({zeros, range.length}), GivenWork::nothing_more());
}

// The fused pass of a hop: what arrived, plus our own input and what was lost of it before, goes coded to its place in
// the room, or as it is to the output. Of the result, the output gets what all others will decode.
Result<std::uint64_t> RingOperation::combine(std::uint32_t chunk, const std::byte* arrived, std::uint32_t form,
                                             Width width, bool last) {
  const Range range = schedule_.chunk(chunk);
  const auto& spec = bucket_.spec;
  Feedback& feedback = coding_->feedback;
  const bool plain = width == Width::plain;
  coding::Pass pass{.type = spec.type,
                    .count = range.length / size_of(spec.type),
                    .own = spec.input.data() + range.offset,
                    .arrived = arrived,
                    .arrived_width = width_of(form),
                    .feedback = feedback.before(range),
                    .times = feedback.times(),
                    .residual = plain ? feedback.after_nothing(range) : feedback.after(range),
                    .divisor = last ? bucket_.divisor : 0,
                    .width = width};
  if (!plain) pass.coded = coded_place(chunk);
  if (plain || last) pass.out = spec.output.data() + range.offset;
  return owner_.coder_->run(pass, coding_->loss);
}

// What a lone contributor has is the result.
void RingOperation::code_alone(std::uint32_t chunk) {
  const Width width = slow_ ? final_width_ : Width::plain;
  forms_[chunk] = form_of(width, false);
  give(combine(chunk, nullptr, Tag::kPlain, width, true), GivenWork::alone(chunk));
}

Result<std::uint64_t> RingOperation::add_coded(const Tag& tag, const std::byte* arrived) {
  const bool slow = slow_ || tag.form != Tag::kPlain, last = is_last(tag.chunk);
  const Width width = !last ? scatter_width_ : slow ? final_width_ : Width::plain;
  forms_[tag.chunk] = form_of(width, slow && !last);
  return combine(tag.chunk, arrived, tag.form, width, last);
}

void RingOperation::decode(std::uint32_t chunk) {
  const Range range = schedule_.chunk(chunk);
  decoding_[chunk] = true;
  give(owner_.flush().and_then([&] {
    return owner_.coder_->decode(bucket_.spec.type, width_of(forms_[chunk]), bucket_.spec.output.data() + range.offset,
                                 coded_place(chunk), range.length / size_of(bucket_.spec.type));
  }),
       GivenWork::decoded(chunk));
}

}  // namespace rejoin::ftar
