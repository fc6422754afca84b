// rejoin_allreduce_perf: all-reduce time and bandwidth over message sizes, in the manner of nccl-tests'
// all_reduce_perf. One command starts all ranks as processes of this machine.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/arithmetic.h"
#include "base/command_line.h"
#include "base/fail.h"
#include "base/log.h"
#include "bench/limits.h"
#include "device/access.h"
#include "ftar/communicator.h"
#include "ftar/reduce.h"
#include "transport/factory.h"
#include "transport/idle.h"

namespace rejoin::bench {
namespace {

struct Settings {
  std::uint64_t least = 8, most = 64 * MiB;
  double factor = 2;
  int iterations = 20, warmups = 5;
  std::string type = "float32", op = "sum", transport = "shm", json;
  std::uint32_t ranks = 2;
  bool check = true;
  bool limits = true;
  std::optional<int> cuda;  // on this device
  ftar::Options ftar;
  std::optional<std::uint64_t> direct;
};

struct Row {
  std::uint64_t bytes;
  double seconds;
  std::uint64_t wrong;
  double limit_seconds;  // 0: none measured
};

std::vector<std::uint64_t> sizes_of(const Settings& s, std::size_t element) {
  std::vector<std::uint64_t> sizes;
  for (double size = static_cast<double>(s.least); size <= static_cast<double>(s.most) + 0.5; size *= s.factor) {
    const auto rounded = std::max<std::uint64_t>(element, static_cast<std::uint64_t>(size) / element * element);
    if (sizes.empty() || sizes.back() != rounded) sizes.push_back(rounded);
    if (s.factor <= 1) break;
  }
  return sizes;
}

// Small whole numbers, exact in every type: element i of rank r.
std::uint32_t value_at(std::uint32_t rank, std::size_t i) {
  return (static_cast<std::uint32_t>(i) * 7 + rank * 3) % 16;
}

// A sum, or the mean that comes of it.
void put(DataType type, std::byte* at, std::uint32_t sum, std::uint32_t divisor = 1) {
  arithmetic::dispatch(type, [&](auto element) {
    using Value = typename decltype(element)::Value;
    const auto value = static_cast<Value>(sum);
    const auto stored = element.store(divisor > 1 ? arithmetic::Divisor<Value>(divisor)(value) : value);
    std::memcpy(at, &stored, sizeof stored);
  });
}

class RankProcess {
 public:
  RankProcess(const Settings& settings, Meeting& meeting, std::uint32_t rank, std::span<std::byte> shared,
              std::vector<std::pair<Fd, Fd>>& pairs)
      : s_(settings),
        meeting_(meeting),
        rank_(rank),
        shared_(shared),
        pairs_(pairs),
        type_(*data_type_named(settings.type)) {}

  Result<std::vector<Row>> run() {
    auto device = s_.cuda ? device::open_cuda({.ordinal = *s_.cuda}) : device::make_host();
    if (!device) return tl::unexpected(device.error());
    device_ = std::move(*device);
    auto access = device_->make_access();
    if (!access) return tl::unexpected(access.error());
    access_ = std::move(*access);
    auto engine = transport::make_engine(s_.transport, device_);
    if (!engine) return tl::unexpected(engine.error());
    engine_ = std::move(*engine);
    auto address = engine_->listen({"127.0.0.1:0"});
    if (!address) return tl::unexpected(address.error());
    if (auto made = make_buffers(); !made) return tl::unexpected(made.error());
    std::snprintf(meeting_.addresses[rank_], sizeof meeting_.addresses[rank_], "%s", address->text.c_str());
    if (!meet(meeting_, s_.ranks)) return fail(ErrorCode::cancelled, "another rank failed");
    std::vector<ftar::RingMember> ring;
    for (std::uint32_t i = 0; i < s_.ranks; ++i) {
      const ftar::Member member{ReplicaId(i), Incarnation(i + 1)};
      ring.push_back({member, ftar::Role::contributor});
      if (i < rank_)
        if (auto connecting = communicator_->connect(member, {meeting_.addresses[i]}); !connecting)
          return tl::unexpected(connecting.error());
    }
    communicator_->enter(Epoch(1), ring);
    idle_.emplace(*engine_, transport::Idle::Options{.spins = s_.ranks <= cores() ? 2000 : 20, .yields = 2000});

    std::vector<Row> rows;
    const auto sizes = sizes_of(s_, size_of(type_));
    for (std::uint32_t bucket = 0; bucket < sizes.size(); ++bucket) {
      auto row = measure(bucket, sizes[bucket]);
      if (!row) return tl::unexpected(row.error());
      rows.push_back(*row);
    }
    return rows;
  }

 private:
  static std::uint32_t cores() { return static_cast<std::uint32_t>(::sysconf(_SC_NPROCESSORS_ONLN)); }

