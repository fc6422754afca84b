#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "base/arithmetic.h"
#include "base/fail.h"
#include "base/fd.h"
#include "bench/allreduce.h"
#include "bench/host.h"
#include "bench/socket_ring.h"
#include "bench/usage.h"
#include "device/access.h"
#include "transport/factory.h"
#include "transport/idle.h"

namespace rejoin::bench {

std::vector<std::uint64_t> sizes_of(const AllReduceSettings& s, std::size_t element) {
  std::vector<std::uint64_t> sizes;
  for (double size = static_cast<double>(s.least); size <= static_cast<double>(s.most) + 0.5; size *= s.factor) {
    const auto rounded = std::max<std::uint64_t>(element, static_cast<std::uint64_t>(size) / element * element);
    if (sizes.empty() || sizes.back() != rounded) sizes.push_back(rounded);
    if (s.factor <= 1) break;
  }
  return sizes;
}

bool limited_by_sockets(const AllReduceSettings& settings) { return settings.transport.starts_with("tcp"); }

namespace {

constexpr std::uint64_t kLeastLimited = 64 * KiB;  // below, it is messages that count, and not bytes
constexpr int kMostTurns = 5;
constexpr std::size_t kPiece = 1 * MiB;  // that is filled or checked at a time
constexpr std::uint32_t kPeriod = 16;    // elements, after which values come again
static_assert(kPiece % (kPeriod * sizeof(double)) == 0, "each piece has the values of the first");

// Small whole numbers, exact in every type: element i of rank r.
std::uint32_t value_at(std::uint32_t rank, std::size_t i) {
  return (static_cast<std::uint32_t>(i) * 7 + rank * 3) % kPeriod;
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
  RankProcess(const AllReduceSettings& settings, Meeting& meeting, std::uint32_t rank,
              const std::vector<std::pair<Fd, Fd>>& pairs)
      : s_(settings),
        meeting_(meeting),
        rank_(rank),
        sockets_(meeting, rank, settings.ranks, pairs),
        type_(*data_type_named(settings.type)) {}

  Result<AllReduceResults> run() {
    std::string host_address;
    if (!s_.hosts.empty()) {
      auto moved = enter_host(s_.hosts[rank_]);
      if (!moved) return tl::unexpected(moved.error());
      host_address = *moved;
    }
    auto device = s_.cuda ? device::open_cuda({.ordinal = *s_.cuda}) : device::make_host();
    if (!device) return tl::unexpected(device.error());
    device_ = std::move(*device);
    auto access = device_->make_access();
    if (!access) return tl::unexpected(access.error());
    access_ = std::move(*access);
    auto engine = transport::make_engine(s_.transport, device_);
    if (!engine) return tl::unexpected(engine.error());
    engine_ = std::move(*engine);
    engine_->set_polled_on();
    auto address = engine_->listen({s_.hosts.empty() ? "127.0.0.1:0" : host_address + ":0"});
    if (!address) return tl::unexpected(address.error());
    if (auto made = make_buffers(); !made) return tl::unexpected(made.error());
    std::snprintf(meeting_.addresses[rank_], sizeof meeting_.addresses[rank_], "%s", address->text.c_str());
    if (!meet(meeting_, s_.ranks)) return another_failed();
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

    AllReduceResults results{.rows = {}, .system_calls_not_counted = usage_.why_not()};
    const auto sizes = sizes_of(s_, size_of(type_));
    for (std::uint32_t bucket = 0; bucket < sizes.size(); ++bucket) {
      auto row = measure(bucket, sizes[bucket]);
      if (!row) return tl::unexpected(row.error());
      results.rows.push_back(std::move(*row));
    }
    return results;
  }

 private:
  Result<> make_buffers() {
    const std::size_t element = size_of(type_), most = std::max<std::size_t>(s_.most, element);
    auto input = device_->allocate(round_up(most + 64, 2 * MiB)),
         output = device_->allocate(round_up(most + 64, 2 * MiB));
    if (!input) return tl::unexpected(input.error());
    if (!output) return tl::unexpected(output.error());
    input_ = std::move(*input);
    output_ = std::move(*output);
    Bytes values(std::min(most, kPiece));
    for (std::size_t i = 0; i < values.size() / element; ++i)
      put(type_, values.data() + i * element, value_at(rank_, i));
    if (auto done = fill(input_.bytes.first(most), values); !done) return done;
    if (auto done = fill(output_.bytes.first(most), Bytes(values.size(), std::byte{0xee})); !done) return done;
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

  Result<> fill(std::span<std::byte> memory, BytesView block) {
    for (std::size_t at = 0; at < memory.size(); at += block.size()) {
      const auto some = block.first(std::min(block.size(), memory.size() - at));
      if (auto done = access_->write(memory.data() + at, some); !done) return done;
    }
    return {};
  }

  Result<> reduce(std::uint32_t bucket) {
    const Step step(++step_);
    const auto op = s_.op == "mean" ? ReduceOp::mean : ReduceOp::sum;
    communicator_->notice(clock_.now());
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
      if (idle && !done && meeting_.failed.load() != 0) return another_failed();
      if (idle && !done) idle_->wait(true, std::chrono::milliseconds(100));
      if (!idle) idle_->reset();
    }
    return {};
  }

  // The mean over a turn's operations: the median of single ones would hide stalls.
  Result<Row> measure(std::uint32_t bucket, std::uint64_t bytes) {
    const int iterations = bytes <= 64 * KiB ? s_.iterations * 20 : s_.iterations;
    Row row{.bytes = bytes};
    row.turns = std::min(kMostTurns, iterations);
    row.operations = (iterations + row.turns - 1) / row.turns;
    Limit limit(*this, bytes);
    std::vector<double> turns;
    ftar::Stats sent{};
    Used used;
    for (int turn = 0; turn < row.turns; ++turn) {
      if (auto measured = limit.turn(row.operations); !measured) return tl::unexpected(measured.error());
      for (int i = 0; i < (turn == 0 ? s_.warmups : 1); ++i)
        if (auto reduced = reduce(bucket); !reduced) return tl::unexpected(reduced.error());
      drain();  // the others may still need our progress
      if (!meet(meeting_, s_.ranks)) return another_failed();
      const ftar::Stats before = communicator_->stats();
      const Usage usage;
      const auto start = clock_.now();
      for (int i = 0; i < row.operations; ++i)
        if (auto reduced = reduce(bucket); !reduced) return tl::unexpected(reduced.error());
      const double took = seconds(clock_.now() - start) / row.operations;
      used += usage.now();
      const ftar::Stats after = communicator_->stats();
      sent.chunk_bytes_sent += after.chunk_bytes_sent - before.chunk_bytes_sent;
      sent.coded_chunks_sent += after.coded_chunks_sent - before.coded_chunks_sent;
      drain();
      const auto all = gather(meeting_, rank_, s_.ranks, took);
      if (all.empty()) return another_failed();
      turns.push_back(*std::max_element(all.begin(), all.end()));
    }
    row.times = {.mean = std::accumulate(turns.begin(), turns.end(), 0.0) / row.turns,
                 .best = *std::min_element(turns.begin(), turns.end())};
    limit.tell(row);
    if (auto sent_usage = tell_usage(row, used, sent); !sent_usage) return tl::unexpected(sent_usage.error());
    if (s_.check) {
      const auto found = count_wrong(bytes);
      if (!found) return tl::unexpected(found.error());
      const auto all = gather(meeting_, rank_, s_.ranks, static_cast<double>(*found));
      if (all.empty()) return another_failed();
      row.wrong = static_cast<std::uint64_t>(std::accumulate(all.begin(), all.end(), 0.0));
    }
    return row;
  }

  Result<> tell_usage(Row& row, const Used& used, const ftar::Stats& sent) {
    const auto cpu = gather(meeting_, rank_, s_.ranks, used.cpu_seconds);
    const auto calls = gather(meeting_, rank_, s_.ranks, static_cast<double>(used.system_calls));
    const auto counted = gather(meeting_, rank_, s_.ranks, used.counted ? 1 : 0);
    const auto bytes = gather(meeting_, rank_, s_.ranks, static_cast<double>(sent.chunk_bytes_sent));
    const auto coded = gather(meeting_, rank_, s_.ranks, static_cast<double>(sent.coded_chunks_sent));
    if (cpu.empty() || calls.empty() || counted.empty() || bytes.empty() || coded.empty()) return another_failed();
    const auto sum = [](const std::vector<double>& all) { return std::accumulate(all.begin(), all.end(), 0.0); };
    const double operations = static_cast<double>(row.operations) * row.turns;
    row.cpu_seconds_per_gib = sum(cpu) / operations / static_cast<double>(row.bytes) * static_cast<double>(GiB);
    row.bytes_sent_per_operation = sum(bytes) / operations / s_.ranks;
    row.coded_per_operation = sum(coded) / operations / s_.ranks;
    if (sum(counted) == s_.ranks) row.system_calls_per_operation = sum(calls) / operations / s_.ranks;
    return {};
  }

  // What is measured beside the operations of one size, if anything is.
  class Limit {
   public:
    Limit(RankProcess& rank, std::uint64_t bytes) : rank_(rank) {
      const auto& s = rank.s_;
      if (!s.limits || bytes < kLeastLimited || s.ranks == 1) return;
      const auto in = rank.input_.bytes.first(bytes), out = rank.output_.bytes.first(bytes);
      if (limited_by_sockets(s))
        sockets_.emplace(rank.sockets_, s.ranks,
                         SocketRing::Operation{.type = rank.type_,
                                               .divisor = s.op == "mean" ? s.ranks : 0,
                                               .chunk_bytes = 0,
                                               .both_ways = true,
                                               .input = in,
                                               .output = out},
                         ftar::tuned_host_chunk(bytes, s.ranks, s.ftar.chunk_bytes));
      else memory_.emplace(s.ranks, in, out);
    }
    Result<> turn(int operations) {
      if (memory_ && !memory_->turn(rank_.meeting_, rank_.rank_)) return another_failed();
      // There are several variants of it: of each a part.
      return sockets_ ? sockets_->turn(rank_.meeting_, rank_.rank_, std::max(1, operations / 2)) : Result<>{};
    }
    // All ranks say the same: what they have is of the meeting.
    void tell(Row& row) const {
      if (memory_) {
        row.limit = {.mean = memory_->mean_seconds(), .best = memory_->best_seconds()};
        row.rates = memory_->rates();
      }
      if (sockets_) {
        row.limit = {.mean = sockets_->mean_seconds(), .best = sockets_->best_seconds()};
        row.ring_chunk_bytes = sockets_->chunk_bytes();
      }
    }

   private:
    RankProcess& rank_;
    std::optional<MemoryLimit> memory_;
    std::optional<SocketLimit> sockets_;
  };

  // All meet, and drive what others still need of this one. Who waits lets others run.
  void drain() {
    const std::uint32_t round = meeting_.round.load();
    if (meeting_.arrived.fetch_add(1) + 1 == s_.ranks) {
      meeting_.arrived.store(0);
      meeting_.round.fetch_add(1);
    }
    while (meeting_.round.load() == round && meeting_.failed.load() == 0)
      if (communicator_->poll(clock_.now()).empty()) ::sched_yield();
  }

  Result<std::uint64_t> count_wrong(std::uint64_t bytes) const {
    const std::size_t element = size_of(type_);
    std::uint64_t wrong = 0;
    Bytes result(std::min<std::size_t>(bytes, kPiece));
    const auto n = static_cast<double>(s_.ranks);
    // Each rank's coding may lose half a step of its block, whose values are below 16 times n and what was lost before.
    const double of_step = s_.coding == "8" ? 127.5 : 7.5;
    const double may_be = s_.coding == "off" ? 0 : n * 16 * (n + n / of_step) / of_step / (s_.op == "mean" ? n : 1);
    for (std::size_t at = 0; at < bytes; at += result.size()) {
      const auto some = output_.bytes.subspan(at, std::min<std::size_t>(result.size(), bytes - at));
      if (auto done = access_->read(some, result.data()); !done) return tl::unexpected(done.error());
      for (std::size_t i = 0; i < some.size() / element; ++i) {
        std::uint32_t sum = 0;
        for (std::uint32_t r = 0; r < s_.ranks; ++r) sum += value_at(r, i);
        std::byte expected[8];
        put(type_, expected, sum, s_.op == "mean" ? s_.ranks : 1);  // the sums are exact in every type
        const std::byte* got = result.data() + i * element;
        if (std::memcmp(got, expected, element) != 0 && !(may_be > 0 && apart(got, expected) <= may_be)) ++wrong;
      }
    }
    return wrong;
  }

  double apart(const std::byte* one, const std::byte* other) const {
    double difference = 0;
    arithmetic::dispatch(type_, [&](auto element) {
      typename decltype(element)::Storage a{}, b{};
      std::memcpy(&a, one, sizeof a);
      std::memcpy(&b, other, sizeof b);
      difference = std::abs(static_cast<double>(element.load(a)) - static_cast<double>(element.load(b)));
    });
    return difference;
  }

  const AllReduceSettings& s_;
  Meeting& meeting_;
  const std::uint32_t rank_;
  SocketRing sockets_;
  const DataType type_;
  SteadyClock clock_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<device::Access> access_;
  std::unique_ptr<transport::Engine> engine_;
  device::Memory input_, output_;
  std::unique_ptr<ftar::Communicator> communicator_;
  std::optional<transport::Idle> idle_;
  std::uint64_t step_ = 0;
  const Usage usage_;  // for what it can count
};

// Waits for all ranks but this one. The error is of one that has ended by a signal, and otherwise of one that has
// failed, and has said why.
Result<> wait_for(const std::vector<pid_t>& children) {
  Result<> result;
  for (std::uint32_t rank = 1; rank <= children.size(); ++rank) {
    const pid_t pid = children[rank - 1];
    int status = 0;
    ::waitpid(pid, &status, 0);
    if (status == 0 || (!result && result.error().code != ErrorCode::cancelled)) continue;
    result = another_failed();
    if (!WIFSIGNALED(status)) continue;
    const int signal = WTERMSIG(status);
    const char* name = ::sigabbrev_np(signal);
    result = fail(ErrorCode::unavailable, "rank {}, process {}, was ended by {}{}", rank, pid,
                  name != nullptr ? "SIG" + std::string(name) : fmt::format("signal {}", signal),
                  signal == SIGKILL ? ", as where memory lacks (dmesg tells): each rank needs twice --maxbytes" : "");
  }
  return result;
}

}  // namespace

Result<AllReduceResults> run_all_reduce(const AllReduceSettings& settings) {
  auto page = MeetingPage::make();
  if (!page) return tl::unexpected(page.error());
  auto pairs = tcp_pairs(limited_by_sockets(settings) && settings.limits ? settings.ranks : 0);
  if (!pairs) return tl::unexpected(pairs.error());
  pairs->resize(settings.ranks);
  Meeting& meeting = **page;
  std::vector<pid_t> children;
  for (std::uint32_t rank = 1; rank < settings.ranks; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      auto done = RankProcess(settings, meeting, rank, *pairs).run();
      if (!done) meeting.failed.store(1);
      if (!done && done.error().code != ErrorCode::cancelled)  // another has failed, and says why
        std::fprintf(stderr, "rank %u: %s\n", rank, done.error().message.c_str());
      ::_exit(done ? 0 : 1);
    }
    if (pid < 0) {
      auto error = fail_errno("fork");
      for (const pid_t child : children) ::kill(child, SIGKILL), ::waitpid(child, nullptr, 0);
      return error;
    }
    children.push_back(pid);
  }
  auto results = RankProcess(settings, meeting, 0, *pairs).run();
  if (!results) meeting.failed.store(1);
  const auto others = wait_for(children);
  if (!others && (results || others.error().code == ErrorCode::unavailable)) return tl::unexpected(others.error());
  return results;
}

}  // namespace rejoin::bench
