// The plugin's net over RDMA devices made of software (transport/tests/fake_verbs.h), where the test sees what a NIC
// does: flushes of GPU memory.
#include "nccl/net.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <set>

#include "base/fd.h"
#include "base/log.h"
#include "base/unix_socket.h"
#include "transport/acceptor.h"
#include "transport/factory.h"
#include "transport/tests/fake_verbs.h"

namespace rejoin::nccl {
namespace {

constexpr std::size_t kSize = 64 * KiB;

// Memory that a NIC reaches by a dma-buf, and the processor by another address alone.
struct DeviceMemory {
  Fd fd{::memfd_create("device", MFD_CLOEXEC)};
  std::byte* bytes = nullptr;
  std::span<std::byte> device;
  DeviceMemory() {
    EXPECT_EQ(::ftruncate(fd.get(), kSize), 0);
    bytes = static_cast<std::byte*>(::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0));
    void* reserved = ::mmap(nullptr, kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    device = {static_cast<std::byte*>(reserved), kSize};
  }
  ~DeviceMemory() { ::munmap(bytes, kSize), ::munmap(device.data(), kSize); }
  transport::DmaBuf dma_buf() const { return {.fd = fd.get(), .offset = 0, .memory = device}; }
};

// A sender and a receiver with two rails each, and every transfer of the NICs.
struct Net : testing::Test {
  struct Transfer {
    std::string device;
    std::uint64_t bytes = 0;
  };
  std::vector<Transfer> transfers;
  VirtualClock clock;
  std::shared_ptr<Device> sender, receiver;
  std::unique_ptr<Listener> listener;
  std::unique_ptr<Connection> sends, receives;

  Net() {
    spdlog::set_level(spdlog::level::err);
    sender = *Device::make(*transport::make_engine("ibverbs:fake0,fake1"), "127.0.0.1", clock);
    receiver = *Device::make(*transport::make_engine("ibverbs:fake0,fake1"), "127.0.0.1", clock);
    Handle handle;
    listener = *receiver->listen(handle);
    EXPECT_TRUE(until([&] {
      if (!sends) sends = *sender->connect(handle);
      if (!receives) receives = *receiver->accept(*listener);
      return sends && receives;
    }));
    fake_verbs_watch([this](const char* device, const void*, const void*, std::uint64_t bytes) {
      transfers.push_back({device, bytes});
    });
  }
  ~Net() override {
    fake_verbs_watch({});
    if (sends) sender->close(*sends);
    if (receives) receiver->close(*receives);
    receiver->close(*listener);
  }
  [[nodiscard]] bool until(const std::function<bool()>& done) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!done()) {
      if (receives) (void)receiver->accept(*listener);  // looks at what has come
      if (std::chrono::steady_clock::now() > deadline) return false;
    }
    return true;
  }
  void finish(Request& request) {
    ASSERT_TRUE(until([&] { return *receiver->test(request, nullptr); }));
  }
  // The devices that have read one byte, and no other transfer.
  std::multiset<std::string> read_a_byte() const {
    std::multiset<std::string> devices;
    for (const auto& one : transfers) devices.insert(one.bytes == 1 ? one.device : "more");
    return devices;
  }
};

TEST_F(Net, AFlushReadsOneByteThroughEveryRail) {
  DeviceMemory gpu, other;
  const auto dma_buf = gpu.dma_buf(), of_other = other.dma_buf();
  std::vector<std::byte> host(kSize), data(kSize, std::byte{7});
  Region* const on_gpu = *receiver->add_region(Device::Use::receive, gpu.device, true, &dma_buf);
  Region* const on_other = *receiver->add_region(Device::Use::receive, other.device, true, &of_other);
  Region* const on_host = *receiver->add_region(Device::Use::receive, host, false, nullptr);
  Region* const from = *sender->add_region(Device::Use::send, data, false, nullptr);
  const std::vector<Device::Target> targets{{other.device, 1, on_other}, {gpu.device, 2, on_gpu}, {host, 3, on_host}};
  Request* const received = *receiver->receive(*receives, targets);
  std::vector<Request*> sent;
  for (const int tag : {1, 2, 3}) {
    Request* one = nullptr;
    ASSERT_TRUE(until([&] { return (one = *sender->send(*sends, data, tag, *from)) != nullptr; }));
    sent.push_back(one);
  }
  for (auto* one : sent) ASSERT_TRUE(until([&] { return *sender->test(*one, nullptr); }));
  finish(*received);
  EXPECT_EQ(gpu.bytes[kSize - 1], std::byte{7});
  transfers.clear();
  Request* const flush = *receiver->flush(*receives, targets);
  ASSERT_NE(flush, nullptr);
  finish(*flush);
  EXPECT_EQ(read_a_byte(), (std::multiset<std::string>{"fake0", "fake1"})) << "behind the last comes behind all";
}