  Result<> make_buffers() {
    auto input = device_->allocate(round_up(s_.most + 64, 2 * MiB)),
         output = device_->allocate(round_up(s_.most + 64, 2 * MiB));
    if (!input) return tl::unexpected(input.error());
    if (!output) return tl::unexpected(output.error());
    input_ = std::move(*input);
    output_ = std::move(*output);
    const std::size_t element = size_of(type_);
    Bytes values(s_.most);
    for (std::size_t i = 0; i < s_.most / element; ++i) put(type_, values.data() + i * element, value_at(rank_, i));
    if (auto done = access_->write(input_.bytes.data(), values); !done) return done;
    if (auto done = access_->write(output_.bytes.data(), Bytes(s_.most, std::byte{0xee})); !done) return done;
    std::vector<ftar::BucketSpec> buckets;
    for (auto size : sizes_of(s_, element))
      buckets.push_back({type_, size / element, input_.bytes.first(size), output_.bytes.first(size)});
    ftar::Options options = s_.ftar;
    if (s_.direct) options.direct_bytes = options.device_direct_bytes = *s_.direct;
    if (s_.cuda) options.device = device_;
    auto made = ftar::Communicator::make(*engine_, options, {ReplicaId(rank_), Incarnation(rank_ + 1)}, buckets,
                                         {.job = 7, .rank = 0});
    if (!made) return tl::unexpected(made.error());
    communicator_ = std::move(*made);
    return {};
  }

  Result<> reduce(std::uint32_t bucket) {
    const Step step(++step_);
    const auto op = s_.op == "mean" ? ReduceOp::mean : ReduceOp::sum;
    if (auto started = communicator_->all_reduce(bucket, step, op); !started) return started;
    for (bool done = false; !done;) {
      bool idle = true;
      for (const auto& outcome : communicator_->poll(clock_.now())) {
        idle = false;
        done |= outcome.kind == ftar::Outcome::Kind::done && outcome.step == step;
        if (outcome.kind == ftar::Outcome::Kind::peer_lost)
          return fail(ErrorCode::unavailable, "rank {}: {}", outcome.member.replica.value, outcome.error->message);
        if (outcome.kind == ftar::Outcome::Kind::failed) return tl::unexpected(*outcome.error);
      }
      if (communicator_->working()) continue;
      if (idle && !done) idle_->wait(true, std::chrono::milliseconds(100));
      if (!idle) idle_->reset();
    }
    return {};
  }

  Result<Row> measure(std::uint32_t bucket, std::uint64_t bytes) {
    for (int i = 0; i < s_.warmups; ++i)
      if (auto reduced = reduce(bucket); !reduced) return tl::unexpected(reduced.error());
    drain();  // the others may still need our progress
    if (meeting_.failed.load() != 0) return fail(ErrorCode::cancelled, "another rank failed");
    // The median of the single operations would hide stalls; nccl-tests takes the mean, and so do we.
    const int iterations = bytes <= 64 * KiB ? s_.iterations * 20 : s_.iterations;
    const auto start = clock_.now();
    for (int i = 0; i < iterations; ++i)
      if (auto reduced = reduce(bucket); !reduced) return tl::unexpected(reduced.error());
    meeting_.seconds[rank_].store(seconds(clock_.now() - start) / iterations);
    drain();
    double slowest = 0;
    for (std::uint32_t i = 0; i < s_.ranks; ++i) slowest = std::max(slowest, meeting_.seconds[i].load());
    if (s_.check) {
      const auto found = count_wrong(bytes);
      if (!found) return tl::unexpected(found.error());
      meeting_.wrong.fetch_add(static_cast<std::uint32_t>(*found));
    }
    if (!meet(meeting_, s_.ranks)) return fail(ErrorCode::cancelled, "another rank failed");
    const auto wrong = meeting_.wrong.load();
    meet(meeting_, s_.ranks);
    if (rank_ == 0) meeting_.wrong.store(0);
    meet(meeting_, s_.ranks);
    return Row{bytes, slowest, wrong, s_.limits ? limit(bytes) : 0};
  }

  void drain() {
    const std::uint32_t round = meeting_.round.load();
    bool last = meeting_.arrived.fetch_add(1) + 1 == s_.ranks;
    if (last) {
      meeting_.arrived.store(0);
      meeting_.round.fetch_add(1);
    }
    while (meeting_.round.load() == round && meeting_.failed.load() == 0) communicator_->poll(clock_.now());
  }

