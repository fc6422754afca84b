// rejoin_kernel_bw: what a GPU's kernels move, beside the card's own measured copy bandwidth: the all-reduce's
// additions, by number of blocks and size of a work, and the digests of catch-up.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>

#include "base/command_line.h"
#include "base/log.h"
#include "bench/chart.h"
#include "device/digester.h"
#include "device/reducer.h"

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

// In GB/s of results.
struct Results {
  double copy = 0, digest = 0;
  std::vector<std::vector<double>> additions;  // by chunk, by number of blocks
};

class Bench {
 public:
  Bench(const Settings& settings, std::shared_ptr<device::Device> device) : s_(settings), device_(std::move(device)) {}

  Result<Results> run() {
    if (auto filled = fill(); !filled) return tl::unexpected(filled.error());
    Results results;
    Result<> done = measure(results.copy, [&]() -> Result<> {
      if (auto copied = stream_->copy(out_.bytes.data(), a_.bytes.data(), s_.bytes); !copied) return copied;
      return stream_->synchronize();
    });
    for (std::size_t c = 0; c < s_.chunks.size(); ++c) {
      auto& row = results.additions.emplace_back(s_.blocks.size());
      for (std::size_t b = 0; b < s_.blocks.size() && done; ++b) {
        auto reducer = device::Reducer::make(*device_, {.blocks = s_.blocks[b], .threads = s_.threads});
        if (!reducer) return tl::unexpected(reducer.error());
        done = measure(row[b], [&] { return add(**reducer, s_.chunks[c]); });
      }
    }
    if (done) {
      auto digester = device::Digester::make(*device_);
      if (!digester) return tl::unexpected(digester.error());
      done = measure(results.digest, [&]() -> Result<> {
        const std::span<const std::byte> whole[] = {a_.bytes};
        const auto digests = (*digester)->digests(whole);
        return digests ? Result<>() : tl::unexpected(digests.error());
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
    for (auto* memory : {&a_, &b_, &out_}) {
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
  Result<> add(device::Reducer& reducer, std::uint64_t chunk) {
    const auto type = *data_type_named(s_.type);
    for (std::uint64_t at = 0; at < s_.bytes; at += chunk) {
      const std::uint64_t size = std::min(chunk, s_.bytes - at);
      auto given = reducer.add(type, out_.bytes.data() + at, a_.bytes.data() + at, b_.bytes.data() + at,
                               size / size_of(type), 0);
      if (!given) return tl::unexpected(given.error());
    }
    while (!reducer.idle())
      if (auto done = reducer.done(); !done) return tl::unexpected(done.error());
    return {};
  }

  const Settings& s_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> stream_;
  device::Memory a_, b_, out_;
  SteadyClock clock_;
};

std::string table(const Settings& s, const std::string& device, const Results& results) {
  const double limit = results.copy * kCopyMoves;
  std::string out = fmt::format("# {}, {} of {}; ratios are of bytes read and written to the copy's\n", device,
                                human_bytes(s.bytes), s.type);
  out += fmt::format("copy, by the driver: {:.1f} GB/s, {:.1f} GB/s of memory\n", results.copy, limit);
  out += fmt::format("digest: {:.1f} GB/s ({:.2f})\n", results.digest, results.digest * kDigestMoves / limit);
  out += fmt::format("additions in GB/s of result (ratio), by size of a work and blocks of {}:\n{:>10}", s.threads, "");
  for (const unsigned blocks : s.blocks) out += fmt::format(" {:>14}", blocks);
  for (std::size_t c = 0; c < s.chunks.size(); ++c) {
    out += fmt::format("\n{:>10}", human_bytes(s.chunks[c]));
    for (const double rate : results.additions[c])
      out += fmt::format(" {:>14}", fmt::format("{:.1f} ({:.2f})", rate, rate * kAddMoves / limit));
  }
  return out + "\n";
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
  for (std::size_t c = 0; c < s.chunks.size(); ++c)
    for (std::size_t b = 0; b < s.blocks.size(); ++b)
      row("add", results.additions[c][b], kAddMoves).update({{"blocks", s.blocks[b]}, {"chunk", s.chunks[c]}});
  return out;
}

std::string drawn(const Settings& s, const std::string& device, const Results& results) {
  std::vector<Line> lines;
  for (std::size_t c = 0; c < s.chunks.size(); ++c) {
    auto& line = lines.emplace_back(Line{.name = "works of " + human_bytes(s.chunks[c])});
    for (const double rate : results.additions[c])
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
  line.add("-s,--size", s.bytes, "bytes of each of three buffers")
      .sized()
      .range(std::uint64_t{64}, 256 * MiB)
      .show_default();
  line.add("--chunk", s.chunks, "what is added at a time, each size in turn")
      .separated_by(',')
      .sized()
      .range(std::uint64_t{64}, 256 * MiB);
  line.add("-d,--datatype", s.type, "of the elements").one_of(types).show_default();
  line.add("-n,--iters", s.iterations, "timed iterations; the median counts").range(1, 100000).show_default();
  line.add("--blocks", s.blocks, "blocks that add, each number in turn")
      .separated_by(',')
      .range(1, 1 << 30)
      .show_default();
  line.add("--threads", s.threads, "threads of each").show_default();
  line.add("--svg", s.svg, "draws the additions into this file");
  line.flag("--json", s.json, "as JSON");
  if (const auto status = line.parse(argc, argv)) return *status;
  const auto odd = [](std::uint64_t size) { return size % 8 != 0; };
  if (odd(s.bytes) || std::any_of(s.chunks.begin(), s.chunks.end(), odd)) {
    std::cerr << "rejoin_kernel_bw: --size and --chunk must be multiples of 8\n";
    return 2;
  }
  init_logging("kernel_bw", "warn");
  return bench::run(s);
}
