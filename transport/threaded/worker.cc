#include "transport/threaded/worker.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "base/fail.h"
#include "base/start_thread.h"

namespace rejoin::transport::threaded {

Result<std::unique_ptr<Worker>> Worker::make(std::unique_ptr<Engine> engine) {
  if (engine->event_fd() < 0)
    return fail(ErrorCode::invalid_argument, "this transport has no descriptor that a thread could sleep on");
  auto posted = make_eventfd(), happened = make_eventfd();
  if (!posted) return tl::unexpected(posted.error());
  if (!happened) return tl::unexpected(happened.error());
  engine->set_polled_on();
  std::unique_ptr<Worker> worker(new Worker(std::move(engine), std::move(*posted), std::move(*happened)));
  if (auto started = start_thread(worker->thread_, [w = worker.get()] { w->loop(); }); !started)
    return tl::unexpected(started.error());
  return worker;
}

Worker::~Worker() {
  if (!thread_.joinable()) return;  // it could not be had
  if (::getpid() != process_) {
    leave_to_parent(thread_);
    return;
  }
  call([this](Engine&) { stop_ = true; });
  thread_.join();
}

// ---- the owner

void Worker::wake() {
  if (thread_sleeps_ && thread_sleeps_.exchange(false)) signal_eventfd(posted_);
}

void Worker::hand_over(Task task) {
  tasks_.put(std::move(task));
  wake();
}

void Worker::post(Post post) { hand_over(std::move(post)); }

void Worker::call(const std::function<void(Engine&)>& run) {
  if (::getpid() != process_) return run(*engine_);  // in a child of fork() there is no such thread
  hand_over(&run);
  called_.acquire();
}

std::vector<EventQueue> Worker::take() {
  if (std::exchange(armed_, false)) {
    owner_sleeps_ = false;
    drain_eventfd(happened_);
  }
  auto events = events_out_.take();
  for (const auto& one : events) untaken_ -= one.bytes();
  if (!events.empty()) wake();
  return events;
}

bool Worker::arm() {
  armed_ = true;
  owner_sleeps_ = true;
  return events_out_.empty();
}

// ---- the thread

void Worker::loop() {
  (void)::pthread_setname_np(::pthread_self(), "rejoin-rail");  // for people
  while (!stop_) {
    auto tasks = tasks_.take();
    for (auto& task : tasks) run(task);
    const bool happened = poll();
    if (!tasks.empty() || happened) continue;
    if (const bool full = is_full(); full || engine_->arm()) wait(full);
  }
}

bool Worker::poll() {
  if (!is_full())
    for (const auto& event : engine_->poll()) events_.emit(event, event.message);
  refused_ = engine_->refused();
  if (events_.empty()) return false;
  untaken_ += events_.bytes();
  events_out_.put(std::exchange(events_, {}));
  if (owner_sleeps_ && owner_sleeps_.exchange(false)) signal_eventfd(happened_);
  return true;
}

void Worker::run(Task& task) {
  if (const auto* call = std::get_if<Call>(&task)) {
    (**call)(*engine_);
    called_.release();
  } else {
    post_now(std::get<Post>(task));
  }
}

// The owner was told that it is posted. Where the endpoint has failed since, operations end in events, and of a message
// nothing is heard: as if they had been on their way.
void Worker::post_now(const Post& post) {
  const auto end_all = [&](const auto& operations, const Result<>& posted) {
    for (const auto& one : operations)
      if (!posted)
        events_.emit(
            {.kind = EventKind::completed, .endpoint = post.endpoint, .value = one.context, .error = posted.error()});
  };
  if (const auto* message = std::get_if<Bytes>(&post.what)) (void)engine_->send(post.endpoint, *message);
  else if (const auto* writes = std::get_if<std::vector<Write>>(&post.what))
    end_all(*writes, engine_->write(post.endpoint, *writes));
  else if (const auto* reads = std::get_if<std::vector<Read>>(&post.what))
    end_all(*reads, engine_->read(post.endpoint, *reads));
}

// With `full` until the owner has taken something.
void Worker::wait(bool full) {
  thread_sleeps_ = true;
  if (tasks_.empty() && (!full || is_full())) {
    std::array<pollfd, 2> any{pollfd{.fd = posted_.get(), .events = POLLIN, .revents = 0},
                              pollfd{.fd = engine_->event_fd(), .events = POLLIN, .revents = 0}};
    // What an engine does after a while, without being woken, it does when it is polled.
    const int woken = ::poll(any.data(), full ? 1 : 2, full ? -1 : static_cast<int>(kLongestWait.count()));
    REJOIN_CHECK(woken >= 0 || errno == EINTR, "poll");
    if (any[0].revents != 0) drain_eventfd(posted_);
  }
  thread_sleeps_ = false;
}

}  // namespace rejoin::transport::threaded
