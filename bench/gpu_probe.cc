// rejoin_gpu_probe: what a GPU's driver does that "No driver between hand-over and word" (docs/design-notes.md) rests
// on: which calls don't return while a stream waits for a word, which streams stop with one that waits, and what it
// costs a trainer that fills the card when its daemon is served memory. Each probe is a process of its own with a time
// limit, so that one that hangs costs the others nothing.
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <iostream>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/clock.h"
#include "base/command_line.h"
#include "base/fail.h"
#include "base/log.h"
#include "base/unix_socket.h"
#include "device/kernels/mailbox.h"
#include "device/reducer.h"
#include "device/remote.h"

namespace rejoin::bench {
namespace {

using device::Device, device::Memory, device::Stream;

struct Settings {
  int cuda = 0;
  Duration wait = std::chrono::milliseconds(1000);  // of a stream for its word
  std::uint64_t bytes = 256 * MiB;                  // that a served state has
  unsigned blocks = 264;                            // of a trainer that fills the card
  bool json = false;
};

// Runs it in another process: what it returns, or why it has not.
Result<std::string> text_of_a_process(Duration limit, const std::function<std::string()>& what) {
  int ends[2];
  if (::pipe(ends) != 0) return fail_errno("a pipe");
  const Fd out(ends[1]);
  Fd in(ends[0]);
  const pid_t child = ::fork();
  if (child == 0) {
    std::string told;
    try {
      told = " " + what();
    } catch (const std::exception& failure) {
      told = fmt::format("! {}", failure.what());
    }
    (void)!::write(out.get(), told.data(), told.size());
    ::_exit(0);  // threads may stand in the driver
  }
  std::string told;
  const SteadyClock clock;
  const TimePoint deadline = clock.now() + limit;
  bool ended = false;
  while (!ended && clock.now() < deadline) {
    pollfd ready{in.get(), POLLIN, 0};
    if (::poll(&ready, 1, 10) == 1) {
      char some[4096];
      const auto got = ::read(in.get(), some, sizeof some);
      if (got > 0) told.append(some, static_cast<std::size_t>(got));
    }
    int status = 0;
    ended = ::waitpid(child, &status, WNOHANG) == child;
    if (ended && WIFSIGNALED(status)) return fail(ErrorCode::io, "it ended by signal {}", WTERMSIG(status));
  }
  if (!ended) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    return fail(ErrorCode::timeout, "it hung for {:.1f} s", seconds(limit));
  }
  for (pollfd ready{in.get(), POLLIN, 0}; ::poll(&ready, 1, 0) == 1 && (ready.revents & POLLIN) != 0;) {
    char some[4096];
    const auto got = ::read(in.get(), some, sizeof some);
    if (got <= 0) break;
    told.append(some, static_cast<std::size_t>(got));
  }
  if (told.starts_with("! ")) return fail(ErrorCode::io, "{}", told.substr(2));
  return told.empty() ? told : told.substr(1);
}

// What a probe has measured, or why it has not.
struct Told {
  std::vector<double> values;
  std::string failure;
};

// A probe throws what has failed.
Told in_a_process(Duration limit, const std::function<std::vector<double>()>& probe) {
  const auto text = text_of_a_process(limit, [&] { return fmt::format("{}", fmt::join(probe(), " ")); });
  if (!text) return {{}, text.error().message};
  Told result;
  std::istringstream values(*text);
  for (double value = 0; values >> value;) result.values.push_back(value);
  return result;
}

template <typename T>
T must(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().message);
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

void pause(Duration time) { (void)::poll(nullptr, 0, static_cast<int>(milliseconds(time))); }

std::shared_ptr<Device> open(const Settings& s) { return must(device::open_cuda({.ordinal = s.cuda})); }

void launch_nothing(Stream& stream, const Memory& keys) {
  device::kernels::DigestArguments arguments{};
  arguments.keys = reinterpret_cast<std::uint64_t>(keys.bytes.data());
  must(stream.launch(device::Kernel::digest, {1, 32}, &arguments));
}

// ---- which calls don't return

// What the trainer's thread does behind a stream that waits.
enum class Does { nothing, small_copy, large_copy, many_launches, events, frees, first_launch, synchronize };
const std::vector<std::pair<Does, const char*>> kDoes{{Does::nothing, "nothing"},
                                                      {Does::small_copy, "4 bytes to pageable memory"},
                                                      {Does::large_copy, "64 MiB to pageable memory"},
                                                      {Does::many_launches, "5,000 works on it"},
                                                      {Does::events, "200 × an event on it, a host function elsewhere"},
                                                      {Does::frees, "a free"},
                                                      {Does::first_launch, "a kernel's first launch"},
                                                      {Does::synchronize, "waits for it"}};
const std::vector<const char*> kCalls{"event", "copy", "launch", "allocate", "pin"};

// Milliseconds that this call took another thread meanwhile.
double stands(const Settings& s, Does does, std::size_t call) {
  const auto gpu = open(s);
  if (does != Does::first_launch) must(gpu->prepare_kernels());
  const auto waiting = must(gpu->make_stream()), side = must(gpu->make_stream()), other = must(gpu->make_stream());
  const auto word = must(gpu->allocate_pinned(4096)), pinned = must(gpu->allocate_pinned(64 * KiB));
  const auto memory = must(gpu->allocate(64 * MiB)), keys = must(gpu->allocate(64 * KiB));
  auto gone = must(gpu->allocate(1 * MiB));
  const Fd eventfd = must(make_eventfd());
  if (does != Does::first_launch) launch_nothing(*other, keys);
  must(other->synchronize());
  auto& value = *reinterpret_cast<std::uint64_t*>(word.bytes.data());
  value = 0;
  must(waiting->wait_until(&value, 1));
  Bytes pageable(64 * MiB);
  Memory kept;  // freeing would wait for the stream
  std::atomic<double> took = -1;
  std::thread observer([&] {
    (void)::pthread_setname_np(::pthread_self(), "rejoin-memory");  // the driver of software lets that one be
    pause(s.wait / 5);                                              // the other thread is in its call by then
    const SteadyClock clock;
    const TimePoint before = clock.now();
    switch (call) {
      case 0: (void)other->mark(); break;
      case 1: (void)other->copy(pinned.bytes.data(), memory.bytes.data(), 4096); break;
      case 2: launch_nothing(*other, keys); break;
      case 3: kept = must(gpu->allocate(1 * MiB)); break;
      default: kept = must(gpu->allocate_pinned(64 * KiB)); break;
    }
    took = milliseconds(clock.now() - before);
  });
  std::thread releaser([&] {
    pause(s.wait);
    std::atomic_ref(value).store(1, std::memory_order_release);
  });
  switch (does) {
    case Does::nothing: break;
    case Does::small_copy: must(waiting->copy(pageable.data(), memory.bytes.data(), 4)); break;
    case Does::large_copy: must(waiting->copy(pageable.data(), memory.bytes.data(), pageable.size())); break;
    case Does::many_launches:
      for (int i = 0; i < 5000; ++i) must(waiting->clear(memory.bytes.data(), 4));
      break;
    case Does::events:
      for (int i = 0; i < 200; ++i) {
        must(side->follow(*waiting));
        must(side->signal(eventfd));
      }
      break;
    case Does::frees: gone = {}; break;
    case Does::first_launch: launch_nothing(*waiting, keys); break;
    case Does::synchronize: must(waiting->synchronize()); break;
  }
  observer.join();
  releaser.join();
  return took;
}

// ---- which streams stop

struct Queues {
  int connections = 0, streams = 0, waiting = 0;
};
const std::vector<Queues> kQueues{{1, 10, 2}, {2, 10, 2}, {8, 10, 2}, {8, 20, 5}, {8, 40, 8}, {32, 40, 8}};

double stopped_streams(const Settings& s, const Queues& queues) {
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(queues.connections).c_str(), 1);
  const auto gpu = open(s);
  const auto word = must(gpu->allocate_pinned(4096));
  const auto memory = must(gpu->allocate(64 * KiB));
  auto& value = *reinterpret_cast<std::uint64_t*>(word.bytes.data());
  value = 0;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < queues.streams; ++i) streams.push_back(must(gpu->make_stream()));
  for (int i = 0; i < queues.waiting; ++i) must(streams[static_cast<std::size_t>(i)]->wait_until(&value, 1));
  std::vector<std::uint64_t> marks;
  const auto others = std::span(streams).subspan(static_cast<std::size_t>(queues.waiting));
  for (const auto& stream : others) {
    must(stream->clear(memory.bytes.data(), 4));
    marks.push_back(must(stream->mark()));
  }
  const auto behind = [&] {
    int count = 0;
    for (std::size_t i = 0; i < others.size(); ++i) count += must(others[i]->reached()) < marks[i] ? 1 : 0;
    return count;
  };
  const SteadyClock clock;
  for (const TimePoint until = clock.now() + s.wait; clock.now() < until && behind() > 0;) pause(s.wait / 50);
  const int stopped = behind();
  std::atomic_ref(value).store(1, std::memory_order_release);
  for (const auto& stream : streams) must(stream->synchronize());
  return stopped;
}

