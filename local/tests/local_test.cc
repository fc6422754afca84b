#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <thread>

#include "base/bytes.h"
#include "base/sanitized.h"
#include "base/unix_socket.h"
#include "local/owner.h"
#include "local/view.h"

namespace rejoin::local {
namespace {

Manifest sample(std::uint64_t count = 3'000'000, bool elementwise = true) {
  return *Manifest::make({{.name = "w", .count = count, .columns = 3, .elementwise = elementwise},
                          {.name = "b", .count = 7, .columns = 1}});
}

std::span<std::byte> state_of(const Owner& owner) { return owner.memory_ranges().front(); }

View view_of(const Owner& owner) {
  auto view = View::of(owner);
  EXPECT_TRUE(view) << view.error().message;
  return std::move(*view);
}

TEST(Manifest, SlicesCoverEveryElementOnceAndSurviveTheWire) {
  const Manifest manifest = sample();
  std::vector<std::uint64_t> covered(2);
  for (const auto& slice : manifest.slices()) covered[slice.range.tensor] += slice.range.count;
  EXPECT_EQ(covered[0], 3'000'000u);
  EXPECT_EQ(covered[1], 7u);
  for (const auto& part : manifest.parts()) EXPECT_LE(manifest.bytes_of(part), kPartBytes);
  auto parsed = Manifest::parse(manifest.serialise());
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->hash(), manifest.hash());
}

// An optimizer's vector loops go through a slice as through the same elements of the whole.
TEST(Manifest, SlicesAndPartsBeginAndEndAtMultiplesOfSixtyFourElementsOrWithTheTensor) {
  std::mt19937_64 random(64);
  for (const auto type : kDataTypes)
    for (std::uint32_t columns = 1; columns <= kMaxColumns; ++columns)
      for (const bool elementwise : {true, false})
        for (int i = 0; i < 50; ++i) {
          const std::uint64_t count = 1 + random() % (i % 2 == 0 ? 200 : 1'000'000);
          const auto manifest = *Manifest::make(
              {{.name = "w", .type = type, .count = count, .columns = columns, .elementwise = elementwise}});
          const auto check = [&](const Part& range) {
            ASSERT_EQ(range.first % 64, 0u) << to_string(type) << " × " << columns;
            const std::uint64_t end = range.first + range.count;
            ASSERT_TRUE(end % 64 == 0 || end == count) << end << " of " << count;
          };
          for (const auto& slice : manifest.slices()) check(slice.range);
          for (const auto& part : manifest.parts()) check(part);
          ASSERT_LE(manifest.bytes_of(manifest.parts().front()), kPartBytes);
          ASSERT_TRUE(elementwise || manifest.slices().size() == 1);
        }
}

TEST(Manifest, ATensorThatIsNotElementwiseIsOneSliceOfSeveralParts) {
  const Manifest manifest = sample(3'000'000, false);
  EXPECT_EQ(manifest.slices().size(), 2u);
  EXPECT_EQ(manifest.slices()[0].parts, 35u);
  auto huge = Manifest::make({{.name = "w", .count = 100'000'000, .columns = 3, .elementwise = false}});
  ASSERT_FALSE(huge);
  EXPECT_NE(huge.error().message.find("declare it elementwise"), std::string::npos);
}

TEST(Manifest, AStateOfTheMostTensorsWithTheLongestNamesIsServedAndOneMoreIsRefused) {
  std::vector<Tensor> tensors;
  for (std::uint32_t t = 0; t < kMaxTensors; ++t) {
    std::string name = std::to_string(t);
    name.resize(200, '.');
    tensors.push_back(
        {.name = std::move(name), .count = 1 + t % 3, .columns = static_cast<std::uint32_t>(1 + t % kMaxColumns)});
  }
  auto manifest = Manifest::make(tensors);
  ASSERT_TRUE(manifest) << manifest.error().message;
  auto owner = Owner::make(std::move(*manifest));
  ASSERT_TRUE(owner) << owner.error().message;
  const View view = view_of(*owner);
  ASSERT_EQ(view.manifest().tensors().size(), kMaxTensors);
  EXPECT_EQ(view.manifest().hash(), owner->manifest().hash());
  EXPECT_EQ(view.manifest().tensors().back().name, tensors.back().name);
  tensors.push_back({.name = "one more", .count = 1});
  auto refused = Manifest::make(tensors);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message, "65537 tensors in the state; there must be 1 to 65536");
}

