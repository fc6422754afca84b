// zstd on the stream, where it pays: the source measures its link and, on small samples, how fast and how well its
// state compresses, and encodes only while that shortens the transfer: the coder keeps up with the link and the state
// shrinks.
#pragma once

#include <memory>
#include <optional>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/result.h"

namespace rejoin::catchup {

enum class Compression : std::uint8_t { never, when_it_pays, always };
Result<Compression> parse_compression(const std::string& name);  // "off", "auto", "always"

// Decides. Pure: the caller passes in what was measured.
class CodingDecision {
 public:
  // `limit`: bytes/s that the stream may use, however fast the link is; 0: all.
  CodingDecision(Compression mode, double limit)
      : mode_(mode), limit_(limit), on_(mode == Compression::always), link_(limit) {}

  void on_posted(std::uint64_t bytes, TimePoint now);
  void on_completed(std::uint64_t bytes, TimePoint now);
  // A sample, or a whole part: `plain` bytes became `coded`, which took `took`.
  void on_coded(std::uint64_t plain, std::uint64_t coded, Duration took);

  bool wants_sample() const;
  bool on() const { return on_; }
  double link_bytes_per_second() const { return link_; }    // 0: not known yet
  double coder_bytes_per_second() const { return coder_; }  // of plain bytes
  double ratio() const { return ratio_; }                   // coded over plain

 private:
  void decide();

  const Compression mode_;
  const double limit_;
  bool on_;
  double link_, coder_ = 0, ratio_ = 1;
  std::uint64_t in_flight_ = 0, moved_ = 0;  // moved_ in busy_
  Duration busy_{};
  TimePoint busy_since_{};
  std::uint64_t plain_since_sample_ = 0;
};

// The coder itself. One thread.
class Coder {
 public:
  Coder();
  ~Coder();
  // Bytes written to `out`; nothing where they would not be fewer than 15/16 of the plain ones.
  std::optional<std::size_t> encode(BytesView plain, std::span<std::byte> out);
  // Exactly fills `plain`, or fails: `corrupt`.
  Result<> decode(BytesView coded, std::span<std::byte> plain);

 private:
  struct Contexts;
  std::unique_ptr<Contexts> contexts_;
};

}  // namespace rejoin::catchup
