// The software driver's streams (fake_cuda.cc), and what its calls wait for.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace rejoin::device::fake {

// Between two looks at a flag that the CPU will write: a GPU that waits takes no time of the CPU's.
inline void look_away(unsigned looks = 0) {
  std::this_thread::sleep_for(std::chrono::microseconds(20) * (1u << std::min(looks / 4, 6u)));
}

struct Stream;

// Flags that streams wait for.
struct Awaited {
  const std::uint64_t* flag = nullptr;
  std::uint64_t value = 0;
  bool written() const {
    const auto now = std::atomic_ref(*const_cast<std::uint64_t*>(flag)).load(std::memory_order_acquire);
    return static_cast<std::int64_t>(now - value) >= 0;
  }
};
inline std::mutex awaited_mutex;
inline std::list<Awaited>& awaited = *new std::list<Awaited>;
inline thread_local bool hands_over = false;  // this thread has let a stream wait for a flag

// The thread of a device::MemoryServer, by its name.
inline bool serves_memory() {
  char name[16] = {};
  (void)::pthread_getname_np(::pthread_self(), name, sizeof name);
  return std::strcmp(name, "rejoin-memory") == 0;
}

// Flags that streams have written, ever. Who has seen one, perhaps by another address of the same memory, sees all that
// its stream has done before: with his next call of the driver, TSan knows it, too.
inline std::atomic<std::uint64_t> flags_written{0};

// Of a call that the driver may make wait for others.
inline void check(const char* call) {
  (void)flags_written.load(std::memory_order_acquire);
  if (hands_over || serves_memory()) return;
  std::scoped_lock lock(awaited_mutex);
  for (const auto& wait : awaited)
    if (!wait.written()) {
      std::fprintf(stderr, "fake CUDA driver: %s while a stream waits for a flag: a deadlock on a real one\n", call);
      std::abort();
    }
}

// A call that queues something: one at a time, the time that it waits for the device included.
inline std::mutex queueing;
class Queueing {
 public:
  explicit Queueing(const char* call) {
    check(call);
    held_.lock();
  }

 private:
  std::unique_lock<std::mutex> held_{queueing, std::defer_lock};
};

// A queue of the hardware's: where streams share one, a stream that waits stops all that comes behind it.
struct HardwareQueue {
  struct Command {
    std::shared_ptr<Stream> stream;
    std::function<void()> work;
    bool waits = false;
  };
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Command> commands;
  void run();
  void add(Command command) {
    std::scoped_lock held(lock);
    commands.push_back(std::move(command));
    changed.notify_all();
  }
};

struct Stream : std::enable_shared_from_this<Stream> {
  static constexpr std::uint64_t kRoom = 1000;
  HardwareQueue* const queue;  // none: one of its own
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  std::uint64_t queued = 0, done = 0;
  std::uint64_t begun = 0;  // the hardware queue's
  bool ended = false;
  std::thread thread{[this] {
    std::unique_lock held(lock);
    while (true) {
      changed.wait(held, [&] { return ended || !work.empty(); });
      if (work.empty()) return;
      auto next = std::move(work.front());
      work.pop_front();
      held.unlock();
      next();
      held.lock();
      ++done;
      changed.notify_all();
    }
  }};
  explicit Stream(HardwareQueue* of) : queue(of) {}
  // Waits where the stream is full.
  std::uint64_t add(std::function<void()> what, bool waits = false) {
    std::unique_lock held(lock);
    changed.wait(held, [&] { return queued - done < kRoom; });
    const std::uint64_t number = ++queued;
    if (queue != nullptr) {
      queue->add({shared_from_this(), std::move(what), waits});
    } else {
      work.push_back(std::move(what));
      changed.notify_all();
    }
    return number;
  }
  void begin(std::function<void()> what) {  // the hardware queue has come to it
    std::scoped_lock held(lock);
    work.push_back(std::move(what));
    changed.notify_all();
  }
  void wait_for(std::uint64_t number) {
    std::unique_lock held(lock);
    changed.wait(held, [&] { return done >= number; });
  }
  void wait() {
    std::unique_lock held(lock);
    changed.wait(held, [&, until = queued] { return done >= until; });
  }
  ~Stream() {
    {
      std::scoped_lock held(lock);
      ended = true;
      changed.notify_all();
    }
    thread.join();
  }
};

inline void HardwareQueue::run() {
  std::unique_lock held(lock);
  for (;;) {
    changed.wait(held, [&] { return !commands.empty(); });
    auto command = std::move(commands.front());
    commands.pop_front();
    held.unlock();
    const std::uint64_t before = command.stream->begun++;
    command.stream->wait_for(before);  // what comes before it on its stream
    command.stream->begin(std::move(command.work));
    if (command.waits) command.stream->wait_for(before + 1);
    command.stream.reset();
    held.lock();
  }
}

// As CUDA_DEVICE_MAX_CONNECTIONS says; not said: one for each stream.
inline HardwareQueue* next_hardware_queue() {
  static std::vector<HardwareQueue*>& queues = *new std::vector<HardwareQueue*>;  // their threads run to the end
  static std::size_t made = 0;
  const char* said = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (said == nullptr) return nullptr;
  for (auto more = std::strtoul(said, nullptr, 10); queues.size() < more;) {
    auto* queue = queues.emplace_back(new HardwareQueue);
    std::thread([queue] { queue->run(); }).detach();
  }
  return queues.at(made++ % queues.size());
}

}  // namespace rejoin::device::fake