// Its page and its layout are as large as what is declared, and not as what could be.
TEST(Manifest, WhatATensorCostsIsAllocatedForThoseThatAreDeclared) {
  const auto owner = *Owner::make(*Manifest::make({{.name = "w", .count = 5}}));
  EXPECT_EQ(page_bytes(1), 4096u);
  EXPECT_EQ(owner.page().slices, 1u);
  EXPECT_LT(page_bytes(kMaxTensors), kMaxTensors * 9);
}

TEST(Manifest, EachColumnHasItsTypeAndSoHasTheGradient) {
  const Tensor tensor{.name = "w",
                      .type = DataType::bfloat16,
                      .count = 300'001,
                      .columns = 4,
                      .moment_types = {DataType::float32, DataType::float64, DataType::bfloat16},
                      .gradient_type = DataType::float32};
  const auto manifest = *Manifest::make({tensor});
  EXPECT_EQ(manifest.bytes(), 300'001u * (2 + 4 + 8 + 2));
  for (const auto& part : manifest.parts()) {
    EXPECT_LE(manifest.packed_offset(part, 4), kPartBytes);
    for (std::uint32_t c = 0; c < 4; ++c) EXPECT_EQ(manifest.packed_offset(part, c) % 16, 0u);
    EXPECT_EQ(manifest.length(part, 2), part.count * 8);
  }
  const auto parsed = *Manifest::parse(manifest.serialise());
  EXPECT_EQ(parsed.hash(), manifest.hash());
  EXPECT_EQ(parsed.tensors()[0].type_of(2), DataType::float64);
  EXPECT_EQ(parsed.tensors()[0].type_of_gradient(), DataType::float32);
  auto other = tensor;
  other.gradient_type.reset();
  EXPECT_NE(Manifest::make({other})->hash(), manifest.hash()) << "the gradient's type is part of what is declared";
  other = tensor;
  other.moment_types.pop_back();
  EXPECT_EQ(Manifest::make({other}).error().message, "tensor 'w' has 3 moments and types for 2");
}

TEST(Manifest, GarbageIsRefusedAtEveryLength) {
  Bytes bytes = sample().serialise();
  for (std::size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(Manifest::parse(BytesView(bytes).first(length)));
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    Bytes broken = bytes;
    broken[random() % broken.size()] = static_cast<std::byte>(random());
    (void)Manifest::parse(broken);  // an error or another manifest, never a crash
  }
}

TEST(Layout, PlacesThatCantBeAreRefusedByName) {
  const auto manifest = *Manifest::make({{.name = "w", .count = 100, .columns = 2}, {.name = "b", .count = 7}});
  const auto why = [&](std::vector<std::uint64_t> memory_ranges, std::vector<ColumnLocation> columns) {
    const auto layout = Layout::make(manifest, std::move(memory_ranges), std::move(columns));
    return layout ? std::string() : layout.error().message;
  };
  EXPECT_EQ(why({400, 1000}, {{0, 0}, {1, 0}, {1, 400}}), "");
  EXPECT_NE(why({400, 1000}, {{0, 0}, {1, 16}, {1, 400}}).find("'w' and 'b' overlap"), std::string::npos);
  EXPECT_NE(why({399, 1000}, {{0, 0}, {1, 0}, {1, 400}}).find("column 0 of tensor 'w' does not lie"),
            std::string::npos);
  EXPECT_NE(why({400}, {{0, 0}, {1, 0}, {1, 400}}).find("does not lie"), std::string::npos);
  EXPECT_NE(why({400, 1000}, {{0, 0}, {1, ~std::uint64_t{15}}, {1, 0}}).find("does not lie"), std::string::npos);
  EXPECT_NE(why({400, 1000}, {{0, 0}, {1, 0}, {1, 408}}).find("no multiple of 16"), std::string::npos);
  EXPECT_NE(why({400, 1000}, {{0, 0}, {1, 0}}), "");
  EXPECT_NE(why({400, 1000}, {{0, 0}, {1, 0}, {1, 400}, {1, 600}}), "");
}

TEST(Offer, WhatIsNotAsItSaysIsRefused) {
  auto owner = *Owner::make(sample());
  const auto offer = [&] { return std::move(*owner.offer()); };
  EXPECT_TRUE(View::make(offer()));
  EXPECT_FALSE(View::make({}));
  auto fewer = offer();
  fewer.pop_back();
  auto refused = View::make(std::move(fewer));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message, "4 descriptors came with a state that has 5");
  auto more = offer();
  more.push_back(*make_eventfd());
  EXPECT_FALSE(View::make(std::move(more)));
  for (std::size_t i = 0; i < 5; ++i) {  // all but the doorbell must be what they are
    auto other = offer();
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const Fd out(ends[1]);
    other[i] = Fd(ends[0]);
    EXPECT_EQ(View::make(std::move(other)).has_value(), i == 2) << i;
  }
  auto smaller = offer();
  smaller.back() = *make_sealed_memfd("small", 4096);
  refused = View::make(std::move(smaller));
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("can't take the trainer's state: it has 4096 bytes"), std::string::npos)
      << refused.error().message;
}