// To register it anew takes a driver milliseconds, in each receive.
TEST_F(Net, AGpusMemoryThatIsRegisteredForSendsServesReceives) {
  DeviceMemory gpu;
  const auto dma_buf = gpu.dma_buf();
  std::vector<std::byte> data(kSize, std::byte{7});
  Region* const named = *receiver->add_region(Device::Use::send, gpu.device, true, &dma_buf);
  Region* const on_gpu = *receiver->add_region(Device::Use::receive, gpu.device.first(kSize / 2), true, &dma_buf);
  EXPECT_EQ(named, on_gpu);
  Region* const from = *sender->add_region(Device::Use::send, data, false, nullptr);
  const std::vector<Device::Target> targets{{gpu.device, 1, on_gpu}};
  Request* const received = *receiver->receive(*receives, targets);
  Request* sent = nullptr;
  ASSERT_TRUE(until([&] { return (sent = *sender->send(*sends, data, 1, *from)) != nullptr; }));
  ASSERT_TRUE(until([&] { return *sender->test(*sent, nullptr); }));
  finish(*received);
  EXPECT_EQ(gpu.bytes[kSize - 1], std::byte{7});
  finish(**receiver->flush(*receives, targets));
}

TEST_F(Net, ThereIsNothingToFlushInTheHostsMemoryOrWithoutBytes) {
  DeviceMemory gpu;
  const auto dma_buf = gpu.dma_buf();
  std::vector<std::byte> host(kSize);
  Region* const on_gpu = *receiver->add_region(Device::Use::receive, gpu.device, true, &dma_buf);
  Region* const on_host = *receiver->add_region(Device::Use::receive, host, false, nullptr);
  EXPECT_EQ(*receiver->flush(*receives, std::vector<Device::Target>{{host, 0, on_host}}), nullptr);
  EXPECT_EQ(*receiver->flush(*receives, std::vector<Device::Target>{{gpu.device.first(0), 0, on_gpu}}), nullptr);
}

TEST_F(Net, AFlushTooManyIsAnErrorAndNotNothingToFlush) {
  DeviceMemory gpu;
  const auto dma_buf = gpu.dma_buf();
  Region* const on_gpu = *receiver->add_region(Device::Use::receive, gpu.device, true, &dma_buf);
  const std::vector<Device::Target> targets{{gpu.device, 0, on_gpu}};
  std::vector<Request*> flushes;
  for (std::uint64_t i = 0; i < kReceives; ++i) {
    flushes.push_back(*receiver->flush(*receives, targets));
    ASSERT_NE(flushes.back(), nullptr);
  }
  const auto one_more = receiver->flush(*receives, targets);
  ASSERT_FALSE(one_more);
  EXPECT_EQ(one_more.error().code, ErrorCode::exhausted);
  for (auto* one : flushes) finish(*one);
  finish(**receiver->flush(*receives, targets));
}

TEST_F(Net, AFlushGoesOnOverTheRailThatIsLeft) {
  DeviceMemory gpu;
  const auto dma_buf = gpu.dma_buf();
  Region* const on_gpu = *receiver->add_region(Device::Use::receive, gpu.device, true, &dma_buf);
  const std::vector<Device::Target> targets{{gpu.device, 0, on_gpu}};
  finish(**receiver->flush(*receives, targets));
  fake_verbs_port("fake1", false);
  transfers.clear();
  finish(**receiver->flush(*receives, targets));
  fake_verbs_port("fake1", true);
  EXPECT_EQ(read_a_byte(), std::multiset<std::string>{"fake0"});
}

