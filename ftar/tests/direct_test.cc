// The all-reduce that skips the ring: contributions of several messages, members that die between two of them, the
// memory that is kept for it.
#include "ftar/operation.h"
#include "ftar/tests/counting_engine.h"
#include "ftar/tests/ring_cluster.h"

namespace rejoin::ftar {
namespace {

constexpr std::size_t kElement = sizeof(float);

struct Direct : testing::TestWithParam<bool> {
  bool on_gpu = GetParam();
  std::uint64_t transfers = 0;  // before the cluster, which ends first

  std::unique_ptr<Cluster> cluster(std::vector<std::size_t> elements, std::uint64_t seed = 1) {
    auto made = std::make_unique<Cluster>(seed, std::move(elements), on_gpu ? Over::gpu : Over::host);
    made->options.direct_bytes = made->options.device_direct_bytes = 256 * KiB;
    made->wrap = [&](std::unique_ptr<transport::Engine> engine) -> std::unique_ptr<transport::Engine> {
      return std::make_unique<Counting>(std::move(engine), transfers);
    };
    return made;
  }
};

INSTANTIATE_TEST_SUITE_P(Memory, Direct, testing::Bool(),
                         [](const auto& i) { return std::string(i.param ? "gpu" : "host"); });

TEST_P(Direct, NoByteGoesThroughSlotsAtAnySizeUpToTheLimit) {
  std::vector<std::size_t> sizes;
  for (const std::size_t bytes : {32 * KiB, 64 * KiB, 256 * KiB})
    for (const std::size_t size : {bytes / kElement - 1, bytes / kElement, bytes / kElement + 1})
      if (size * kElement <= 256 * KiB) sizes.push_back(size);
  auto all = cluster(sizes);
  for (int i = 0; i < 3; ++i) all->add();
  all->enter(Epoch(1), all->ring_members(Role::catching_up));
  for (std::uint64_t step = 1; step <= 3; ++step) {
    all->start(Step(step));
    ASSERT_TRUE(all->until([&] { return all->all_done(Step(step)); }));
  }
  all->expect_result({all->ranks[0].get(), all->ranks[1].get()});
  EXPECT_EQ(transfers, 0u);
  for (const auto& rank : all->ranks) EXPECT_EQ(rank->communicator->stats().stale_dropped, 0u);
}

// More members than are sent to directly: sums are exchanged in rounds, whatever the number beyond a power of two.
TEST_P(Direct, ManyMembersExchangeSumsInRoundsAndHaveTheSameBits) {
  for (std::uint32_t contributors = 1; contributors <= (on_gpu ? 5u : 13u); ++contributors)
    for (const std::uint32_t joiners : {0u, 1u, 3u}) {
      SCOPED_TRACE(testing::Message() << contributors << " contributors, " << joiners << " joining");
      auto all = cluster({1, 7, 64 * KiB / kElement + 1}, contributors);
      all->options.direct_members = 0;
      for (std::uint32_t i = 0; i < contributors + joiners; ++i) all->add();
      auto ring = all->ring_members();
      for (auto& one : ring)
        if (one.member.replica.value >= contributors) one.role = Role::catching_up;
      all->enter(Epoch(1), ring);
      const std::vector<const Rank*> live = all->live();
      for (std::uint64_t step = 1; step <= 3; ++step) {
        all->start(Step(step), step == 3 ? ReduceOp::mean : ReduceOp::sum);
        ASSERT_TRUE(all->until([&] { return all->all_done(Step(step)); }));
      }
      all->expect_result({live.begin(), live.begin() + contributors}, contributors);
      EXPECT_EQ(transfers, 0u);
      for (const auto& rank : all->ranks) EXPECT_EQ(rank->communicator->stats().stale_dropped, 0u);
    }
}

TEST_P(Direct, OneElementMoreGoesByTheRing) {
  auto all = cluster({256 * KiB / kElement + 1});
  all->options.chunk_bytes = 64 * KiB;
  for (int i = 0; i < 2; ++i) all->add();
  all->enter(Epoch(1), all->ring_members());
  all->start(Step(1));
  ASSERT_TRUE(all->until([&] { return all->all_done(Step(1)); }));
  all->expect_result(all->live());
  EXPECT_GT(transfers, 0u);
}

TEST_P(Direct, SurvivorsFinishFromIntactInputsWhereverAMemberDiesBetweenParts) {
  for (std::uint64_t seed = 1; seed <= (on_gpu ? 6u : 32u); ++seed) {
    SCOPED_TRACE(seed);
    auto all = cluster({32 * KiB / kElement + 1, 64 * KiB / kElement - 1, 256 * KiB / kElement}, seed);
    all->options.direct_members = seed % 2 == 0 ? 0 : 8;  // in rounds, and all to all
    for (int i = 0; i < (seed % 2 == 0 ? 5 : 3); ++i) all->add();
    all->enter(Epoch(1), all->ring_members());
    ASSERT_TRUE(all->until([&] {
      return std::none_of(all->ranks.begin(), all->ranks.end(), [](auto& r) { return r->communicator->busy(); });
    }));
    all->look_at_inputs();
    std::vector<std::vector<std::vector<float>>> inputs;
    for (auto& rank : all->ranks) inputs.push_back(rank->input);
    all->start(Step(1));
    // A GPU's copies come before the messages, so what is counted is what moves: at least 72, were nobody to die.
    auto left = 1 + static_cast<int>(all->random() % 70);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (left > 0 && std::chrono::steady_clock::now() < deadline) {
      if (all->fabric.step()) --left;
      all->pump();
    }
    ASSERT_EQ(left, 0);
    all->kill(*all->ranks[seed % 3]);
    ASSERT_TRUE(all->until([&] {
      return std::all_of(all->ranks.begin(), all->ranks.end(), [](auto& r) { return !r->alive || r->lost_someone(); });
    }));
    for (auto& rank : all->ranks) rank->outcomes.clear();
    all->enter(Epoch(2), all->ring_members());
    all->start(Step(1));
    ASSERT_TRUE(all->until([&] { return all->all_done(Step(1)); }));
    all->expect_result(all->live());
    all->look_at_inputs();
    for (std::size_t i = 0; i < inputs.size(); ++i) EXPECT_EQ(all->ranks[i]->input, inputs[i]) << "input-intact";
    EXPECT_EQ(transfers, 0u);
  }
}

TEST_P(Direct, WhatIsKeptForItIsBoundedAndTheSmallestBucketsComeFirst) {
  const std::size_t small = 8 * KiB / kElement, large = 16 * KiB / kElement;
  auto all = cluster({large, small, large});
  all->options.chunk_bytes = 4 * KiB;
  all->options.direct_members = 2;
  all->options.direct_memory = 26 * 24 * KiB;  // two inboxes, and two of the device: of the small and a large one
  for (int i = 0; i < 2; ++i) all->add();
  all->enter(Epoch(1), all->ring_members());
  ASSERT_TRUE(all->until([&] { return !all->ranks[0]->communicator->busy() && !all->ranks[1]->communicator->busy(); }));
  for (const auto& [bucket, ring] : {std::pair{0u, false}, {1u, false}, {2u, true}}) {
    transfers = 0;
    for (auto& rank : all->ranks) {
      rank->outcomes.clear();
      ASSERT_TRUE(rank->communicator->all_reduce(bucket, Step(1), ReduceOp::sum));
    }
    ASSERT_TRUE(all->until([&] { return all->ranks[0]->done(Step(1)) + all->ranks[1]->done(Step(1)) == 2; }));
    EXPECT_EQ(transfers > 0, ring) << "bucket " << bucket;
  }
  all->expect_result(all->live());
}

// A member's connection, in the hands of one that says what it likes.
TEST(DirectParts, WhatDoesNotFitIsDroppedAndChangesNothing) {
  Cluster cluster(3, {64 * KiB / kElement});
  cluster.options.direct_bytes = 64 * KiB;
  Counting* mouth = nullptr;  // of the member added last
  std::uint64_t transfers = 0;
  cluster.wrap = [&](std::unique_ptr<transport::Engine> engine) {
    auto made = std::make_unique<Counting>(std::move(engine), transfers);
    mouth = made.get();
    return made;
  };
  Rank& honest = cluster.add();
  Rank& liar = cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  ASSERT_TRUE(cluster.until([&] { return !honest.communicator->busy() && !liar.communicator->busy(); }));
  const auto say = [&](std::uint64_t offset, std::size_t length, std::byte fill, std::uint64_t place = 1) {
    Bytes message(sizeof(MessageHeader) + sizeof(DirectPart) + length, fill);
    const MessageHeader header{MessageHeader::direct, 0, 1, 1};
    const DirectPart part{place, offset};
    std::memcpy(message.data(), &header, sizeof header);
    std::memcpy(message.data() + sizeof header, &part, sizeof part);
    ASSERT_TRUE(mouth->send(mouth->last_sent_to, message));
  };
  std::uint64_t dropped = 0;
  const auto expect_dropped = [&](std::uint64_t offset, std::size_t length) {
    say(offset, length, std::byte{0xee});
    ++dropped;
    EXPECT_TRUE(cluster.until([&] { return honest.communicator->stats().stale_dropped == dropped; }))
        << length << " at " << offset;
  };
  for (const std::uint64_t place :
       {std::uint64_t{0}, std::uint64_t{2}, ~std::uint64_t{0}}) {  // not its own, and none at all
    say(0, 8, std::byte{0xee}, place);
    ++dropped;
    EXPECT_TRUE(cluster.until([&] { return honest.communicator->stats().stale_dropped == dropped; })) << place;
  }
  expect_dropped(0, 0);
  expect_dropped(8, 8);                           // a hole before it
  expect_dropped(~std::uint64_t{0} - 3, 8);       // the sum wraps
  expect_dropped(64 * KiB, 8);                    // behind the end
  say(0, 60 * KiB, std::byte{0});                 // the first part, which counts
  expect_dropped(0, 8);                           // the same bytes again
  expect_dropped(60 * KiB, 4 * KiB + kElement);   // over the end
  expect_dropped(60 * KiB - kElement, kElement);  // what is there already
  ASSERT_TRUE(honest.communicator->all_reduce(0, Step(1), ReduceOp::sum));
  say(60 * KiB, 4 * KiB, std::byte{0});
  ASSERT_TRUE(cluster.until([&] { return honest.done(Step(1)) == 1; }));
  EXPECT_EQ(honest.output, honest.input) << "what was added is zero";
}

// In rounds each place has one sender: of three members the first gets the third's input, then the second's sum.
TEST(DirectParts, APlaceTakesNothingButFromWhoseItIs) {
  Cluster cluster(3, {4});
  cluster.options.direct_members = 0;
  std::vector<Counting*> mouths;
  std::uint64_t transfers = 0;
  cluster.wrap = [&](std::unique_ptr<transport::Engine> engine) {
    auto made = std::make_unique<Counting>(std::move(engine), transfers);
    mouths.push_back(made.get());
    return made;
  };
  for (int i = 0; i < 3; ++i) cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  const auto all = [&](const std::function<bool(Communicator&)>& is) {
    return std::all_of(cluster.ranks.begin(), cluster.ranks.end(), [&](auto& rank) { return is(*rank->communicator); });
  };
  ASSERT_TRUE(cluster.until([&] { return all([](Communicator& one) { return !one.busy(); }); }));
  std::uint64_t sent = 0;
  const auto dropped = [&] {
    std::uint64_t sum = 0;
    for (auto& rank : cluster.ranks) sum += rank->communicator->stats().stale_dropped;
    return sum;
  };
  // The third's input (0) is for the first, a round's sum (1) for the other of these two, the result (2) for the third.
  // From anybody else, and to any other place, it is for nobody.
  for (std::size_t from = 0; from < 3; ++from)
    for (std::uint64_t place = 0; place <= 3; ++place) {
      const auto is_for = [&](std::uint32_t to) { return Doubling(3, 3, to).sender(place) == from; };
      if (is_for(0) || is_for(1) || is_for(2)) continue;
      Bytes message(sizeof(MessageHeader) + sizeof(DirectPart) + 16, std::byte{0xee});
      const MessageHeader header{MessageHeader::direct, 0, 1, 1};
      const DirectPart part{place, 0};
      std::memcpy(message.data(), &header, sizeof header);
      std::memcpy(message.data() + sizeof header, &part, sizeof part);
      ASSERT_TRUE(mouths[from]->send(mouths[from]->last_sent_to, message));
      ++sent;
      EXPECT_TRUE(cluster.until([&] { return dropped() == sent; })) << from << " to place " << place;
    }
  EXPECT_GE(sent, 7u);
  cluster.start(Step(1));
  ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
  cluster.expect_result(cluster.live());
}

}  // namespace
}  // namespace rejoin::ftar
