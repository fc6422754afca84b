// The plugin as NCCL has it: loaded, driven and unloaded. Its engines are this process's alone.
#include <dirent.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdarg>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "nccl/abi.h"

namespace rejoin::nccl {
namespace {

std::string warnings;
void log(abi::LogLevel level, unsigned long, const char*, int, const char* format, ...) {
  if (level != abi::kLogWarn) return;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  warnings += text;
}

bool within(std::chrono::seconds patience, const std::function<bool()>& done) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!done())
    if (std::chrono::steady_clock::now() > deadline) return false;
  return true;
}

std::size_t entries(const char* directory) {
  std::size_t count = 0;
  DIR* open = ::opendir(directory);
  while (::readdir(open) != nullptr) ++count;
  ::closedir(open);
  return count;
}

// One that is loaded afresh, with the calls of version 12, or with those of version 10, which has no end.
struct Plugin {
  void* library = ::dlopen(REJOIN_NCCL_PLUGIN, RTLD_NOW | RTLD_LOCAL);
  const abi::NetV12* net = nullptr;
  const abi::NetV10* old = nullptr;
  void* context = nullptr;
  void* offload = nullptr;

  explicit Plugin(bool without_end = false) {
    abi::Config config{.traffic_class = -1};
    if (without_end) {
      old = static_cast<abi::NetV10*>(::dlsym(library, "ncclNetPlugin_v10"));
      EXPECT_EQ(old->init(log, nullptr), abi::kSuccess);
    } else {
      net = static_cast<abi::NetV12*>(::dlsym(library, "ncclNetPlugin_v12"));
      EXPECT_EQ(net->init(&context, 1, &config, log, nullptr), abi::kSuccess);
    }
  }
  Plugin(const Plugin&) = delete;
  ~Plugin() {
    if (net != nullptr) EXPECT_EQ(net->finalize(context), abi::kSuccess);
    EXPECT_EQ(::dlclose(library), 0);
    EXPECT_EQ(::dlopen(REJOIN_NCCL_PLUGIN, RTLD_NOW | RTLD_NOLOAD), nullptr) << "it is not unloaded";
  }
  abi::Result listen(std::byte* handle, void** listener) const {
    return old != nullptr ? old->listen(0, handle, listener) : net->listen(context, 0, handle, listener);
  }
  abi::Result connect(std::byte* handle, void** sender) {
    return old != nullptr ? old->connect(0, nullptr, handle, sender, &offload)
                          : net->connect(context, 0, handle, sender, &offload);
  }
  // Both ends of a connection to itself.
  void link(void** sender, void** receiver, void** listener) {
    alignas(16) std::byte handle[abi::kHandleBytes] = {};
    ASSERT_EQ(listen(handle, listener), abi::kSuccess);
    EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
      if (*sender == nullptr) EXPECT_EQ(connect(handle, sender), abi::kSuccess);
      const auto accept = old != nullptr ? old->accept : net->accept;
      if (*receiver == nullptr) EXPECT_EQ(accept(*listener, receiver, &offload), abi::kSuccess);
      return *sender != nullptr && *receiver != nullptr;
    }));
  }
};

// Another process, which listens and then stands still: its handle.
struct Stopped {
  alignas(16) std::byte handle[abi::kHandleBytes] = {};
  pid_t process = -1;
  Stopped() {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    process = ::fork();
    if (process == 0) {
      const Plugin plugin;
      void* listener = nullptr;
      const bool listens = plugin.listen(handle, &listener) == abi::kSuccess;
      if (!listens || ::write(ends[1], handle, sizeof handle) != sizeof handle) ::_exit(1);
      ::raise(SIGSTOP);
      ::_exit(0);
    }
    ::close(ends[1]);
    EXPECT_EQ(::read(ends[0], handle, sizeof handle), static_cast<ssize_t>(sizeof handle));
    ::close(ends[0]);
    int status = 0;
    EXPECT_EQ(::waitpid(process, &status, WUNTRACED), process);
    EXPECT_TRUE(WIFSTOPPED(status));
  }
  Stopped(const Stopped&) = delete;
  ~Stopped() {
    ::kill(process, SIGKILL);
    ::waitpid(process, nullptr, 0);
  }
};

class NcclPlugin : public testing::TestWithParam<const char*> {
 protected:
  NcclPlugin() {
    ::setenv("REJOIN_NCCL_DEVICES", GetParam(), 1);
    ::setenv("REJOIN_NCCL_ADDRESS", "127.0.0.1", 1);
    warnings.clear();
  }
  // What it has of the process is no more when it is unloaded. A thread is listed for a moment after its end.
  static void expect_nothing_left(const std::function<void()>& loaded) {
    const auto threads = [] { return entries("/proc/self/task"); };
    const auto descriptors = [] { return entries("/proc/self/fd"); };
    const auto threads_before = threads(), descriptors_before = descriptors();
    loaded();
    EXPECT_TRUE(within(std::chrono::seconds(20), [&] { return threads() <= threads_before; }));
    EXPECT_EQ(descriptors(), descriptors_before);
  }
};

