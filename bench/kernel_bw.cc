// rejoin_kernel_bw: what a GPU's kernels move, beside the card's own measured copy bandwidth: the all-reduce's
// additions and coding, by number of blocks and size of a work, and the digests of catch-up.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>

#include "base/coded_chunk.h"
#include "base/command_line.h"
#include "base/digest.h"
#include "base/fail.h"
#include "base/log.h"
#include "bench/chart.h"
#include "device/digester.h"
#include "device/reducer.h"
#include "ftar/coding.h"
#include "ftar/reduce.h"

namespace rejoin::bench {
namespace {

struct Settings {
  int cuda = 0;
  std::uint64_t bytes = 256 * MiB;
  std::vector<std::uint64_t> chunks{64 * KiB, 256 * KiB, 1 * MiB, 8 * MiB, 64 * MiB};
  int iterations = 20;
  std::vector<unsigned> blocks{1, 2, 4, 8, 16, 32, 64, 132, 264};
  unsigned threads = 512;
  std::string type = "float32", svg;
  bool json = false;
};

// A copy reads and writes each byte of its result, an addition also reads the other input, a digest only reads.
constexpr double kCopyMoves = 2, kAddMoves = 3, kDigestMoves = 1;

// What works do: additions; a hop of the reduce-scatter, which takes and gives coded chunks, or the end of the
// all-gather, which decodes them.
struct Kind {
  std::string what, title;
  coding::Width width = coding::Width::plain;
  bool decodes = false;
  // Bytes read and written for each of the elements. A hop reads what arrives, its own input and what was lost before.
  double moves(DataType type) const {
    const double coded =
        static_cast<double>(coding::bytes_of_block(type, width)) / static_cast<double>(coding::kPlainBlock);
    return width == coding::Width::plain ? kAddMoves : decodes ? coded + 1 : 2 * coded + 3;
  }
};
std::vector<Kind> kinds_of(DataType type) {
  using coding::Width;
  std::vector<Kind> kinds{{.what = "add", .title = "additions"}};
  if (!coding::codes(type)) return kinds;
  for (const Width width : {Width::eight, Width::four}) {
    const int bits = static_cast<int>(width);
    kinds.push_back({fmt::format("code{}", bits), fmt::format("hops coded in {} bits", bits), width, false});
    kinds.push_back({fmt::format("decode{}", bits), fmt::format("decoding {} bits", bits), width, true});
  }
  return kinds;
}

// In GB/s of results, or of elements.
struct Results {
  double copy = 0, digest = 0;
  using Rates = std::vector<std::vector<double>>;  // by chunk, by number of blocks
  std::vector<std::pair<Kind, Rates>> works;
};

class Bench {
 public:
  Bench(const Settings& settings, std::shared_ptr<device::Device> device)
      : s_(settings), type_(*data_type_named(settings.type)), device_(std::move(device)) {}

  Result<Results> run() {
    if (auto filled = fill(); !filled) return tl::unexpected(filled.error());
    Results results;
    Result<> done = measure(results.copy, [&]() -> Result<> {
      if (auto copied = stream_->copy(out_.bytes.data(), a_.bytes.data(), s_.bytes); !copied) return copied;
      return stream_->synchronize();
    });
    for (const auto& kind : kinds_of(type_)) {
      auto& rates = results.works.emplace_back(kind, Results::Rates()).second;
      for (std::size_t c = 0; c < s_.chunks.size(); ++c) {
        auto& row = rates.emplace_back(s_.blocks.size());
        Bytes expected;
        for (std::size_t b = 0; b < s_.blocks.size() && done; ++b) {
          auto reducer = device::Reducer::make(
              *device_, {.blocks = s_.blocks[b], .threads = s_.threads, .codes = kind.width != coding::Width::plain});
          if (!reducer) return tl::unexpected(reducer.error());
          if (kind.width != coding::Width::plain) done = code_first(**reducer, kind, s_.chunks[c]);
          const std::uint64_t chunk = std::min(s_.chunks[c], s_.bytes);
          if (done && b == 0) done = by_cpu(kind, chunk).map([&](Bytes result) { expected = std::move(result); });
          if (done) done = check(**reducer, kind, chunk, expected);
          if (done) done = measure(row[b], [&] { return all_works(**reducer, kind, s_.chunks[c]); });
        }
      }
    }
    if (done) {
      auto digester = device::Digester::make(*device_);
      if (!digester) return tl::unexpected(digester.error());
      const std::span<const std::byte> whole[] = {a_.bytes};
      auto here = read(a_, s_.bytes);
      if (!here) return tl::unexpected(here.error());
      const std::uint64_t expected = rejoin::digest(*here);
      done = measure(results.digest, [&]() -> Result<> {
        const auto digests = (*digester)->digests(whole);
        if (!digests) return tl::unexpected(digests.error());
        return digests->front() == expected ? Result<>() : wrong("digest");
      });
    }
    if (!done) return tl::unexpected(done.error());
    return results;
  }