// ---- a served daemon beside a trainer

// In the daemon's process: copies the state out, again and again, from one word of the trainer's to the next, which it
// answers with the bytes.
void be_daemon(const Fd& line, std::uint64_t bytes) {
  const auto next = [&] {
    for (;;) {
      auto received = receive_with_fds(line, 64);
      if (!received) ::_exit(0);  // the trainer has ended
      if (*received) return std::move(**received);
      pollfd there{line.get(), POLLIN, 0};
      (void)::poll(&there, 1, -1);
    }
  };
  auto offer = next();
  std::uint64_t address = 0;
  BytesView rest = offer.bytes;
  if (!take(rest, address) || offer.fds.size() != 2) ::_exit(1);
  auto remote = must(device::connect_remote({std::move(offer.fds[0]), std::move(offer.fds[1])}, "the trainer's GPU"));
  auto stream = must(remote->make_stream());
  constexpr std::size_t slots = 8, piece = 1 * MiB;
  const auto pinned = must(remote->allocate_pinned(slots * piece));
  const device::Handle handle{.kind = device::Handle::Kind::address, .size = bytes, .address = address};
  const auto memory = must(remote->import_shared({&handle, 1}));
  const auto* state = memory.bytes.data();
  for (;;) {
    (void)next();
    std::uint64_t copied = 0, marks[slots] = {};
    for (std::uint64_t i = 0;; ++i) {
      if (i % slots == 0) {
        auto received = must(receive_with_fds(line, 64));
        if (received) break;
      }
      while (must(stream->reached()) < marks[i % slots]) std::this_thread::yield();
      must(stream->copy(pinned.bytes.data() + i % slots * piece, state + i * piece % bytes, piece));
      marks[i % slots] = must(stream->mark());
      copied += piece;
    }
    must(stream->synchronize());
    must(send_with_fds(line, bytes_of(copied), {}));
  }
}