// A listener of TCP, and one who calls it.
struct Setup : testing::Test {
  VirtualClock clock;
  std::shared_ptr<Device> sender = make(), receiver = make();
  Handle handle;
  std::unique_ptr<Listener> listener = *receiver->listen(handle);

  Setup() { spdlog::set_level(spdlog::level::err); }
  std::shared_ptr<Device> make(const Family& family = {}, const std::string& transport = "tcp") const {
    return *Device::make(*transport::make_engine(transport), "127.0.0.1", clock, family);
  }
  // Both ends of a connection, which are closed again; false: there was none within some time.
  static bool connects(Device& calls, Handle& to, Device& listens, Listener& at) {
    std::unique_ptr<Connection> here, there;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!(here && there) && std::chrono::steady_clock::now() < deadline) {
      if (!here) {
        auto connected = calls.connect(to);
        EXPECT_TRUE(connected) << connected.error().message;
        if (!connected) break;
        here = std::move(*connected);
      }
      if (!there) there = *listens.accept(at);
    }
    const bool both = here && there;
    if (here) calls.close(*here);
    if (there) listens.close(*there);
    return both;
  }
};

TEST_F(Setup, ACallerThatABusyListenerTurnsAwayComesAgain) {
  std::vector<Handle> handles(300, handle);  // more than wait at once, in fewer descriptors than a process may have
  std::vector<std::unique_ptr<Connection>> sends(handles.size()), receives;
  // All call before any is looked at.
  for (auto& one : handles) ASSERT_TRUE(sender->connect(one));
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (receives.size() < handles.size() && std::chrono::steady_clock::now() < deadline) {
    clock.advance(std::chrono::milliseconds(1));
    for (std::size_t i = 0; i < handles.size(); ++i) {
      if (sends[i]) continue;
      auto connected = sender->connect(handles[i]);
      ASSERT_TRUE(connected) << connected.error().message;
      sends[i] = std::move(*connected);
    }
    while (auto accepted = *receiver->accept(*listener)) receives.push_back(std::move(accepted));
  }
  EXPECT_EQ(receives.size(), handles.size());
  for (auto& one : sends)
    if (one) sender->close(*one);
  for (auto& one : receives) receiver->close(*one);
  receiver->close(*listener);
}

// NCCL would call for ever, since nothing else is closed before it has this connection. Who is merely late is waited
// for.
TEST_F(Setup, AcceptingFailsWhereThereHasBeenNoDescriptorForACallerForSomeSeconds) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const auto set_most = [&](rlim_t most) {
    const rlimit other{.rlim_cur = most, .rlim_max = limit.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &other), 0);
  };
  const auto accept_a_second_later = [&] {
    clock.advance(std::chrono::seconds(1));
    return receiver->accept(*listener);
  };
  set_most(3);
  for (int second = 0; second < 10; ++second) ASSERT_TRUE(accept_a_second_later()) << "nobody calls";
  set_most(limit.rlim_cur);
  ASSERT_TRUE(sender->connect(handle));
  set_most(3);
  for (int second = 0; second < 5; ++second) {
    const auto before = transport::accepts_without_descriptor();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (transport::accepts_without_descriptor() == before && std::chrono::steady_clock::now() < deadline)
      ASSERT_TRUE(receiver->accept(*listener)) << second;
    const auto accepted = accept_a_second_later();
    ASSERT_EQ(accepted.has_value(), second < 4) << second;
    if (accepted) continue;
    EXPECT_EQ(accepted.error().code, ErrorCode::exhausted);
    EXPECT_NE(accepted.error().message.find("raise the limit with 'ulimit -n'"), std::string::npos);
  }
  set_most(limit.rlim_cur);
  ASSERT_TRUE(connects(*sender, handle, *receiver, *listener))
      << "the last one for whom there is a descriptor is taken";
  receiver->close(*listener);
}

TEST_F(Setup, AListenerThatHasGoneIsAnErrorAfterAFewTries) {
  receiver->close(*listener);
  listener.reset();
  receiver.reset();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (auto called = sender->connect(handle); called; called = sender->connect(handle)) {
    clock.advance(std::chrono::milliseconds(1));
    ASSERT_EQ(*called, nullptr);
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "it calls for ever";
  }
}

