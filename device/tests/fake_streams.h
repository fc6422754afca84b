// The software driver's streams (fake_cuda.cc), and what its calls wait for.
#pragma once

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

#include "device/tests/fake_check.h"

namespace rejoin::device::fake {

// Between two looks at a flag that the CPU will write: a GPU that waits takes no time of the CPU's.
inline void look_away(unsigned looks = 0) {
  std::this_thread::sleep_for(std::chrono::microseconds(20) * (1u << std::min(looks / 4, 6u)));
}
// In the driver.
inline void stand(std::chrono::milliseconds time) { std::this_thread::sleep_for(time); }

struct Stream;

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
  static constexpr std::uint64_t kRoom = 1000;  // for commands
  HardwareQueue* const queue;
  const bool high;  // its priority
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  std::uint64_t queued = 0, done = 0;
  std::uint64_t begun = 0;  // the hardware queue's
  bool ended = false;
  std::atomic<bool> captured = false;
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
  Stream(HardwareQueue* of, bool first) : queue(of), high(first) {}
  // Waits where the stream is full.
  std::uint64_t add(std::function<void()> what, bool waits = false) {
    std::unique_lock held(lock);
    changed.wait(held, [&] { return queued - done < kRoom; });
    const std::uint64_t number = ++queued;
    queue->add({shared_from_this(), std::move(what), waits});
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

// Words, with blanks between them: options() of fake_check.h.
inline const char* options_said() { return std::getenv("REJOIN_FAKE_CUDA"); }
inline bool launches_block() {
  const char* said = std::getenv("CUDA_LAUNCH_BLOCKING");
  return said != nullptr && std::strcmp(said, "0") != 0;
}

// As many as CUDA_DEVICE_MAX_CONNECTIONS says; not said: 8, as with the real one.
inline HardwareQueue* next_hardware_queue() {
  static std::vector<HardwareQueue*>& queues = *new std::vector<HardwareQueue*>;  // their threads run to the end
  static std::size_t made = 0;
  const char* said = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  for (auto more = said == nullptr ? 8 : std::max(1ul, std::strtoul(said, nullptr, 10)); queues.size() < more;) {
    auto* queue = queues.emplace_back(new HardwareQueue);
    std::thread([queue] { queue->run(); }).detach();
  }
  return queues.at(made++ % queues.size());
}

}  // namespace rejoin::device::fake