// Rates in GB/s: the trainer's alone, the daemon's alone, the trainer's and the daemon's beside each other.
std::vector<double> beside(const Settings& s) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("no sockets");
  Fd line(ends[0]), its(ends[1]);
  if (::fork() == 0) {  // before the driver is loaded: the daemon has none
    line.reset();
    try {
      be_daemon(its, s.bytes);
    } catch (const std::exception& failure) {
      std::cerr << "the daemon: " << failure.what() << "\n";
    }
    ::_exit(1);
  }
  its.reset();
  const auto gpu = open(s);
  const auto state = must(gpu->allocate(s.bytes));
  const auto server = must(device::MemoryServer::make(gpu, {state.bytes}));
  const auto offer = server->next();
  must(send_with_fds(line, bytes_of(reinterpret_cast<std::uint64_t>(state.bytes.data())),
                     {offer->socket.get(), offer->memory.get()}));
  Memory a = must(gpu->allocate(s.bytes)), b = must(gpu->allocate(s.bytes));
  must(device::zero_fresh(*gpu, a.bytes));
  must(device::zero_fresh(*gpu, b.bytes));
  const auto reducer = must(device::Reducer::make(*gpu, {.blocks = s.blocks, .threads = 512}));
  const SteadyClock clock;
  const auto train = [&] {  // GB/s of results
    const std::uint64_t work = std::min<std::uint64_t>(s.bytes, 64 * MiB);
    std::uint64_t added = 0;
    const TimePoint begin = clock.now();
    while (clock.now() - begin < s.wait) {
      must(reducer->add(DataType::float32, b.bytes.data(), a.bytes.data(), b.bytes.data(), work / 4, 0));
      added += work;
      while (!reducer->idle()) (void)must(reducer->done());
    }
    return static_cast<double>(added) / seconds(clock.now() - begin) * 1e-9;
  };
  TimePoint told{};
  const auto tell = [&] {
    told = clock.now();
    must(send_with_fds(line, as_bytes("x"), {}));
  };
  const auto stop = [&] {
    const TimePoint from = told;
    tell();
    for (;;) {
      auto received = must(receive_with_fds(line, 64));
      std::uint64_t bytes = 0;
      if (received) {
        BytesView rest = received->bytes;
        if (!take(rest, bytes)) throw std::runtime_error("the daemon has said nothing");
        return static_cast<double>(bytes) / seconds(clock.now() - from) * 1e-9;
      }
      pollfd there{line.get(), POLLIN, 0};
      (void)::poll(&there, 1, -1);
    }
  };
  (void)train();
  const double trainer_alone = train();
  tell();
  pause(s.wait);
  const double daemon_alone = stop();
  tell();
  const double trainer = train();
  const double daemon = stop();
  return {trainer_alone, daemon_alone, trainer, daemon};
}

// ---- all of it

