// rejoin_kernel_bw: what a GPU's kernels move, beside the card's own measured copy bandwidth: the all-reduce's
// additions and the digests of catch-up.
#include <CLI/CLI.hpp>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "device/digester.h"
#include "device/reducer.h"

namespace rejoin::bench {
namespace {

struct Settings {
  int cuda = 0;
  std::uint64_t bytes = 256 * MiB, chunk = 1 * MiB;
  int iterations = 20;
  std::vector<unsigned> blocks{2, 4, 8, 16, 64, 264};
  unsigned threads = 512;
  bool json = false;
};

struct Row {
  std::string what;
  double gigabytes_per_second = 0;  // of results; a copy and an addition read and write more than that
  double moved = 0;                 // bytes read and written, for each byte of result
};

class Bench {
 public:
  Bench(const Settings& settings, std::shared_ptr<device::Device> device) : s_(settings), device_(std::move(device)) {}

  Result<std::vector<Row>> run() {
    for (auto* memory : {&a_, &b_, &out_}) {
      auto made = device_->allocate(s_.bytes);
      if (!made) return tl::unexpected(made.error());
      *memory = std::move(*made);
    }
    auto stream = device_->make_stream();
    if (!stream) return tl::unexpected(stream.error());
    for (auto* memory : {&a_, &b_, &out_})  // bits of no number would be as fast, and denormals too, but zeros are sure
      if (auto cleared = (*stream)->clear(memory->bytes.data(), s_.bytes); !cleared)
        return tl::unexpected(cleared.error());
    if (auto cleared = (*stream)->synchronize(); !cleared) return tl::unexpected(cleared.error());
    std::vector<Row> rows;
    const auto measure = [&](std::string what, double moved, auto work) -> Result<> {
      if (Result<> warm = work(); !warm) return warm;
      const TimePoint start = clock_.now();
      for (int i = 0; i < s_.iterations; ++i)
        if (Result<> done = work(); !done) return done;
      const double took = seconds(clock_.now() - start) / s_.iterations;
      rows.push_back({std::move(what), static_cast<double>(s_.bytes) / took * 1e-9, moved});
      return {};
    };
    auto done = measure("copy, by the driver", 2, [&]() -> Result<> {
      if (auto copied = (*stream)->copy(out_.bytes.data(), a_.bytes.data(), s_.bytes); !copied) return copied;
      return (*stream)->synchronize();
    });
    for (const auto type : {DataType::float32, DataType::bfloat16})
      for (const auto blocks : s_.blocks) {
        if (!done) break;
        auto reducer = device::Reducer::make(*device_, {.blocks = blocks, .threads = s_.threads});
        if (!reducer) return tl::unexpected(reducer.error());
        done = measure(fmt::format("add {}, {} blocks of {}", to_string(type), blocks, s_.threads), 3,
                       [&] { return add(**reducer, type); });
      }
    if (done) {
      auto digester = device::Digester::make(*device_);
      if (!digester) return tl::unexpected(digester.error());
      done = measure("digest", 1, [&]() -> Result<> {
        const std::span<const std::byte> whole[] = {a_.bytes};
        const auto digests = (*digester)->digests(whole);
        return digests ? Result<>() : tl::unexpected(digests.error());
      });
    }
    if (!done) return tl::unexpected(done.error());
    return rows;
  }

 private:
  // As the ring does it: chunk by chunk, each given when there is room, in a kernel that is already running.
  Result<> add(device::Reducer& reducer, DataType type) {
    for (std::uint64_t at = 0; at < s_.bytes; at += s_.chunk) {
      const std::uint64_t size = std::min(s_.chunk, s_.bytes - at);
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
  device::Memory a_, b_, out_;
  SteadyClock clock_;
};

int run(const Settings& settings) {
  auto device = device::open_cuda({.ordinal = settings.cuda});
  auto rows = device ? Bench(settings, *device).run() : tl::unexpected(device.error());
  if (!rows) {
    std::cerr << "rejoin_kernel_bw: " << rows.error().message << "\n";
    return 1;
  }
  const double limit = rows->front().gigabytes_per_second * rows->front().moved;  // of memory, both ways
  nlohmann::json json{{"device", (*device)->name()}, {"bytes", settings.bytes}, {"chunk", settings.chunk}};
  std::string table = fmt::format("# {}, {} in chunks of {}; the ratio is of bytes read and written to the copy's\n",
                                  (*device)->name(), human_bytes(settings.bytes), human_bytes(settings.chunk));
  table += fmt::format("#{:>38} {:>14} {:>14} {:>7}\n", "", "result (GB/s)", "memory (GB/s)", "ratio");
  for (const auto& row : *rows) {
    const double memory = row.gigabytes_per_second * row.moved;
    table += fmt::format(" {:>38} {:>14.1f} {:>14.1f} {:>7.2f}\n", row.what, row.gigabytes_per_second, memory,
                         memory / limit);
    json["rows"].push_back({{"what", row.what},
                            {"gigabytes_per_second", row.gigabytes_per_second},
                            {"memory_gigabytes_per_second", memory},
                            {"ratio", memory / limit}});
  }
  std::cout << (settings.json ? json.dump(2) + "\n" : table);
  return 0;
}

}  // namespace
}  // namespace rejoin::bench

int main(int argc, char** argv) {
  using namespace rejoin;
  bench::Settings s;
  CLI::App app{"What a GPU's kernels move, beside its copy bandwidth."};
  const auto sized = CLI::AsSizeValue(false);
  app.add_option("--use_cuda", s.cuda, "which CUDA device")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("-s,--size", s.bytes, "bytes of each of three buffers")
      ->transform(sized)
      ->check(CLI::Range(std::uint64_t{64}, 256 * MiB))
      ->capture_default_str();
  app.add_option("--chunk", s.chunk, "what is added at a time")
      ->transform(sized)
      ->check(CLI::Range(std::uint64_t{64}, 256 * MiB))
      ->capture_default_str();
  app.add_option("-n,--iters", s.iterations, "timed iterations")->check(CLI::Range(1, 100000))->capture_default_str();
  app.add_option("--blocks", s.blocks, "blocks that add, each number in turn")->delimiter(',')->capture_default_str();
  app.add_option("--threads", s.threads, "threads of each")->capture_default_str();
  app.add_flag("--json", s.json, "as JSON");
  CLI11_PARSE(app, argc, argv);
  if (s.bytes % 8 != 0 || s.chunk % 8 != 0) {
    std::cerr << "rejoin_kernel_bw: --size " << s.bytes << " and --chunk " << s.chunk << " must be multiples of 8\n";
    return 2;
  }
  init_logging("kernel_bw", "warn");
  return bench::run(s);
}
