// What a thread may call that is being cancelled.
#pragma once

#include <pthread.h>

#include <functional>

namespace rejoin {

// Calls it in a thread that pthread_cancel() has been called for. Returns whether that was cancelled, and whether it
// had come back from the call before.
struct Cancelled {
  bool cancelled = false, came_back = false;
};
inline Cancelled in_cancelled_thread(std::function<void()> call) {
  struct Run {
    std::function<void()> call;
    bool came_back = false;
  } run{std::move(call)};
  pthread_t thread{};
  const auto begin = [](void* its) -> void* {
    auto& here = *static_cast<Run*>(its);
    ::pthread_cancel(::pthread_self());
    here.call();
    here.came_back = true;
    ::pthread_testcancel();
    return nullptr;
  };
  if (::pthread_create(&thread, nullptr, begin, &run) != 0) return {};
  void* result = nullptr;
  ::pthread_join(thread, &result);
  return {result == PTHREAD_CANCELED, run.came_back};
}

}  // namespace rejoin