  Result<std::uint64_t> count_wrong(std::uint64_t bytes) const {
    const std::size_t element = size_of(type_);
    std::uint64_t wrong = 0;
    Bytes result(bytes);
    if (auto done = access_->read(output_.bytes.first(bytes), result.data()); !done)
      return tl::unexpected(done.error());
    for (std::size_t i = 0; i < bytes / element; ++i) {
      std::uint32_t sum = 0;
      for (std::uint32_t r = 0; r < s_.ranks; ++r) sum += value_at(r, i);
      std::byte expected[8];
      put(type_, expected, sum, s_.op == "mean" ? s_.ranks : 1);  // the sums are exact in every type
      wrong += std::memcmp(result.data() + i * element, expected, element) != 0 ? 1 : 0;
    }
    return wrong;
  }

  double limit(std::uint64_t bytes) {
    if (bytes < 64 * KiB) return 0;
    double best = 1e9;
    for (int i = 0; i < std::max(5, s_.iterations / 2); ++i) {
      if (s_.transport == "tcp") {
        const std::size_t volume = bytes * 2 * (s_.ranks - 1) / s_.ranks;
        best = std::min(best, socket_ring(meeting_, s_.ranks, pairs_[rank_].first.get(),
                                          pairs_[(rank_ + s_.ranks - 1) % s_.ranks].second.get(),
                                          input_.bytes.first(bytes), output_.bytes.first(bytes), volume));
      } else {
        const std::span<const float> in(reinterpret_cast<const float*>(input_.bytes.data()), bytes / 4);
        const std::span<float> out(reinterpret_cast<float*>(output_.bytes.data()), bytes / 4);
        best = std::min(best, shared_memory_all_reduce(meeting_, rank_, s_.ranks, shared_, in, out));
      }
    }
    return best;
  }