 private:
  // Random bits that are normal numbers of every type: zeros may be faster than a trainer's gradients.
  Result<> fill() {
    auto stream = device_->make_stream();
    if (!stream) return tl::unexpected(stream.error());
    stream_ = std::move(*stream);
    const std::uint64_t block = std::min(s_.bytes, 4 * MiB);
    auto pinned = device_->allocate_pinned(block);
    if (!pinned) return tl::unexpected(pinned.error());
    std::mt19937_64 random(1);
    for (std::uint64_t at = 0; at < block; at += sizeof(std::uint64_t)) {
      const std::uint64_t bits = (random() & 0x8fff8fff8fff8fff) | 0x3000300030003000;
      std::copy_n(reinterpret_cast<const std::byte*>(&bits), sizeof bits, pinned->bytes.data() + at);
    }
    for (auto* memory : {&a_, &b_, &out_, &arrived_, &coded_}) {
      auto made = device_->allocate(s_.bytes);
      if (!made) return tl::unexpected(made.error());
      *memory = std::move(*made);
      for (std::uint64_t at = 0; at < s_.bytes; at += block)
        if (auto copied =
                stream_->copy(memory->bytes.data() + at, pinned->bytes.data(), std::min(block, s_.bytes - at));
            !copied)
          return copied;
    }
    return stream_->synchronize();
  }

  // The median.
  template <typename Work>
  Result<> measure(double& gigabytes_per_second, Work work) {
    if (Result<> warm = work(); !warm) return warm;
    std::vector<double> took;
    for (int i = 0; i < s_.iterations; ++i) {
      const TimePoint start = clock_.now();
      if (Result<> done = work(); !done) return done;
      took.push_back(seconds(clock_.now() - start));
    }
    std::sort(took.begin(), took.end());
    gigabytes_per_second = static_cast<double>(s_.bytes) / took[took.size() / 2] * 1e-9;
    return {};
  }

  // As the ring does it: chunk by chunk, each given when there is room, in a kernel that is already running.
  Result<> in_chunks(device::Reducer& reducer, std::uint64_t chunk, auto give) {
    for (std::uint64_t at = 0; at < s_.bytes; at += chunk)
      if (auto given = give(at, std::min(chunk, s_.bytes - at) / size_of(type_)); !given)
        return tl::unexpected(given.error());
    while (!reducer.idle())
      if (auto done = reducer.done(); !done) return tl::unexpected(done.error());
    return {};
  }
  Result<> all_works(device::Reducer& reducer, const Kind& kind, std::uint64_t chunk) {
    return in_chunks(reducer, chunk, [&](std::uint64_t at, std::uint64_t count) {
      if (kind.width == coding::Width::plain)
        return reducer.add(type_, out_.bytes.data() + at, a_.bytes.data() + at, b_.bytes.data() + at, count, 0);
      coding::Pass pass{
          .type = type_, .count = count, .arrived = arrived_.bytes.data() + at, .arrived_width = kind.width};
      if (kind.decodes) {
        pass.out = out_.bytes.data() + at;
      } else {
        pass.own = b_.bytes.data() + at;
        pass.feedback = pass.residual = out_.bytes.data() + at;
        pass.width = kind.width;
        pass.coded = coded_.bytes.data() + at;
      }
      return reducer.code(pass, nullptr);
    });
  }
  // What arrives.
  Result<> code_first(device::Reducer& reducer, const Kind& kind, std::uint64_t chunk) {
    return in_chunks(reducer, chunk, [&](std::uint64_t at, std::uint64_t count) {
      return reducer.code({.type = type_,
                           .count = count,
                           .own = a_.bytes.data() + at,
                           .width = kind.width,
                           .coded = arrived_.bytes.data() + at},
                          nullptr);
    });
  }

