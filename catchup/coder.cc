#include "catchup/coder.h"

#include <zstd.h>

#include <algorithm>

#include "base/fail.h"

namespace rejoin::catchup {

namespace {

constexpr int kLevel = 1;
constexpr double kFastestLink = 2e9;  // bytes/s: above it no coder pays, so none is tried
constexpr std::uint64_t kSampleEvery = 64 * MiB;
constexpr std::uint64_t kMeasuredBytes = 64 * MiB;
constexpr Duration kMeasuredTime = std::chrono::milliseconds(50);

double smoothed(double before, double now) { return before == 0 ? now : 0.7 * before + 0.3 * now; }

}  // namespace

Result<Compression> parse_compression(const std::string& name) {
  if (name == "off") return Compression::never;
  if (name == "auto") return Compression::when_it_pays;
  if (name == "always") return Compression::always;
  return fail(ErrorCode::invalid_argument, "no compression '{}': use off, auto or always", name);
}

// The link's rate counts only the time in which something was under way.
void CodingDecision::on_posted(std::uint64_t bytes, TimePoint now) {
  if (in_flight_ == 0) busy_since_ = now;
  in_flight_ += bytes;
}

void CodingDecision::on_completed(std::uint64_t bytes, TimePoint now) {
  in_flight_ -= std::min(bytes, in_flight_);
  moved_ += bytes;
  plain_since_sample_ += bytes;
  const Duration busy = busy_ + (now - busy_since_);
  if (busy >= kMeasuredTime || (moved_ >= kMeasuredBytes && busy > Duration{})) {
    const double rate = static_cast<double>(moved_) / seconds(busy);
    link_ = smoothed(link_, limit_ > 0 ? std::min(limit_, rate) : rate);
    moved_ = 0;
    busy_ = {};
    busy_since_ = now;
    decide();
  } else if (in_flight_ == 0) {
    busy_ = busy;
  }
}

void CodingDecision::on_coded(std::uint64_t plain, std::uint64_t coded, Duration took) {
  plain_since_sample_ = 0;
  ratio_ = coder_ == 0 ? static_cast<double>(coded) / static_cast<double>(plain)
                       : smoothed(ratio_, static_cast<double>(coded) / static_cast<double>(plain));
  coder_ = smoothed(coder_, static_cast<double>(plain) / std::max(1e-9, seconds(took)));
  decide();
}

bool CodingDecision::wants_sample() const {
  if (mode_ != Compression::when_it_pays || link_ == 0 || link_ > kFastestLink || on_) return false;
  return coder_ == 0 || plain_since_sample_ >= kSampleEvery;
}

void CodingDecision::decide() {
  if (mode_ != Compression::when_it_pays || link_ == 0 || coder_ == 0) return;
  // Coder and link work at the same time, so the coder only has to keep up; with something to spare, as it takes turns
  // with the rest of the stream. The margins differ so that it does not flutter.
  on_ = coder_ > (on_ ? 1.5 : 2.0) * link_ && ratio_ < (on_ ? 0.96 : 0.92);
}

struct Coder::Contexts {
  std::unique_ptr<ZSTD_CCtx, decltype(&ZSTD_freeCCtx)> encoder{ZSTD_createCCtx(), ZSTD_freeCCtx};
  std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)> decoder{ZSTD_createDCtx(), ZSTD_freeDCtx};
};

Coder::Coder() : contexts_(std::make_unique<Contexts>()) {
  REJOIN_CHECK(contexts_->encoder && contexts_->decoder, "no memory for zstd");
}

Coder::~Coder() = default;

std::optional<std::size_t> Coder::encode(BytesView plain, std::span<std::byte> out) {
  const std::size_t room = std::min(out.size(), plain.size() / 16 * 15);
  const std::size_t coded =
      ZSTD_compressCCtx(contexts_->encoder.get(), out.data(), room, plain.data(), plain.size(), kLevel);
  if (ZSTD_isError(coded) != 0) return std::nullopt;  // it does not fit: not worth it
  return coded;
}

Result<> Coder::decode(BytesView coded, std::span<std::byte> plain) {
  const std::size_t size =
      ZSTD_decompressDCtx(contexts_->decoder.get(), plain.data(), plain.size(), coded.data(), coded.size());
  if (ZSTD_isError(size) != 0) return fail(ErrorCode::corrupt, "zstd: {}", ZSTD_getErrorName(size));
  if (size != plain.size()) return fail(ErrorCode::corrupt, "zstd: {} bytes where {} belong", size, plain.size());
  return {};
}

}  // namespace rejoin::catchup