// A communicator that is aborted while it connects tells nobody, and NCCL unloads the plugin with its last one.
TEST_P(NcclPlugin, ThatIsUnloadedWhileItConnectsLeavesNoThreadAndNoDescriptor) {
  Stopped peer;
  for (const bool without_end : {false, true})
    expect_nothing_left([&] {
      Plugin plugin(without_end);
      alignas(16) std::byte mine[abi::kHandleBytes] = {};
      void* listener = nullptr;
      void* sender = nullptr;
      ASSERT_EQ(plugin.listen(mine, &listener), abi::kSuccess);
      alignas(16) std::byte theirs[abi::kHandleBytes] = {};
      std::copy_n(peer.handle, sizeof theirs, theirs);
      for (int i = 0; i < 3; ++i) ASSERT_EQ(plugin.connect(theirs, &sender), abi::kSuccess);
      ASSERT_EQ(sender, nullptr);
      const auto close = without_end ? plugin.old->close_listener : plugin.net->close_listener;
      ASSERT_EQ(close(listener), abi::kSuccess);
    });
}

TEST_P(NcclPlugin, EndsWithWhatWasNotClosedBeforeItIsUnloaded) {
  static auto& not_closed = *new std::vector<void*>;  // so that it counts for no leak
  for (const bool without_end : {false, true})
    expect_nothing_left([&] {
      Plugin plugin(without_end);
      void *sender = nullptr, *receiver = nullptr, *listener = nullptr;
      plugin.link(&sender, &receiver, &listener);
      not_closed.insert(not_closed.end(), {sender, receiver, listener});
    });
}

// While a communicator is there another's end leaves it what it has begun.
TEST_P(NcclPlugin, GoesOnConnectingWhenAnotherCommunicatorEnds) {
  Plugin plugin;
  alignas(16) std::byte handle[abi::kHandleBytes] = {};
  void *sender = nullptr, *receiver = nullptr, *listener = nullptr, *other = nullptr;
  abi::Config config{.traffic_class = -1};
  ASSERT_EQ(plugin.net->init(&other, 2, &config, log, nullptr), abi::kSuccess);
  ASSERT_EQ(plugin.listen(handle, &listener), abi::kSuccess);
  ASSERT_EQ(plugin.connect(handle, &sender), abi::kSuccess);
  alignas(16) std::byte begun[abi::kHandleBytes] = {};
  std::copy_n(handle, sizeof handle, begun);
  ASSERT_EQ(plugin.net->finalize(other), abi::kSuccess);
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    if (sender == nullptr) EXPECT_TRUE(std::equal(std::begin(handle), std::end(handle), begun)) << "it was begun anew";
    if (sender == nullptr) EXPECT_EQ(plugin.connect(handle, &sender), abi::kSuccess);
    if (receiver == nullptr) EXPECT_EQ(plugin.net->accept(listener, &receiver, &plugin.offload), abi::kSuccess);
    return sender != nullptr && receiver != nullptr;
  }));
  EXPECT_EQ(plugin.net->close_sender(sender), abi::kSuccess);
  EXPECT_EQ(plugin.net->close_receiver(receiver), abi::kSuccess);
  EXPECT_EQ(plugin.net->close_listener(listener), abi::kSuccess);
}