// It is the trainer's, so its daemon neither waits for it nor believes that it is one.
TEST(Offer, ADoorbellThatIsNoneIsAFailureAndHoldsNobodyUp) {
  auto owner = *Owner::make(sample());
  const auto with_doorbell = [&](Fd doorbell) {
    auto offer = *owner.offer();
    offer[2] = std::move(doorbell);
    auto view = *View::make(std::move(offer));
    view.wait_for_change();
    return view;
  };
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  Fd out(ends[1]);
  EXPECT_FALSE(with_doorbell(Fd(::dup(ends[0]))).failure()) << "nobody has rung";
  out = {};
  const auto closed = with_doorbell(Fd(ends[0]));
  ASSERT_TRUE(closed.failure());
  EXPECT_NE(closed.failure()->message.find("offers as a doorbell"), std::string::npos) << closed.failure()->message;
  EXPECT_TRUE(with_doorbell(Fd(::open("/dev/null", O_RDWR))).failure());
  EXPECT_FALSE(with_doorbell(Fd(::eventfd(1, 0))).failure());  // blocks where it is read twice
}

TEST(Offer, GarbageIsRefusedAtEveryLength) {
  const Bytes bytes = describe(*unpack(*(*Owner::make(sample(5000))).offer()));
  ASSERT_TRUE(parse_description(bytes));
  for (std::size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(parse_description(BytesView(bytes).first(length))) << length;
}

// As a framework's: columns anywhere in several allocations, with other things between.
TEST(Owner, ColumnsStayWhereTheyAre) {
  const auto device = device::make_host();
  const auto first = *device->allocate(1 * MiB), second = *device->allocate(2 * MiB);
  for (const auto& memory : {first, second}) std::memset(memory.bytes.data(), 0x77, memory.bytes.size());
  const auto manifest = *Manifest::make(
      {{.name = "w", .count = 100'000, .columns = 2}, {.name = "new", .count = 50}, {.name = "b", .count = 7}});
  const std::vector<Owner::Own> own = {
      {second.bytes.subspan(512, 400'000), first.bytes.subspan(1024, 400'000)}, {}, {first.bytes.subspan(512, 28)}};
  auto owner = *Owner::make(manifest, device, own);
  EXPECT_EQ(owner.column(0, 1).data(), own[0][1].data());
  EXPECT_EQ(owner.column(2, 0).data(), own[2][0].data());
  EXPECT_EQ(owner.column(1, 0)[0], std::byte{0});
  EXPECT_EQ(owner.memory_ranges().size(), 3u);
  auto view = view_of(owner);
  for (const auto& part : manifest.parts())
    for (std::uint32_t c = 0; c < manifest.columns(part); ++c) {
      std::memset(owner.column(part, c).data(), static_cast<int>(part.tensor * 4 + c), owner.column(part, c).size());
      EXPECT_EQ(view.column(part, c).size(), owner.column(part, c).size());
      EXPECT_EQ(view.column(part, c).back(), static_cast<std::byte>(part.tensor * 4 + c));
    }
  // The daemon's reach is from the first column of an allocation to the last one's end.
  for (const auto memory_range : view.memory_ranges()) EXPECT_LE(memory_range.size(), 1024u + 400'000u);
  // Pinned parts are copied to the shadow buffer from there, too.
  auto pinned = view.pin({0});
  const auto before = pinned_digests(view, pinned->second)[0];
  ASSERT_TRUE(owner.begin_update());
  std::memset(owner.column(0, 0).data(), 0x55, 400'000);
  EXPECT_EQ(pinned_digests(view, pinned->second)[0], before);
}

TEST(Owner, MoreDescriptorsThanTheProcessMayHaveAreAnErrorThatSaysSo) {
  const auto device = device::make_host();
  std::vector<device::Memory> memory;
  std::vector<Owner::Own> own;
  std::vector<Tensor> tensors;
  for (int i = 0; i < 200; ++i) {
    memory.push_back(*device->allocate(4096));
    own.push_back({memory.back().bytes});
    tensors.push_back({.name = std::to_string(i), .count = 1024});
  }
  const auto owner = *Owner::make(*Manifest::make(std::move(tensors)), device, own);
  EXPECT_TRUE(owner.offer());
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit lower = before;
  lower.rlim_cur = 250;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &lower), 0);
  const auto offer = owner.offer();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_FALSE(offer);
  EXPECT_NE(offer.error().message.find("200 allocations"), std::string::npos) << offer.error().message;
  EXPECT_NE(offer.error().message.find("ulimit -n"), std::string::npos);
}

TEST(Owner, MemoryThatCantBeSharedOrIsAnothersIsRefusedByName) {
  const auto device = device::make_host();
  const auto manifest = *Manifest::make({{.name = "w", .count = 100, .columns = 2}});
  const auto memory = *device->allocate(4096);
  const auto why = [&](std::vector<Owner::Own> own) {
    const auto owner = Owner::make(manifest, device, own);
    return owner ? std::string() : owner.error().message;
  };
  Bytes heap(4096);
  const auto good = memory.bytes.first(400);
  EXPECT_EQ(why({{good, memory.bytes.subspan(400, 400)}}), "");
  EXPECT_NE(why({{good, std::span(heap).subspan(16, 400)}}).find("column 1 of tensor 'w': 400 B of host memory"),
            std::string::npos)
      << why({{good, std::span(heap).subspan(16, 400)}});
  EXPECT_NE(why({{good, memory.bytes.subspan(384, 400)}}).find("overlap"), std::string::npos);
  EXPECT_NE(why({{good, memory.bytes.subspan(408, 400)}}).find("a multiple of 16"), std::string::npos);
  EXPECT_NE(why({{good, memory.bytes.subspan(512, 404)}}).find("takes 400 bytes"), std::string::npos);
  EXPECT_NE(why({{good}}).find("has 2 columns and memory for 1"), std::string::npos);
}

TEST(Pins, AnUpdateCopiesWhatIsPinned) {
  auto owner = *Owner::make(sample());
  auto view = view_of(owner);
  owner.set_version(4);
  std::memset(state_of(owner).data(), 0x11, state_of(owner).size());
  auto pinned = view.pin({0, 1});
  ASSERT_TRUE(pinned);
  EXPECT_EQ(pinned->first, 4u);
  const auto before = pinned_digests(view, pinned->second)[0];
  ASSERT_TRUE(owner.begin_update());
  std::memset(state_of(owner).data(), 0x22, state_of(owner).size());
  owner.end_update(5);
  EXPECT_EQ(view.where(pinned->second[0]), View::Where::shadow);
  EXPECT_EQ(pinned_digests(view, pinned->second)[0], before);
  const auto beside = view.shadow().subspan(2 * kPartBytes);
  EXPECT_TRUE(std::ranges::all_of(beside, [](std::byte b) { return b == std::byte{0}; })) << "no more is copied";
  for (const auto& one : pinned->second) EXPECT_FALSE(view.release(one));
  EXPECT_EQ(view.free_pins(), kMaxPins);
}

TEST(Pins, NothingIsPinnedWhileAnUpdateRuns) {
  auto owner = *Owner::make(sample());
  auto view = view_of(owner);
  ASSERT_TRUE(owner.begin_update());
  EXPECT_FALSE(view.pin({0}));
  owner.end_update(1);
  EXPECT_TRUE(view.pin({0}));
}

// The promise under real concurrency: whatever is read while pinned is one version, complete, although updates go on.
// In turns: the trainer waits for the reader, the reader for the trainer's next update, and both race.
TEST(Pins, WhatIsHeldIsOneVersionHoweverFastTheTrainerUpdates) {
  constexpr int turns = kSanitized ? 30 : 600;
  auto owner = *Owner::make(*Manifest::make({{.name = "w", .count = 20000, .columns = 3}}));
  auto view = view_of(owner);
  std::atomic<bool> stop{false}, wait_for_reader{false};
  std::thread trainer([&] {
    auto* words = reinterpret_cast<std::atomic<std::uint32_t>*>(state_of(owner).data());
    for (std::uint32_t version = 1; !stop; ++version) {
      ASSERT_TRUE(owner.begin_update());
      for (std::size_t i = 0; i < state_of(owner).size() / 4; ++i) words[i].store(version, std::memory_order_relaxed);
      owner.end_update(version);
      for (int pause = 0; pause < 50 || (wait_for_reader && !stop); ++pause) std::this_thread::yield();
    }
  });
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  int from_state = 0, from_shadow = 0;
  for (int turn = 0; turn < turns && std::chrono::steady_clock::now() < deadline; ++turn) {
    wait_for_reader = turn % 3 == 0;
    auto pinned = view.pin({0});
    for (; !pinned && std::chrono::steady_clock::now() < deadline; pinned = view.pin({0})) std::this_thread::yield();
    if (!pinned) break;
    const auto version = static_cast<std::uint32_t>(pinned->first);
    const auto& one = pinned->second[0];
    std::vector<std::uint32_t> copy(60000);
    const auto* live = reinterpret_cast<std::atomic<std::uint32_t>*>(view.memory_ranges()[0].data());
    for (std::size_t i = 0; i < 20000; ++i) copy[i] = live[i].load(std::memory_order_relaxed);
    while (turn % 3 == 1 && view.where(one) == View::Where::state && std::chrono::steady_clock::now() < deadline)
      std::this_thread::yield();
    if (view.where(one) == View::Where::state) {
      for (std::size_t i = 0; i < 20000; ++i) ASSERT_EQ(copy[i], version);
      ++from_state;
    } else {
      while (view.where(one) == View::Where::copying) std::this_thread::yield();
      std::memcpy(copy.data(), view.shadow().data() + view.shadow_offset(one), copy.size() * 4);
      for (auto word : copy) ASSERT_EQ(word, version);
      ++from_shadow;
    }
    view.release(one);
  }
  stop = true;
  trainer.join();
  EXPECT_GE(from_state, turns / 3 - 1);
  EXPECT_GE(from_shadow, turns / 3 - 1);
}

// As of a daemon that puts out a trainer which has just begun to run again, and writes at this moment.
TEST(UnixSocket, WhatAPeerSentIsReadThoughItClosedWithoutReadingWhatItWasSent) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  Fd own(ends[0]), peer(ends[1]);
  const std::string_view unread = "unread", reason = "reason";
  ASSERT_TRUE(send_with_fds(own, as_bytes(unread), {}));
  ASSERT_TRUE(send_with_fds(peer, as_bytes(reason), {}));
  peer.reset();
  auto received = receive_with_fds(own, 64);
  ASSERT_TRUE(received) << received.error().message;
  ASSERT_TRUE(*received);
  EXPECT_TRUE(std::ranges::equal((*received)->bytes, as_bytes(reason)));
  auto end = receive_with_fds(own, 64);
  ASSERT_FALSE(end);
  EXPECT_EQ(end.error().code, ErrorCode::unavailable);
}

}  // namespace
}  // namespace rejoin::local
