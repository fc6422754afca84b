// The stream over RDMA devices made of software, into and out of the memory of a GPU made of software.
#include <gtest/gtest.h>

#include "base/log.h"
#include "catchup/service.h"
#include "device/remote.h"
#include "device/tests/fake_control.h"
#include "device/tests/library.h"
#include "local/owner.h"
#include "transport/factory.h"
#include "transport/staged/factory.h"
#include "transport/tests/fake_verbs.h"

namespace rejoin::catchup {
namespace {

constexpr std::size_t kSlot = 4 * KiB;  // bytes that are staged at once, where they are

// A rank with its trainer's state on the GPU, which the trainer serves, and its daemon.
struct Rank {
  std::unique_ptr<local::Owner> owner;
  std::unique_ptr<device::MemoryServer> server;
  std::shared_ptr<device::RemoteDevice> remote;
  std::unique_ptr<transport::Engine> engine;
  std::unique_ptr<Service> service;
  transport::Address address;
};

struct OnVerbs : testing::TestWithParam<bool> {};  // whether the GPU has dma-bufs
INSTANTIATE_TEST_SUITE_P(Memory, OnVerbs, testing::Bool(),
                         [](const auto& i) { return i.param ? "by_dma_buf" : "through_the_host"; });

TEST_P(OnVerbs, TheDaemonRegistersItsTrainersDmaBufAndHasNoContext) {
  const auto gpu = device::test_gpu();
  const device::fake::Control control(REJOIN_FAKE_CUDA);
  const auto manifest = *local::Manifest::make({{.name = "w", .count = 300'000, .columns = 3}});
  const auto access = *gpu->make_access();
  const SteadyClock clock;
  Rank source, joiner;
  std::uint32_t number = 0;
  for (auto* rank : {&source, &joiner}) {
    auto below = transport::make_engine("ibverbs:fake0");
    ASSERT_TRUE(below) << below.error().message;
    rank->owner = std::make_unique<local::Owner>(*local::Owner::make(manifest, gpu));
    rank->owner->set_version(3);
    rank->server = *device::MemoryServer::make(gpu, rank->owner->shared_memory());
    rank->remote = *device::connect_remote(*rank->server->next(), gpu->address());
    rank->engine = *transport::staged::make_engine(std::move(*below), rank->remote, {.slot_bytes = kSlot, .slots = 2});
    rank->engine->set_secrets({transport::Secret::of({5, 0})});
    rank->address = *rank->engine->listen({"0.0.0.0:0"});
    rank->service = std::make_unique<Service>(*rank->engine, transport::Secret::of({5, 0}),
                                              Service::Options{.compression = Compression::never}, clock);
    control.set_dma_buf(GetParam());
    auto offer = rank->owner->offer();
    control.set_dma_buf(false);
    ASSERT_TRUE(rank->service->add_rank({ReplicaId(number), RankId(0)}, number + 1,
                                        *local::View::make(std::move(*offer), rank->remote)));
    ++number;
  }
  const auto column = source.owner->column(0, 2);
  Bytes bytes(column.size()), back(column.size());
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 >> 3);
  ASSERT_TRUE(access->write(column.data(), bytes));

  std::uint64_t largest = 0;
  fake_verbs_watch(
      [&](const char*, const void*, const void*, std::uint64_t moved) { largest = std::max(largest, moved); });
  source.service->serve({ReplicaId(0), RankId(0)}, Incarnation(1));
  joiner.service->catch_up({ReplicaId(1), RankId(0)}, {{ReplicaId(0), Incarnation(1), source.address}}, Step(3),
                           clock.now());
  const auto deadline = clock.now() + std::chrono::seconds(60);
  bool landed = false;
  while (!landed && clock.now() < deadline) {
    (void)source.service->poll(clock.now());
    (void)joiner.service->poll(clock.now());
    const auto progress = joiner.service->progress({ReplicaId(1), RankId(0)}, clock.now());
    landed = progress && progress->bytes == manifest.bytes();
  }
  fake_verbs_watch({});
  ASSERT_TRUE(landed);
  ASSERT_TRUE(access->read(joiner.owner->column(0, 2), back.data()));
  EXPECT_EQ(back, bytes);
  if (GetParam()) {
    EXPECT_GT(largest, kSlot);  // so it was not staged
  } else {
    EXPECT_LE(largest, kSlot);
  }
}

}  // namespace
}  // namespace rejoin::catchup
