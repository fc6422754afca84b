// rejoin_gradient_codecs: what is left of gradients after zstd and after the all-reduce's coding, how fast both are on
// one core, and what coding loses. For bench/gradient_codecs.py, which brings a model's gradients.
#include <fmt/format.h>
#include <time.h>
#include <zstd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/arithmetic.h"
#include "base/bytes.h"
#include "base/command_line.h"
#include "base/fail.h"
#include "ftar/coding.h"
#include "ftar/reduce.h"

namespace rejoin::bench {
namespace {

constexpr std::size_t kChunk = 1 * MiB;  // as a ring's

struct Row {
  std::string type, codec;
  double left = 0, encode = 0, decode = 0;  // in relation to the bytes; bytes of gradients a second
  double error = 0;                         // root mean square of what is lost, in relation to the values
};

double processor_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Of so many bytes, in the best of the passes that fit into half a second of a core's time: others may use it, too.
double rate(std::size_t bytes, const std::function<void()>& pass) {
  double best = 0;
  for (const double begin = processor_seconds(); processor_seconds() < begin + 0.5;) {
    const double began = processor_seconds();
    pass();
    best = std::max(best, static_cast<double>(bytes) / (processor_seconds() - began));
  }
  return best;
}

// The first byte of all elements, then the second one, as compressors of floats do.
template <std::size_t kSize>
void to_planes(std::byte* out, BytesView in) {
  const std::size_t count = in.size() / kSize;
  for (std::size_t i = 0; i < count; ++i)
    for (std::size_t b = 0; b < kSize; ++b) out[b * count + i] = in[i * kSize + b];
}
template <std::size_t kSize>
void from_planes(std::byte* out, BytesView in) {
  const std::size_t count = in.size() / kSize;
  for (std::size_t i = 0; i < count; ++i)
    for (std::size_t b = 0; b < kSize; ++b) out[i * kSize + b] = in[b * count + i];
}

struct Zstd {
  std::unique_ptr<ZSTD_CCtx, decltype(&ZSTD_freeCCtx)> encoder{ZSTD_createCCtx(), ZSTD_freeCCtx};
  std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)> decoder{ZSTD_createDCtx(), ZSTD_freeDCtx};
};

Result<Row> with_zstd(BytesView gradients, DataType type, int level, bool planes) {
  const Zstd zstd;
  const std::size_t size = size_of(type);
  std::vector<Bytes> coded;
  std::size_t failed = 0, total = 0;
  const auto chunk = [&](std::size_t at) { return gradients.subspan(at, std::min(kChunk, gradients.size() - at)); };
  for (std::size_t at = 0; at < gradients.size(); at += kChunk) coded.emplace_back(ZSTD_compressBound(kChunk));
  std::vector<std::size_t> lengths(coded.size());
  Bytes shuffled(kChunk), restored(gradients.size());
  Row row{.type = std::string(to_string(type)),
          .codec = fmt::format("zstd {}{}", level, planes ? ", byte planes" : "")};
  row.encode = rate(gradients.size(), [&] {
    for (std::size_t i = 0; i < coded.size(); ++i) {
      BytesView in = chunk(i * kChunk);
      if (planes) {
        (size == 4 ? to_planes<4> : to_planes<2>)(shuffled.data(), in);
        in = BytesView(shuffled).first(in.size());
      }
      lengths[i] = ZSTD_compressCCtx(zstd.encoder.get(), coded[i].data(), coded[i].size(), in.data(), in.size(), level);
      failed += ZSTD_isError(lengths[i]);
    }
  });
  row.decode = rate(gradients.size(), [&] {
    for (std::size_t i = 0; i < coded.size(); ++i) {
      const std::size_t length = chunk(i * kChunk).size();
      std::byte* out = planes ? shuffled.data() : restored.data() + i * kChunk;
      failed += ZSTD_decompressDCtx(zstd.decoder.get(), out, length, coded[i].data(), lengths[i]) != length;
      if (planes)
        (size == 4 ? from_planes<4> : from_planes<2>)(restored.data() + i * kChunk, BytesView(shuffled).first(length));
    }
  });
  if (failed > 0 || std::memcmp(restored.data(), gradients.data(), gradients.size()) != 0)
    return fail(ErrorCode::corrupt, "zstd {} did not restore the gradients", level);
  for (const std::size_t length : lengths) total += length;
  row.left = static_cast<double>(total) / static_cast<double>(gradients.size());
  return row;
}

// As a hop of the ring codes: with what was lost before, and keeping what is lost now.
Row with_coding(BytesView gradients, DataType type, ftar::coding::Width width) {
  namespace coding = ftar::coding;
  const std::size_t count = gradients.size() / size_of(type);
  Bytes coded(coding::coded_bytes(type, gradients.size(), width)), feedback(gradients.size()), out(gradients.size());
  Row row{.type = std::string(to_string(type)), .codec = fmt::format("{} bits", static_cast<int>(width))};
  const coding::Pass pass{.type = type,
                          .count = count,
                          .own = gradients.data(),
                          .feedback = feedback.data(),
                          .residual = out.data(),
                          .width = width,
                          .coded = coded.data()};
  const coding::Loss loss = coding::run(pass);
  row.error = std::sqrt(loss.lost / loss.of);
  row.encode = rate(gradients.size(), [&] { (void)coding::run(pass); });
  row.decode = rate(gradients.size(), [&] { coding::decode(type, width, out.data(), coded.data(), count); });
  row.left = static_cast<double>(coded.size()) / static_cast<double>(gradients.size());
  return row;
}

Result<std::vector<Row>> measure(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string read{std::istreambuf_iterator<char>(file), {}};
  const std::size_t count = read.size() / sizeof(float);
  if (!file || count == 0 || read.size() % sizeof(float) != 0)
    return fail(ErrorCode::invalid_argument, "{}: {} bytes are no float32 gradients", path, read.size());
  Bytes half(count * sizeof(std::uint16_t));
  for (std::size_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, read.data() + i * sizeof value, sizeof value);
    const auto rounded = arithmetic::to_bfloat16(value);
    std::memcpy(half.data() + i * sizeof rounded, &rounded, sizeof rounded);
  }
  std::vector<Row> rows;
  for (const auto& [type, gradients] :
       {std::pair{DataType::float32, as_bytes(read)}, std::pair{DataType::bfloat16, BytesView(half)}}) {
    for (const bool planes : {false, true})
      for (const int level : {1, 3}) {
        auto row = with_zstd(gradients, type, level, planes);
        if (!row) return tl::unexpected(row.error());
        rows.push_back(std::move(*row));
      }
    for (const auto width : {ftar::coding::Width::eight, ftar::coding::Width::four})
      rows.push_back(with_coding(gradients, type, width));
  }
  return rows;
}

}  // namespace
}  // namespace rejoin::bench

int main(int argc, char** argv) {
  using namespace rejoin;
  std::string path;
  CommandLine line("Codes gradients with zstd and as the all-reduce does over slow links: JSON, a line for each way.");
  line.add("gradients", path, "a file of float32").required();
  if (auto done = line.parse(argc, argv)) return *done;
  const auto rows = bench::measure(path);
  if (!rows) return fmt::print(stderr, "rejoin_gradient_codecs: {}\n", rows.error().message), 1;
  auto json = nlohmann::json::array();
  for (const auto& row : *rows)
    json.push_back({{"type", row.type},
                    {"codec", row.codec},
                    {"left", row.left},
                    {"encode_bytes_per_second", row.encode},
                    {"decode_bytes_per_second", row.decode},
                    {"error", row.error}});
  std::cout << nlohmann::json{{"instructions", ftar::instruction_set()}, {"rows", json}}.dump() << "\n";
  return 0;
}
