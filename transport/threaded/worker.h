// The thread that an engine belongs to, and the ways between it and the thread that uses the engine, its owner.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <semaphore>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/fd.h"
#include "transport/event_queue.h"
#include "transport/threaded/handover.h"

namespace rejoin::transport::threaded {

class Worker {
 public:
  struct Post {
    EndpointId endpoint;
    std::variant<Bytes, std::vector<Write>, std::vector<Read>> what;  // bytes: a message
  };

  // The thread inherits the caller's CPUs. Errors: of the system.
  static Result<std::unique_ptr<Worker>> make(std::unique_ptr<Engine> engine);
  ~Worker();

  // ---- the owner
  void post(Post post);
  // Runs it on the thread, behind what was posted, and waits for that: as long as one turn of poll() at most, and until
  // the system lets the thread run.
  void call(const std::function<void(Engine&)>& run);
  template <typename Ask>
  std::invoke_result_t<Ask, Engine&> answer_of(Ask ask) {
    std::optional<std::invoke_result_t<Ask, Engine&>> answer;
    call([&](Engine& engine) { answer.emplace(ask(engine)); });
    return std::move(*answer);
  }
  // What has happened since, in order.
  std::vector<EventQueue> take();
  // As the engine's own.
  bool arm();
  int event_fd() const { return happened_.get(); }
  std::uint64_t refused() const { return refused_; }

 private:
  using Call = const std::function<void(Engine&)>*;  // answered by called_
  using Task = std::variant<Post, Call>;

  Worker(std::unique_ptr<Engine> engine, Fd posted, Fd happened)
      : engine_(std::move(engine)), posted_(std::move(posted)), happened_(std::move(happened)) {}
  static constexpr std::chrono::milliseconds kLongestWait{100};
  // Of events and their messages that the owner has not taken: with more the thread leaves the engine alone, so that
  // peers are held up.
  static constexpr std::size_t kMostUntaken = 4 * MiB;

  void wake();
  void hand_over(Task task);
  void loop();
  bool poll();  // whether anything has happened
  void run(Task& task);
  void post_now(const Post& post);
  void wait(bool full);
  bool is_full() const { return untaken_ > kMostUntaken; }

  const pid_t process_ = ::getpid();
  // The thread's.
  std::unique_ptr<Engine> engine_;
  bool stop_ = false;
  EventQueue events_;

  Handover<Task> tasks_;
  Handover<EventQueue> events_out_;
  std::atomic<std::size_t> untaken_{0};  // bytes
  const Fd posted_, happened_;           // signalled where the other side sleeps
  std::atomic<bool> thread_sleeps_{false}, owner_sleeps_{false};
  std::binary_semaphore called_{0};
  std::atomic<std::uint64_t> refused_{0};
  bool armed_ = false;  // the owner's
  std::thread thread_;
};

}  // namespace rejoin::transport::threaded
