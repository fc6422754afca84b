// One of the two processes of the conformance program: a net plugin, loaded and driven as NCCL does, and a line to the
// other process.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/fd.h"
#include "nccl/abi.h"

namespace rejoin::nccl::conformance {

// What is wrong with the plugin.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
template <typename... Args>
void expect(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) throw Failure(fmt::format(format, std::forward<Args>(args)...));
}

struct Properties {
  std::string name, pci_path;
  int pointers = 0, speed = 0, port = 0, max_connections = 0, max_receives = 0, parts = 1;
  bool registration_is_global = false;
  std::uint64_t guid = 0;
  std::size_t largest = std::size_t{1} << 30;  // message
};

// One version of a plugin's interface, with the calls of the newest.
struct Net {
  // Null: the plugin does not export this version.
  static std::unique_ptr<Net> find(void* library, int version);

  int version = 0;
  std::string name;
  std::function<abi::Result(abi::Logger)> init;
  abi::Devices devices = nullptr;
  std::function<abi::Result(int device, Properties&)> properties;
  std::function<abi::Result(int device, void* handle, void** listener)> listen;
  std::function<abi::Result(int device, void* handle, void** sender)> connect;
  std::function<abi::Result(void* listener, void** receiver)> accept;
  abi::Register register_memory = nullptr;
  abi::Deregister deregister = nullptr;
  std::function<abi::Result(void* sender, void* data, std::size_t size, int tag, void* handle, void** request)> send;
  std::function<abi::Result(void* receiver, int count, void** data, std::size_t* sizes, int* tags, void** handles,
                            void** request)>
      receive;
  abi::Flush flush = nullptr;
  abi::Test test = nullptr;
  abi::Close close_sender = nullptr, close_receiver = nullptr, close_listener = nullptr;
  std::function<abi::Result()> finalize;
};

constexpr std::chrono::seconds kPatience{30};

class Side {
 public:
  Side(int rank, Fd line, std::unique_ptr<Net> plugin, int on_device)
      : number(rank), net(std::move(plugin)), device(on_device), line_(std::move(line)) {}

  const int number;  // 0 or 1
  std::unique_ptr<Net> net;
  const int device;
  Properties properties;

  // What the other side gives here; both call it.
  Bytes exchange(BytesView mine);
  void meet() { (void)exchange({}); }

  // Throws what the call gave, if that is no success.
  void call(abi::Result result, const char* what);
  // A pair of connections, one each way. The other side calls it too.
  struct Link {
    void* sender = nullptr;
    void* receiver = nullptr;
  };
  Link open_link();
  void close(Link& link);
  // Until it is done; the sizes, of a receive of so many.
  std::vector<int> wait(void* request, int count = 1);
  void* send(void* sender, std::span<std::byte> data, int tag, void* handle);
  void* receive(void* receiver, std::vector<std::span<std::byte>> into, std::vector<int> tags,
                std::vector<void*> handles);

 private:
  Fd line_;
};

// Such a pair, which is closed in the end: after what is registered with it.
class Connected : public Side::Link {
 public:
  explicit Connected(Side& side) : Side::Link(side.open_link()), side_(side) {}
  Connected(const Connected&) = delete;
  Connected(Connected&& other) noexcept : Side::Link(std::exchange<Side::Link>(other, {})), side_(other.side_) {}
  ~Connected() noexcept(false) {
    if (std::uncaught_exceptions() == 0) side_.close(*this);
  }

 private:
  Side& side_;
};

// Memory registered with a connection, as long as this lives.
class Registered {
 public:
  Registered(Side& side, void* connection, std::span<std::byte> memory);
  Registered(const Registered&) = delete;
  ~Registered();
  void* handle = nullptr;

 private:
  Side& side_;
  void* connection_;
};

struct Case {
  const char* name;
  void (*run)(Side& side);
  bool kills = false;  // side 1 does not survive it
};
std::vector<Case> cases();

// Checked messages both ways for so long; how many bytes came in.
std::uint64_t stream(Side& side, std::chrono::seconds duration);
struct Measured {
  double gigabytes_per_second = 0, microseconds = 0;  // 1 MiB one way; half an exchange of 8 bytes
};
Measured measure(Side& side);

}  // namespace rejoin::nccl::conformance