  static tl::unexpected<Error> wrong(std::string_view what) {
    return fail(ErrorCode::corrupt, "{}: the GPU's result differs from the CPU's: nothing was measured", what);
  }
  Result<Bytes> read(const device::Memory& memory, std::uint64_t bytes) {
    Bytes here(bytes);
    if (auto copied = stream_->copy(here.data(), memory.bytes.data(), bytes); !copied)
      return tl::unexpected(copied.error());
    if (auto done = stream_->synchronize(); !done) return tl::unexpected(done.error());
    return here;
  }

  // What one work gives, by the CPU. A hop is without what was lost before.
  Result<Bytes> by_cpu(const Kind& kind, std::uint64_t chunk) {
    const bool plain = kind.width == coding::Width::plain;
    const auto arrived = read(plain ? a_ : arrived_, coding::coded_bytes(type_, chunk, kind.width));
    if (!arrived) return arrived;
    const std::size_t count = chunk / size_of(type_);
    Bytes result(bytes_of_result(kind, chunk));
    if (kind.decodes) return ftar::coding::decode(type_, kind.width, result.data(), arrived->data(), count), result;
    const auto own = read(b_, chunk);
    if (!own) return own;
    if (plain) return ftar::add(type_, result.data(), arrived->data(), own->data(), count), result;
    (void)ftar::coding::run(hop(kind, count, own->data(), arrived->data(), result.data()));
    return result;
  }
  std::uint64_t bytes_of_result(const Kind& kind, std::uint64_t chunk) const {
    return kind.decodes ? chunk : coding::coded_bytes(type_, chunk, kind.width);
  }
  coding::Pass hop(const Kind& kind, std::size_t count, const std::byte* own, const std::byte* arrived,
                   std::byte* coded) const {
    return {.type = type_,
            .count = count,
            .own = own,
            .arrived = arrived,
            .arrived_width = kind.width,
            .width = kind.width,
            .coded = coded};
  }
  // Whether the GPU gives the same, bit by bit.
  Result<> check(device::Reducer& reducer, const Kind& kind, std::uint64_t chunk, const Bytes& expected) {
    const std::size_t count = chunk / size_of(type_);
    const bool plain = kind.width == coding::Width::plain;
    const auto given = in_chunks(reducer, s_.bytes, [&](std::uint64_t, std::uint64_t) {
      if (plain) return reducer.add(type_, out_.bytes.data(), a_.bytes.data(), b_.bytes.data(), count, 0);
      auto pass = hop(kind, count, b_.bytes.data(), arrived_.bytes.data(), coded_.bytes.data());
      if (kind.decodes)
        pass.own = nullptr, pass.width = coding::Width::plain, pass.coded = nullptr, pass.out = out_.bytes.data();
      return reducer.code(pass, nullptr);
    });
    if (!given) return given;
    const auto result = read(plain || kind.decodes ? out_ : coded_, expected.size());
    if (!result) return tl::unexpected(result.error());
    return expected == *result ? Result<>() : wrong(kind.title);
  }