int run(const Settings& s) {
  nlohmann::json out;
  const Duration limit = 4 * s.wait + std::chrono::seconds(20);
  const auto named = text_of_a_process(limit, [&] { return open(s)->name(); });  // the driver is for children only
  if (!named) {
    std::cerr << "rejoin_gpu_probe: " << named.error().message << "\n";
    return 1;
  }
  const std::string& name = *named;
  out["device"] = name;
  const auto print = [&](const std::string& text) {
    if (!s.json) std::cout << text << std::flush;
  };
  print(fmt::format(
      "# {}\n\nA stream waits {:.0f} ms for a word; the trainer's thread is in …, and another thread's call takes "
      "(ms; * as long as the stream waits):\n{:52}",
      name, milliseconds(s.wait), ""));
  for (const auto* call : kCalls) print(fmt::format(" {:>9}", call));
  bool failed = false;
  for (const auto& [does, what] : kDoes) {
    print(fmt::format("\n{:52}", what));
    for (std::size_t call = 0; call < kCalls.size(); ++call) {
      if (does == Does::first_launch && call == 2) {  // it is what the other thread is in
        print(fmt::format(" {:>9}", "-"));
        continue;
      }
      const Told told = in_a_process(limit, [&, does = does] { return std::vector{stands(s, does, call)}; });
      nlohmann::json row{{"does", what}, {"call", kCalls[call]}};
      if (told.failure.empty() && told.values.size() == 1) {
        const bool stood = told.values[0] > milliseconds(s.wait) / 2;
        row["ms"] = told.values[0];
        row["stands"] = stood;
        print(fmt::format(" {:>9}", fmt::format("{:.1f}{}", told.values[0], stood ? "*" : "")));
      } else {
        failed = true;
        row["failure"] = told.failure;
        print(fmt::format(" {:>9}", told.failure));
      }
      out["stands_still"].push_back(row);
    }
  }
  print("\n\nOf streams that don't wait, these stop while others do, by CUDA_DEVICE_MAX_CONNECTIONS:\n");
  for (const auto& queues : kQueues) {
    const Told told = in_a_process(limit, [&] { return std::vector{stopped_streams(s, queues)}; });
    nlohmann::json row{{"connections", queues.connections}, {"streams", queues.streams}, {"waiting", queues.waiting}};
    std::string text = told.failure;
    if (told.values.size() == 1) {
      row["stopped"] = told.values[0];
      text = fmt::format("{:.0f} of {}", told.values[0], queues.streams - queues.waiting);
    } else {
      failed = true;
      row["failure"] = told.failure;
    }
    out["queues"].push_back(row);
    print(fmt::format("{:>4}: {} of {} wait, {} stop\n", queues.connections, queues.waiting, queues.streams, text));
  }
  const Told told = in_a_process(limit + 6 * s.wait, [&] { return beside(s); });
  if (told.values.size() == 4) {
    const auto& v = told.values;
    out["served"] = {{"trainer_alone", v[0]},
                     {"daemon_alone", v[1]},
                     {"trainer", v[2]},
                     {"daemon", v[3]},
                     {"trainer_time_ratio", v[0] / v[2]},
                     {"daemon_rate_ratio", v[3] / v[1]}};
    print(fmt::format(
        "\nA trainer that adds with {} blocks, and a daemon that its memory is served to, GB/s:\n  alone {:.1f} and "
        "{:.2f}; beside each other {:.1f} ({:.2f} × the time) and {:.2f} ({:.2f} of the rate)\n",
        s.blocks, v[0], v[1], v[2], v[0] / v[2], v[3], v[3] / v[1]));
  } else {
    failed = true;
    out["served"] = {{"failure", told.failure}};
    print(fmt::format("\nA daemon beside a trainer: {}\n", told.failure));
  }
  if (s.json) std::cout << out.dump(2) << "\n";
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace rejoin::bench

int main(int argc, char** argv) {
  using namespace rejoin;
  bench::Settings s;
  CommandLine line(
      "Asks a GPU's driver what \"No driver between hand-over and word\" rests on: which calls stand still while a "
      "stream "
      "waits for a word, which streams stop with it, and what a daemon that is served memory costs a busy trainer.");
  int wait_ms = 1000;
  line.add("--use_cuda", s.cuda, "the device's number").show_default();
  line.add("--wait-ms", wait_ms, "how long streams wait, and each rate is measured").range(20, 60000).show_default();
  line.add("-s,--size", s.bytes, "bytes of the served state").sized().range(1 * MiB, 64 * GiB).show_default();
  line.add("--blocks", s.blocks, "of 512 threads, of the trainer that fills the card").range(1u, 4096u).show_default();
  line.flag("--json", s.json, "JSON instead of tables");
  if (const auto status = line.parse(argc, argv)) return *status;
  s.wait = std::chrono::milliseconds(wait_ms);
  init_logging("gpu_probe", "warn");
  return bench::run(s);
}