// As of a process that has not come to its accept() yet, while all of its node call.
TEST_F(Setup, AListenerAtWhichTooManyWaitIsAskedForAsLongAsNcclAsks) {
  const std::string name = fmt::format("@rejoin-busy-{}", ::getpid());
  const Fd busy = listen_unix(name).value();
  ASSERT_EQ(::listen(busy.get(), 2), 0);
  const auto caller = make({}, "shm");
  const auto accepted = [&] { return static_cast<bool>(Fd(::accept(busy.get(), nullptr, nullptr))); };
  std::vector<Handle> handles(10, handle);
  for (auto& one : handles) one.address[("=shm:" + name).copy(one.address, sizeof one.address)] = '\0';
  int came = 0;
  for (int second = 0; second < 20; ++second) {
    clock.advance(std::chrono::seconds(1));
    for (auto& one : handles) {
      const auto called = caller->connect(one);
      ASSERT_TRUE(called) << called.error().message;
    }
    if (second >= 15)
      while (accepted()) ++came;
  }
  EXPECT_GE(came, 10) << "who was turned away has come again";
  caller->give_up_all();
  receiver->close(*listener);
}

TEST_F(Setup, DevicesOfOtherFamiliesHearWhichBothHaveAndWhatToSet) {
  const auto told = make(family_of("tcp+aes:10.0.0.1,10.0.0.2")), other = make(family_of("ibverbs:mlx5_0"));
  Handle its, calls_itself, calls_old = handle;  // the last one's listener is of a release that tells no family
  auto listening = *told->listen(its);
  calls_itself = its;
  const auto refused = other->connect(its);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::mismatch);
  for (const char* words : {"tcp+aes over several rails", "ibverbs", "set REJOIN_NCCL_DEVICES alike on all nodes"})
    EXPECT_NE(refused.error().message.find(words), std::string::npos) << refused.error().message;
  EXPECT_TRUE(told->connect(calls_itself));
  EXPECT_TRUE(other->connect(calls_old));
  told->close(*listening);
  clock.advance(std::chrono::minutes(3));
  for (const auto& device : {told, other}) device->close(**device->listen(its));  // gives up what was begun above
  receiver->close(*listener);
}

// As of nodes whose NICs NCCL has merged, where one has a port less.
TEST_F(Setup, DevicesOfTwoAndOfThreeRailsConnect) {
  const auto of = [&](const std::string& transport) { return make(family_of(transport), transport); };
  const auto two = of("tcp:127.0.0.1,127.0.0.2"), three = of("tcp:127.0.0.1,127.0.0.2,127.0.0.3");
  for (const auto& [calls, listens] : {std::pair(two, three), std::pair(three, two)}) {
    Handle its;
    auto listening = *listens->listen(its);
    ASSERT_TRUE(connects(*calls, its, *listens, *listening));
    listens->close(*listening);
  }
  receiver->close(*listener);
}

TEST_F(Setup, WhatNcclAsksForNoMoreIsGivenUpAndHoldsNoDevice) {
  const std::weak_ptr<Device> device = sender;
  ASSERT_EQ(*sender->connect(handle), nullptr);
  Handle other;
  auto listening = *sender->listen(other);
  clock.advance(std::chrono::minutes(3));
  sender->close(*listening);
  listening = *sender->listen(other);
  sender->close(*listening);
  listening.reset();
  sender.reset();
  EXPECT_TRUE(device.expired());
  receiver->close(*listener);
}

TEST_F(Setup, WhoWasStoppedWhileItConnectedGoesOn) {
  ASSERT_EQ(*sender->connect(handle), nullptr);
  Handle second = handle;
  second.connecting = 0;
  ASSERT_EQ(*sender->connect(second), nullptr);
  clock.advance(std::chrono::minutes(3));
  std::unique_ptr<Connection> one, two, here, there;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!(one && two && here && there) && std::chrono::steady_clock::now() < deadline) {
    if (!one) one = *sender->connect(handle);
    if (!two) two = *sender->connect(second);
    for (auto* each : {&here, &there})
      if (!*each) *each = *receiver->accept(*listener);
  }
  ASSERT_TRUE(one && two && here && there);
  sender->close(*one), sender->close(*two), receiver->close(*here), receiver->close(*there);
  receiver->close(*listener);
}

}  // namespace
}  // namespace rejoin::nccl
