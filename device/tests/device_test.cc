// The seam over the host and over CUDA's driver, where that is one made of software (fake_cuda.cc).
#include "device/device.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <thread>

#include "device/tests/library.h"

namespace rejoin::device {
namespace {

std::shared_ptr<Device> cuda() {
  auto opened = open_cuda({.ordinal = 0, .library = cuda_library()});
  if (!opened) throw std::runtime_error(opened.error().message);
  return *opened;
}

struct Devices : testing::TestWithParam<std::string> {
  std::shared_ptr<Device> device = GetParam() == "cuda" ? cuda() : make_host();
};
INSTANTIATE_TEST_SUITE_P(Seam, Devices, testing::Values("host", "cuda"), [](const auto& i) { return i.param; });

TEST_P(Devices, BytesGoInAndComeOutWhereverTheyLie) {
  constexpr std::size_t size = 3 * MiB + 5;
  auto memory = *device->allocate(size);
  auto pinned = *device->allocate_pinned(size);
  auto back = *device->allocate_pinned(size);
  auto stream = *device->make_stream();
  for (std::size_t i = 0; i < size; ++i) pinned.bytes[i] = static_cast<std::byte>(i * 7 >> 3);
  ASSERT_TRUE(stream->copy(memory.bytes.data(), pinned.bytes.data(), size));
  // Inside the device, to another place in it, and out again: in order.
  auto other = *device->allocate(size);
  ASSERT_TRUE(stream->copy(other.bytes.data() + 3, memory.bytes.data() + 3, size - 3));
  ASSERT_TRUE(stream->copy(back.bytes.data() + 3, other.bytes.data() + 3, size - 3));
  ASSERT_TRUE(stream->synchronize());
  EXPECT_EQ(std::memcmp(back.bytes.data() + 3, pinned.bytes.data() + 3, size - 3), 0);
}

TEST_P(Devices, MarksAreReachedInOrderAndSignalled) {
  const Fd eventfd = *make_eventfd();  // outlives the stream
  auto memory = *device->allocate(1 * MiB);
  auto pinned = *device->allocate_pinned(1 * MiB);
  auto stream = *device->make_stream();
  EXPECT_EQ(*stream->reached(), 0u);
  std::uint64_t last = 0;
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(stream->copy(memory.bytes.data(), pinned.bytes.data(), 1 * MiB));
    const auto mark = *stream->mark();
    EXPECT_EQ(mark, last + 1);
    last = mark;
  }
  ASSERT_TRUE(stream->signal(eventfd));
  pollfd ready{.fd = eventfd.get(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(::poll(&ready, 1, 10000), 1);
  EXPECT_EQ(*stream->reached(), last);
}

TEST_P(Devices, AreUsedFromSeveralThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      auto stream = *device->make_stream();
      auto memory = *device->allocate(64 * KiB);
      auto pinned = *device->allocate_pinned(64 * KiB);
      std::fill(pinned.bytes.begin(), pinned.bytes.end(), static_cast<std::byte>(t));
      ASSERT_TRUE(stream->copy(memory.bytes.data(), pinned.bytes.data(), 64 * KiB));
      ASSERT_TRUE(stream->synchronize());
    });
  for (auto& thread : threads) thread.join();
}

TEST(Host, IsNoDmaBuf) {
  auto host = make_host();
  auto memory = *host->allocate(4096);
  EXPECT_EQ(host->export_dma_buf(memory.bytes).error().code, ErrorCode::unreachable);
}

TEST(Cuda, SaysWhatIsMissing) {
  auto none = open_cuda({.ordinal = 0, .library = "libcuda-that-is-not-there.so"});
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, ErrorCode::unavailable);
  EXPECT_NE(none.error().message.find("no CUDA driver on this machine"), std::string::npos) << none.error().message;
  auto old = open_cuda({.ordinal = 0, .library = "libm.so.6"});
  ASSERT_FALSE(old);
  EXPECT_NE(old.error().message.find("it lacks cuInit"), std::string::npos) << old.error().message;
  auto seventh = open_cuda({.ordinal = 700, .library = cuda_library()});
  ASSERT_FALSE(seventh);
  EXPECT_EQ(seventh.error().code, ErrorCode::invalid_argument);
}

TEST(Cuda, MemoryThatIsNotToBeHadIsAnErrorThatNamesItsSize) {
  auto device = cuda();
  auto much = device->allocate(std::size_t{1} << 40);
  ASSERT_FALSE(much);
  EXPECT_EQ(much.error().code, ErrorCode::exhausted);
  EXPECT_NE(much.error().message.find("1.0 TiB"), std::string::npos) << much.error().message;
}

TEST(Cuda, WithoutDmaBufSupportExportSaysSo) {
  if (is_real()) GTEST_SKIP() << "a real one may have it";
  auto device = cuda();
  auto memory = *device->allocate(8192);
  auto exported = device->export_dma_buf(memory.bytes);
  ASSERT_FALSE(exported);
  EXPECT_EQ(exported.error().code, ErrorCode::unreachable);
}

// A device's memory outlives the handle of the device.
TEST(Cuda, MemoryKeepsItsDevice) {
  auto memory = *cuda()->allocate(4096);
  memory.owner.reset();
}

}  // namespace
}  // namespace rejoin::device