  const Settings& s_;
  Meeting& meeting_;
  const std::uint32_t rank_;
  std::span<std::byte> shared_;
  std::vector<std::pair<Fd, Fd>>& pairs_;
  const DataType type_;
  SteadyClock clock_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<device::Access> access_;
  std::unique_ptr<transport::Engine> engine_;
  device::Memory input_, output_;
  std::unique_ptr<ftar::Communicator> communicator_;
  std::optional<transport::Idle> idle_;
  std::uint64_t step_ = 0;
};

void print(const Settings& s, const std::vector<Row>& rows) {
  std::printf(
      "# rejoin_allreduce_perf: %u ranks as processes of this machine, transport %s, %s %s, %d iterations, %d "
      "warm-ups\n",
      s.ranks, s.transport.c_str(), s.type.c_str(), s.op.c_str(), s.iterations, s.warmups);
  std::printf("# chunks of at most %s, %u in flight; vector instructions: %s\n",
              human_bytes(s.ftar.chunk_bytes).c_str(), s.ftar.chunks_in_flight,
              std::string(ftar::instruction_set()).c_str());
  if (s.cuda)
    std::printf("# in the memory of CUDA device %d, added by %u blocks of %u threads\n", *s.cuda, s.ftar.reducer.blocks,
                s.ftar.reducer.threads);
  else
    std::printf("# limit: %s\n",
                s.transport == "tcp"
                    ? "the same volume around a ring of plain loopback sockets, nothing added (best of several)"
                    : "the same sum through one shared mapping, private buffers staged (best of several)");
  std::printf("#%12s %12s %9s %6s %11s %8s %8s %7s %11s %7s\n", "size", "count", "type", "redop", "time", "algbw",
              "busbw", "#wrong", "limit", "ratio");
  std::printf("#%12s %12s %9s %6s %11s %8s %8s %7s %11s %7s\n", "(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)",
              "", "(us)", "");
  for (const auto& row : rows) {
    const double algbw = static_cast<double>(row.bytes) / row.seconds * 1e-9;
    std::printf(" %12lu %12lu %9s %6s %11.2f %8.3f %8.3f %7s", row.bytes, row.bytes / size_of(*data_type_named(s.type)),
                s.type.c_str(), s.op.c_str(), row.seconds * 1e6, algbw, algbw * 2 * (s.ranks - 1) / s.ranks,
                s.check ? std::to_string(row.wrong).c_str() : "n/a");
    if (row.limit_seconds > 0) std::printf(" %11.2f %7.2f\n", row.limit_seconds * 1e6, row.seconds / row.limit_seconds);
    else std::printf(" %11s %7s\n", "-", "-");
  }
}

Result<> write_json(const Settings& s, const std::vector<Row>& rows) {
  nlohmann::json json{{"ranks", s.ranks}, {"transport", s.transport}, {"type", s.type}, {"op", s.op}};
  for (const auto& row : rows)
    json["rows"].push_back({{"bytes", row.bytes},
                            {"seconds", row.seconds},
                            {"wrong", row.wrong},
                            {"limit_seconds", row.limit_seconds},
                            {"ratio", row.limit_seconds > 0 ? row.seconds / row.limit_seconds : 0}});
  std::ofstream out(s.json);
  out << json.dump(2) << "\n";
  if (!out.flush()) return fail(ErrorCode::io, "can't write {}", s.json);
  return {};
}

int run(const Settings& settings) {
  auto meeting_memory = Mapping::of(*make_sealed_memfd("meeting", sizeof(Meeting)), sizeof(Meeting));
  auto& meeting = *new (meeting_memory->data()) Meeting{};
  const std::size_t shared_size = settings.limits ? settings.most * (settings.ranks + 1) : 4096;
  auto shared_fd = make_sealed_memfd("limit", shared_size);
  auto shared = shared_fd ? Mapping::of(*shared_fd, shared_size) : Result<Mapping>(tl::unexpected(shared_fd.error()));
  auto pairs = tcp_pairs(settings.ranks);
  if (!shared || !pairs) {
    std::fprintf(stderr, "rejoin_allreduce_perf: %s\n", (!shared ? shared.error() : pairs.error()).message.c_str());
    return 1;
  }
  std::vector<pid_t> children;
  for (std::uint32_t rank = 1; rank < settings.ranks; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      auto rows = RankProcess(settings, meeting, rank, shared->span(), *pairs).run();
      if (!rows) {
        meeting.failed.store(1);
        std::fprintf(stderr, "rejoin_allreduce_perf: rank %u: %s\n", rank, rows.error().message.c_str());
      }
      ::_exit(rows ? 0 : 1);
    }
    children.push_back(pid);
  }
  auto rows = RankProcess(settings, meeting, 0, shared->span(), *pairs).run();
  if (!rows) {
    meeting.failed.store(1);
    std::fprintf(stderr, "rejoin_allreduce_perf: rank 0: %s\n", rows.error().message.c_str());
  }
  bool good = rows.has_value();
  for (auto pid : children) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    good = good && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  if (!good) return 1;
  print(settings, *rows);
  for (const auto& row : *rows) good = good && row.wrong == 0;
  if (!settings.json.empty())
    if (auto written = write_json(settings, *rows); !written) {
      std::fprintf(stderr, "rejoin_allreduce_perf: %s\n", written.error().message.c_str());
      return 1;
    }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace rejoin::bench

int main(int argc, char** argv) {
  using namespace rejoin;
  bench::Settings s;
  CommandLine line("All-reduce time and bandwidth; columns and options as in nccl-tests' all_reduce_perf.");
  line.add("-b,--minbytes", s.least, "smallest size, e.g. 8, 4K, 1M").sized().show_default();
  line.add("-e,--maxbytes", s.most, "largest size").sized().show_default();
  line.add("-f,--stepfactor", s.factor, "factor between sizes").real_range(1.01, 1e6).show_default();
  line.add("-n,--iters", s.iterations, "timed iterations (20 times as many up to 64 KiB)")
      .range(1, 1000000)
      .show_default();
  line.add("-w,--warmup_iters", s.warmups, "warm-up iterations").range(0, 1000000).show_default();
  line.add("-d,--datatype", s.type, "element type")
      .one_of({"float32", "float64", "bfloat16", "float16", "int32", "int64"})
      .show_default();
  line.add("-o,--op", s.op, "operation").one_of({"sum", "mean"}).show_default();
  line.add("-c,--check", s.check, "check every element").show_default();
  line.add("--ranks", s.ranks, "processes to start").range(1, 64).show_default();
  line.add("--transport", s.transport, "shm, tcp, tcp+aes or ucx:LIST").show_default();
  line.add("--chunk-bytes", s.ftar.chunk_bytes, "largest chunk").sized().show_default();
  line.add("--chunks-in-flight", s.ftar.chunks_in_flight, "chunks in flight per neighbour").show_default();
  line.add("--direct", s.direct, "largest size that skips the ring; else 32K, or 256K with --use_cuda").sized();
  line.add("--both-ways", s.ftar.both_ways, "all-gather in both directions").show_default();
  line.add("--limits", s.limits, "measure this machine's limit beside").show_default();
  line.add("--use_cuda", s.cuda, "buffers in this CUDA device's memory, which all ranks share");
  line.add("--reduce-blocks", s.ftar.reducer.blocks, "… added by so many blocks").show_default();
  line.add("--reduce-threads", s.ftar.reducer.threads, "… of so many threads").show_default();
  line.add("--json", s.json, "write the results to this file");
  if (const auto status = line.parse(argc, argv)) return *status;
  if (s.least > s.most || s.least == 0) {
    std::fprintf(stderr, "rejoin_allreduce_perf: --minbytes %lu is not between 1 and --maxbytes %lu\n", s.least,
                 s.most);
    return 2;
  }
  if (s.cuda) s.limits = false;  // they are the host's
  init_logging("allreduce_perf", "warn");
  return bench::run(s);
}
