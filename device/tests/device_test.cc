// The seam over the host and over CUDA's driver, where that is one made of software (fake_cuda.cc).
#include "device/device.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "base/digest.h"
#include "device/access.h"
#include "device/gpus.h"
#include "device/tests/fake_control.h"
#include "device/tests/library.h"

namespace rejoin::device {
namespace {

struct Devices : testing::TestWithParam<std::string> {
  std::shared_ptr<Device> device = GetParam() == "cuda" ? test_gpu() : make_host();
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

// A GPU's hardware has few queues, which all streams of a process share.
TEST(Accesses, OneStreamIsForCopiesAndDigests) {
  const auto device = test_gpu();
  if (is_real()) GTEST_SKIP() << "a real driver counts nothing";
  const fake::Control fake{cuda_library().c_str()};
  const int before = fake.counters().streams;
  const auto access = *device->make_access();
  EXPECT_EQ(fake.counters().streams - before, 1);
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

// So that a daemon's peers can map a trainer's state, and need not read it out of the daemon.
TEST(Host, ImportedMemoryIsKnownByItsFileWhereItIsWorthADescriptor) {
  auto device = make_host();
  for (const std::size_t size : {1 * MiB - 4 * KiB, 1 * MiB + 4 * KiB}) {
    const auto ours = *device->allocate(size);
    const Handle handles[] = {*device->share({.memory = ours.bytes})};
    const auto theirs = *device->import_shared(handles);
    const auto before = *shared_file_of(ours.bytes);
    const auto file = shared_file_of(theirs.bytes.subspan(100, 1000));
    ASSERT_EQ(file.has_value(), size > 1 * MiB);
    if (!file) continue;
    EXPECT_EQ(file->inode, before.inode);
    EXPECT_EQ(file->offset, 100u);
    EXPECT_NE(file->fd, before.fd) << "it lasts as long as its mapping";
  }
}

TEST(Host, SharedMemoryIsTheSameForWhoeverHoldsItsHandle) {
  constexpr std::size_t size = 300000;
  auto device = make_host();
  auto ours = *device->allocate(size);
  const auto allocations = *device->allocations(ours.bytes);
  ASSERT_EQ(allocations.size(), 1u);
  Memory theirs;
  {
    const Handle handles[] = {*device->share(allocations[0])};
    theirs = *(*open_device(device->address()))->import_shared(handles);
  }
  ASSERT_GE(theirs.bytes.size(), size);
  for (std::size_t i = 0; i < size; ++i) ours.bytes[i] = static_cast<std::byte>(i * 13 >> 2);
  EXPECT_TRUE(std::equal(ours.bytes.begin(), ours.bytes.end(), theirs.bytes.begin()));
  const auto last = ours.bytes.back();
  ours = {};
  EXPECT_EQ(theirs.bytes[size - 1], last);
}

TEST_P(Devices, AHandleOfSomethingElseIsRefused) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const Fd out(ends[1]);
  const auto import = [&](Handle handle) { return device->import_shared({&handle, 1}).has_value(); };
  EXPECT_FALSE(import({.size = 65536, .fd = Fd(ends[0])}));
  EXPECT_FALSE(import({.size = 65536}));
  EXPECT_FALSE(import({.kind = Handle::Kind::address, .size = 65536, .address = ~std::uint64_t{0} - 4096}));
  EXPECT_FALSE(device->import_shared({}));
  auto small = *device->allocate(2 * MiB);
  const auto wrong_sizes =
      device->kind() == MemoryKind::host
          ? std::vector<std::uint64_t>{10 * MiB, 0, ~std::uint64_t{0}}
          : std::vector<std::uint64_t>{0, ~std::uint64_t{0}};  // the server checks what is asked for
  for (const auto size : wrong_sizes) {
    auto handle = *device->share((*device->allocations(small.bytes))[0]);
    handle.size = size;
    EXPECT_FALSE(import(std::move(handle))) << size;
  }
}

TEST_P(Devices, MemoryOfNobodyIsNotShared) {
  Bytes bytes(4096);
  const auto none = device->allocations(bytes);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, ErrorCode::unreachable);
}

// As a caching allocator's: what is used of it begins and ends anywhere.
TEST(Cuda, AllocationsSideBySideAreOnePiece) {
  auto device = test_gpu();
  auto expandable = *device->allocate_mapped(6 * MiB, 2 * MiB);
  const auto allocations = *device->allocations(expandable.bytes.subspan(1 * MiB + 512, 4 * MiB));
  ASSERT_EQ(allocations.size(), 3u);
  std::vector<Handle> handles;
  for (const auto& allocation : allocations) {
    EXPECT_TRUE(allocation.mapped);
    handles.push_back(*device->share(allocation));
  }
  EXPECT_EQ(device->import_shared(handles)->bytes.data(), expandable.bytes.data());
  std::swap(handles[0], handles[1]);
  EXPECT_FALSE(device->import_shared(handles));
}

TEST_P(Devices, AStreamFollowsAnother) {
  auto first = *device->make_stream(), second = *device->make_stream();
  constexpr std::size_t size = 4 * MiB;
  auto a = *device->allocate(size), b = *device->allocate(size);
  auto access = *device->make_access();
  for (int round = 1; round <= 5; ++round) {
    ASSERT_TRUE(access->write(a.bytes.data(), Bytes(size, std::byte(round))));
    ASSERT_TRUE(first->clear(a.bytes.data(), size));
    ASSERT_TRUE(second->follow(*first));
    ASSERT_TRUE(second->copy(b.bytes.data(), a.bytes.data(), size));
    ASSERT_TRUE(second->synchronize());
    Bytes back(size);
    ASSERT_TRUE(access->read(b.bytes, back.data()));
    EXPECT_EQ(back, Bytes(size));
  }
}

TEST(Device, NamesThatAreNoneAreRefused) {
  EXPECT_EQ((*open_device("host"))->address(), "host");
  for (const auto* name : {"", "gpu", "cuda:", "cuda:x", "cuda:1x", "cuda1"})
    EXPECT_EQ(open_device(name).error().code, ErrorCode::invalid_argument) << name;
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

// What a real device would have to be rare, or set up, for.
struct OtherGpus : testing::Test {
  const fake::Control control{cuda_library().c_str()};
  void SetUp() override {
    if (is_real()) GTEST_SKIP() << "a real one is what it is";
  }
  ~OtherGpus() override {
    if (!is_real()) control.set_options({});
  }
};

TEST_F(OtherGpus, AreNotReachedByNicsWhoseWritesNothingOrders) {
  control.set_options({.unordered = true});
  EXPECT_EQ(test_gpu()->remote_writes(), Device::RemoteWrites::unordered);
}

TEST_F(OtherGpus, SayWhatToDoWhereStreamsWaitForNoFlags) {
  control.set_options({.no_flags = true});
  const auto has = test_gpu()->has_stream_flags();
  ASSERT_FALSE(has);
  EXPECT_EQ(has.error().code, ErrorCode::unavailable);
  EXPECT_NE(has.error().message.find("hand buckets over without a stream"), std::string::npos) << has.error().message;
}

TEST_F(OtherGpus, SayWhoseModeShutsOut) {
  control.set_options({.exclusive = true});
  const auto opened = open_cuda({.ordinal = 0, .library = cuda_library()});
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, ErrorCode::unavailable);
  EXPECT_NE(opened.error().message.find("EXCLUSIVE_PROCESS"), std::string::npos) << opened.error().message;
  EXPECT_NE(opened.error().message.find("nvidia-smi -c DEFAULT"), std::string::npos) << opened.error().message;
}

TEST(Cuda, MemoryThatIsNotToBeHadIsAnErrorThatNamesItsSize) {
  auto device = test_gpu();
  auto much = device->allocate(std::size_t{1} << 40);
  ASSERT_FALSE(much);
  EXPECT_EQ(much.error().code, ErrorCode::exhausted);
  EXPECT_NE(much.error().message.find("1.0 TiB"), std::string::npos) << much.error().message;
}

TEST(Cuda, WithoutDmaBufSupportExportSaysSo) {
  if (is_real()) GTEST_SKIP() << "a real one may have it";
  auto device = test_gpu();
  auto memory = *device->allocate(8192);
  auto exported = device->export_dma_buf(memory.bytes);
  ASSERT_FALSE(exported);
  EXPECT_EQ(exported.error().code, ErrorCode::unreachable);
}

// As torch.cuda.graph() does, while other threads look after the session.
TEST(Cuda, CallsDoNotSpoilAGraphThatTheTrainerCaptures) {
  if (is_real()) GTEST_SKIP() << "a real one is not told to capture here";
  const fake::Control fake{cuda_library().c_str()};
  const auto device = test_gpu();
  const auto captured = *device->make_stream(), other = *device->make_stream();
  const auto mark = *other->mark();
  fake.begin_capture(captured->handle());
  const auto adopted = *device->adopt_stream(captured->handle());
  const auto taken = adopted->takes_work();
  std::thread([&] {
    EXPECT_TRUE(other->idle());
    EXPECT_TRUE(other->synchronize());
    EXPECT_EQ(*other->reached(), mark);
    EXPECT_TRUE(device->allocate(4096));
    EXPECT_TRUE(device->allocate_pinned(4096));
    EXPECT_TRUE(other->takes_work());
  }).join();
  EXPECT_TRUE(fake.end_capture(captured->handle())) << "the graph is spoilt";
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().code, ErrorCode::invalid_argument);
  EXPECT_NE(taken.error().message.find("captured into a graph"), std::string::npos) << taken.error().message;
  EXPECT_TRUE(adopted->takes_work());
}

// A device's memory outlives the handle of the device.
TEST(Cuda, MemoryKeepsItsDevice) {
  auto memory = *test_gpu()->allocate(4096);
  memory.owner.reset();
}

TEST(Gpus, AreListedWithoutAContext) {
  const auto all = list_gpus(cuda_library());
  ASSERT_TRUE(all) << all.error().message;
  ASSERT_FALSE(all->empty());
  EXPECT_NE(all->front().name.find("(CUDA device 0)"), std::string::npos) << all->front().name;
  const auto none = list_gpus("libno-such-driver.so");
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, ErrorCode::unavailable);
}

}  // namespace
}  // namespace rejoin::device