TEST_P(NcclPlugin, IsItsParentsInAChildOfForkWhichTouchesNothing) {
  Plugin plugin;
  const abi::NetV12& net = *plugin.net;
  void *sender = nullptr, *receiver = nullptr, *listener = nullptr;
  plugin.link(&sender, &receiver, &listener);
  Bytes out(100000, std::byte{7}), in(100000);
  void *from = nullptr, *to = nullptr, *received = nullptr, *sent = nullptr, *none = nullptr;
  ASSERT_EQ(net.register_memory(sender, out.data(), out.size(), abi::kHost, &from), abi::kSuccess);
  ASSERT_EQ(net.register_memory(receiver, in.data(), in.size(), abi::kHost, &to), abi::kSuccess);
  void* data = in.data();
  std::size_t size = in.size();
  int tag = 1, done = 0;
  ASSERT_EQ(net.receive(receiver, 1, &data, &size, &tag, &to, &none, &received), abi::kSuccess);
  const pid_t child = ::fork();
  if (child == 0) {
    alignas(16) std::byte handle[abi::kHandleBytes] = {};
    void* what = nullptr;
    const auto refused = [](abi::Result result) {
      const bool named = warnings.find("this is a child of fork()") != std::string::npos;
      warnings.clear();
      return result == abi::kInvalidUsage && named;
    };
    abi::Config config{.traffic_class = -1};
    bool right = refused(plugin.listen(handle, &what)) && refused(plugin.connect(handle, &what)) &&
                 refused(net.init(&what, 3, &config, log, nullptr)) &&
                 refused(net.accept(listener, &what, &plugin.offload)) &&
                 refused(net.send(sender, out.data(), out.size(), 1, from, nullptr, &what)) &&
                 refused(net.receive(receiver, 1, &data, &size, &tag, &to, &none, &what)) &&
                 refused(net.test(received, &done, nullptr)) &&
                 refused(net.register_memory(sender, &size, sizeof size, abi::kHost, &what));
    right = right && net.deregister(receiver, to) == abi::kSuccess && net.close_sender(sender) == abi::kSuccess &&
            net.close_receiver(receiver) == abi::kSuccess && net.close_listener(listener) == abi::kSuccess &&
            net.finalize(plugin.context) == abi::kSuccess && ::dlclose(plugin.library) == 0;
    ::_exit(right ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    if (sent == nullptr) EXPECT_EQ(net.send(sender, out.data(), out.size(), 1, from, nullptr, &sent), abi::kSuccess);
    return sent != nullptr;
  }));
  for (void* request : {sent, received})
    EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
      EXPECT_EQ(net.test(request, &done, nullptr), abi::kSuccess);
      return done != 0;
    }));
  EXPECT_EQ(in, out);
  EXPECT_EQ(net.deregister(sender, from), abi::kSuccess);
  EXPECT_EQ(net.deregister(receiver, to), abi::kSuccess);
  EXPECT_EQ(net.close_sender(sender), abi::kSuccess);
  EXPECT_EQ(net.close_receiver(receiver), abi::kSuccess);
  EXPECT_EQ(net.close_listener(listener), abi::kSuccess);
}

// NCCL's threads are at work until the process is gone, and static objects may have communicators, which they end.
struct AtExit {
  const abi::NetV12* net = nullptr;
  void *library = nullptr, *context = nullptr;
  void *listener = nullptr, *sender = nullptr, *receiver = nullptr, *from = nullptr, *to = nullptr;
  Bytes out = Bytes(100000, std::byte{7}), in = Bytes(100000);
} last;
void send_at_exit() {
  void *data = last.in.data(), *received = nullptr, *sent = nullptr, *none = nullptr;
  std::size_t size = last.in.size();
  int tag = 1;
  bool right = last.net->receive(last.receiver, 1, &data, &size, &tag, &last.to, &none, &received) == abi::kSuccess;
  right = right && within(std::chrono::seconds(20), [&] {
            right = right && last.net->send(last.sender, last.out.data(), last.out.size(), 1, last.from, nullptr,
                                            &sent) == abi::kSuccess;
            return !right || sent != nullptr;
          });
  for (void* request : {sent, received})
    right = right && within(std::chrono::seconds(20), [&] {
              int done = 0;
              right = right && last.net->test(request, &done, nullptr) == abi::kSuccess;
              return !right || done != 0;
            });
  right = right && last.in == last.out && last.net->deregister(last.sender, last.from) == abi::kSuccess &&
          last.net->deregister(last.receiver, last.to) == abi::kSuccess &&
          last.net->close_sender(last.sender) == abi::kSuccess &&
          last.net->close_receiver(last.receiver) == abi::kSuccess &&
          last.net->close_listener(last.listener) == abi::kSuccess &&
          last.net->finalize(last.context) == abi::kSuccess && ::dlclose(last.library) == 0;
  ::_exit(right ? 0 : 1);
}
TEST_P(NcclPlugin, KeepsItsConnectionsWhileTheProgramEnds) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::atexit(send_at_exit);  // before it is loaded: called after its own static objects are destroyed
    auto& plugin = *new Plugin;
    last.net = plugin.net;
    last.library = plugin.library;
    last.context = plugin.context;
    plugin.link(&last.sender, &last.receiver, &last.listener);
    (void)last.net->register_memory(last.sender, last.out.data(), last.out.size(), abi::kHost, &last.from);
    (void)last.net->register_memory(last.receiver, last.in.data(), last.in.size(), abi::kHost, &last.to);
    std::exit(2);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

INSTANTIATE_TEST_SUITE_P(Over, NcclPlugin, testing::Values("tcp", "tcp;threads=1", "tcp:127.0.0.1,127.0.0.2", "shm"),
                         [](const auto& devices) {
                           std::string name;
                           for (const char* at = devices.param; *at != '\0'; ++at)
                             name += std::isalnum(static_cast<unsigned char>(*at)) != 0 ? *at : '_';
                           return name;
                         });

}  // namespace
}  // namespace rejoin::nccl
