// The name server of this test program, whose getaddrinfo() takes the place of the C library's: two.addresses.test has
// two addresses, and nobody listens at the first of them; slow.test is this machine, but only a name server knows it,
// which answers when it is told to.
#pragma once

#include <condition_variable>
#include <mutex>

namespace rejoin::transport {

struct NameServer {
  std::mutex mutex;
  std::condition_variable changed;
  bool answers = false;
  int waiting = 0;

  void set(bool now) {
    const std::lock_guard lock(mutex);
    answers = now;
    changed.notify_all();
  }
  int asked_now() {
    const std::lock_guard lock(mutex);
    return waiting;
  }
  // Nobody is left in it.
  void finish() {
    set(true);
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return waiting == 0; });
  }
};
NameServer& name_server();

}  // namespace rejoin::transport