  const Settings& s_;
  const DataType type_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> stream_;
  device::Memory a_, b_, out_, arrived_, coded_;
  SteadyClock clock_;
};

std::string table(const Settings& s, const std::string& device, const Results& results) {
  const double limit = results.copy * kCopyMoves;
  std::string out = fmt::format("# {}, {} of {}; ratios are of bytes read and written to the copy's\n", device,
                                human_bytes(s.bytes), s.type);
  out += fmt::format("copy, by the driver: {:.1f} GB/s, {:.1f} GB/s of memory\n", results.copy, limit);
  out += fmt::format("digest: {:.1f} GB/s ({:.2f})\n", results.digest, results.digest * kDigestMoves / limit);
  for (const auto& [kind, rates] : results.works) {
    out += fmt::format("{} in GB/s of elements (ratio), by size of a work and blocks of {}:\n{:>10}", kind.title,
                       s.threads, "");
    for (const unsigned blocks : s.blocks) out += fmt::format(" {:>14}", blocks);
    for (std::size_t c = 0; c < s.chunks.size(); ++c) {
      out += fmt::format("\n{:>10}", human_bytes(s.chunks[c]));
      for (const double rate : rates[c])
        out += fmt::format(" {:>14}",
                           fmt::format("{:.1f} ({:.2f})", rate, rate * kind.moves(*data_type_named(s.type)) / limit));
    }
    out += "\n";
  }
  return out;
}

nlohmann::json json(const Settings& s, const std::string& device, const Results& results) {
  const double limit = results.copy * kCopyMoves;
  nlohmann::json out{{"device", device}, {"bytes", s.bytes}, {"type", s.type}, {"threads", s.threads}};
  const auto row = [&](const std::string& what, double rate, double moves) -> nlohmann::json& {
    return out["rows"].emplace_back(nlohmann::json{{"what", what},
                                                   {"gigabytes_per_second", rate},
                                                   {"memory_gigabytes_per_second", rate * moves},
                                                   {"ratio", rate * moves / limit}});
  };
  row("copy", results.copy, kCopyMoves);
  row("digest", results.digest, kDigestMoves);
  for (const auto& [kind, rates] : results.works)
    for (std::size_t c = 0; c < s.chunks.size(); ++c)
      for (std::size_t b = 0; b < s.blocks.size(); ++b)
        row(kind.what, rates[c][b], kind.moves(*data_type_named(s.type)))
            .update({{"blocks", s.blocks[b]}, {"chunk", s.chunks[c]}});
  return out;
}

std::string drawn(const Settings& s, const std::string& device, const Results& results) {
  std::vector<Line> lines;
  for (std::size_t c = 0; c < s.chunks.size(); ++c) {
    auto& line = lines.emplace_back(Line{.name = "works of " + human_bytes(s.chunks[c])});
    for (const double rate : results.works.front().second[c])
      line.values.push_back(rate * kAddMoves / (results.copy * kCopyMoves));
  }
  return chart(fmt::format("Additions of {} on {}: bytes read and written, of the driver's copy's {:.0f} GB/s", s.type,
                           device, results.copy * kCopyMoves),
               fmt::format("blocks of {} threads", s.threads), s.blocks, lines);
}

int run(const Settings& settings) {
  auto device = device::open_cuda({.ordinal = settings.cuda});
  auto results = device ? Bench(settings, *device).run() : tl::unexpected(device.error());
  if (!results) {
    std::cerr << "rejoin_kernel_bw: " << results.error().message << "\n";
    return 1;
  }
  const std::string name = (*device)->name();
  std::cout << (settings.json ? json(settings, name, *results).dump(2) + "\n" : table(settings, name, *results));
  if (settings.svg.empty()) return 0;
  std::ofstream file(settings.svg);
  file << drawn(settings, name, *results);
  file.close();
  if (file) return 0;
  std::cerr << "rejoin_kernel_bw: " << settings.svg << " could not be written\n";
  return 1;
}

}  // namespace
}  // namespace rejoin::bench

int main(int argc, char** argv) {
  using namespace rejoin;
  bench::Settings s;
  CommandLine line("What a GPU's kernels move, beside its copy bandwidth.");
  std::vector<std::string> types;
  for (const auto type : kDataTypes) types.emplace_back(to_string(type));
  line.add("--use_cuda", s.cuda, "which CUDA device").range(0, 1 << 30).show_default();
  line.add("-s,--size", s.bytes, "bytes of each of five buffers")
      .sized()
      .range(std::uint64_t{64}, 256 * MiB)
      .show_default();
  line.add("--chunk", s.chunks, "what is added or coded at a time, each size in turn")
      .separated_by(',')
      .sized()
      .range(std::uint64_t{64}, 256 * MiB);
  line.add("-d,--datatype", s.type, "of the elements").one_of(types).show_default();
  line.add("-n,--iters", s.iterations, "timed iterations; the median counts").range(1, 100000).show_default();
  line.add("--blocks", s.blocks, "blocks of the kernel, each number in turn")
      .separated_by(',')
      .range(1, 1 << 30)
      .show_default();
  line.add("--threads", s.threads, "threads of each").show_default();
  line.add("--svg", s.svg, "draws the additions into this file");
  line.flag("--json", s.json, "as JSON");
  if (const auto status = line.parse(argc, argv)) return *status;
  const auto odd = [](std::uint64_t size) { return size % coding::kPlainBlock != 0; };
  if (odd(s.bytes) || std::any_of(s.chunks.begin(), s.chunks.end(), odd)) {
    std::cerr << "rejoin_kernel_bw: --size and --chunk must be multiples of 64\n";
    return 2;
  }
  init_logging("kernel_bw", "warn");
  return bench::run(s);
}
