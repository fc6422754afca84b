// kernels.cu itself, with all threads of its blocks, run by the CPU: what a GPU adds to the bodies that fake_cuda.cc
// runs.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "base/digest.h"
#include "device/tests/cuda_language/cuda_language.h"
#include "device/tests/elements.h"
// … which the kernels are written in.
#include "device/kernels/kernels.cu"

namespace rejoin::device::kernels {
namespace {

std::uint64_t address(const void* of) { return reinterpret_cast<std::uint64_t>(of); }

// Two rows of small numbers, and where their sum comes; each begins `shift` elements behind a multiple of 16 bytes.
struct Rows {
  struct alignas(16) Sixteen {
    std::byte bytes[16];
  };
  DataType type;
  std::size_t count, shift, size = size_of(type);
  std::vector<Sixteen> a{room()}, b{room()}, out{room()};

  Rows(DataType t, std::size_t c, std::size_t s, std::mt19937& random) : type(t), count(c), shift(s) {
    for (std::size_t i = 0; i < count; ++i)
      arithmetic::dispatch(type, [&](auto element) {
        using E = decltype(element);
        for (auto* row : {&a, &b}) {
          const auto stored = E::store(static_cast<typename E::Value>(static_cast<int>(random() % 200) - 100));
          std::memcpy(at(*row) + i * size, &stored, sizeof stored);
        }
      });
    std::memset(out.data(), 0xa5, out.size() * 16);
  }
  std::size_t room() const { return ((count + shift) * size + 16) / 16 + 1; }
  std::byte* at(std::vector<Sixteen>& row) const { return reinterpret_cast<std::byte*>(row.data()) + shift * size; }
  // Its first tile follows `tiles`, which grows by its own.
  Work work(std::uint32_t divisor, std::uint64_t& tiles) {
    constexpr std::uint32_t tile = 1024;
    Work work{.out = address(at(out)),
              .a = address(at(a)),
              .b = address(at(b)),
              .count = count,
              .first = tiles,
              .tiles = static_cast<std::uint32_t>((count * size + tile - 1) / tile),
              .tile = tile,
              .type = static_cast<std::uint32_t>(type),
              .divisor = divisor};
    tiles += work.tiles;
    return work;
  }
  void check(std::uint32_t divisor) {
    const auto* bytes = reinterpret_cast<const std::byte*>(out.data());
    for (std::size_t i = 0; i < out.size() * 16; ++i)
      if (i < shift * size || i >= (shift + count) * size) ASSERT_EQ(bytes[i], std::byte{0xa5}) << i;
    const bool whole = type == DataType::int32 || type == DataType::int64;
    for (std::size_t i = 0; i < count; ++i) {
      const auto value = [&](std::vector<Sixteen>& row) { return value_of(type, at(row) + i * size); };
      const double exact = (value(a) + value(b)) / divisor;
      if (whole) ASSERT_EQ(value(out), std::trunc(exact)) << to_string(type) << " " << i;
      else ASSERT_NEAR(value(out), exact, 0.5) << to_string(type) << " " << i;
    }
  }
};

constexpr unsigned kWatch = 32;  // threads of the first block that do not work

TEST(Language, EveryLaneAddsItsShareAndTheLastWarpOfAWorkTells) {
  std::mt19937 random(5);
  std::vector<std::pair<Rows, std::uint32_t>> all;
  for (const auto type : kDataTypes)
    for (const auto& [count, shift] : {std::pair{1, 0}, {700, 1}, {2600, 0}})
      all.emplace_back(Rows(type, count, shift, random), all.size() % 2 == 0 ? 1 : 3);
  ASSERT_LT(all.size(), Mailbox::kWorks);
  auto box = std::make_unique<Mailbox>();
  auto relay = std::make_unique<Relay>();
  std::uint64_t tiles = 0;
  for (std::size_t i = 0; i < all.size(); ++i) box->works[i + 1] = all[i].first.work(all[i].second, tiles);
  box->posted = all.size();
  box->leave = 7;
  cuda_language::launch(rejoin_reduce, 2, 64 + kWatch,
                        ReduceArguments{.mailbox = box.get(), .relay = relay.get(), .launch = 7, .patience_ns = 0});
  for (std::size_t i = 1; i <= all.size(); ++i) EXPECT_EQ(box->done[i], i);
  EXPECT_EQ(box->left, 7u);
  EXPECT_EQ(relay->claimed, tiles);
  for (auto& [rows, divisor] : all) rows.check(divisor);
}

TEST(Language, ACopyIsRightAtAnyDistance) {
  std::vector<std::byte> from(5000), to(5000);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 37 >> 3);
  for (const auto& [out, in] : {std::pair{0u, 0u}, {3, 3}, {4, 8}, {1, 2}}) {
    std::fill(to.begin(), to.end(), std::byte{0xa5});
    auto box = std::make_unique<Mailbox>();
    auto relay = std::make_unique<Relay>();
    box->works[1] = {.out = address(to.data() + out),
                     .a = address(from.data() + in),
                     .count = 4321,
                     .tiles = 5,
                     .tile = 1024,
                     .type = Work::kCopy};
    box->posted = box->leave = 1;
    cuda_language::launch(rejoin_reduce, 1, 32 + kWatch,
                          ReduceArguments{.mailbox = box.get(), .relay = relay.get(), .launch = 1, .patience_ns = 0});
    EXPECT_EQ(box->done[1], 1u);
    for (std::size_t i = 0; i < to.size(); ++i)
      ASSERT_EQ(to[i], i < out || i >= out + 4321 ? std::byte{0xa5} : from[in + i - out])
          << out << " " << in << " " << i;
  }
}

// The CPU posts while the kernel runs, never more than the mailbox holds; then nothing comes, and it leaves.
TEST(Language, WorkComesWhileItRunsAndItsPatienceEnds) {
  std::mt19937 random(6);
  auto box = std::make_unique<Mailbox>();
  auto relay = std::make_unique<Relay>();
  constexpr std::uint64_t works = 150;
  std::vector<Rows> all;
  for (std::uint64_t i = 0; i < works; ++i) all.emplace_back(DataType::int32, 100 + i, i % 3, random);
  const auto done = [&](std::uint64_t n) {
    return std::atomic_ref(box->done[n % Mailbox::kWorks]).load(std::memory_order_acquire) == n;
  };
  std::jthread cpu([&] {
    std::uint64_t tiles = 0;
    for (std::uint64_t n = 1; n <= works; ++n) {
      constexpr std::uint64_t ahead = Mailbox::kWorks / 16;
      while (n > ahead && !done(n - ahead)) std::this_thread::yield();
      box->works[n % Mailbox::kWorks] = all[n - 1].work(1, tiles);
      std::atomic_ref(box->posted).store(n, std::memory_order_release);
    }
  });
  // A launch may lose its patience while the CPU is not scheduled: the next one goes on.
  std::uint64_t launch = 0;
  while (!done(works)) {
    ++launch;
    cuda_language::launch(
        rejoin_reduce, 1, 64 + kWatch,
        ReduceArguments{.mailbox = box.get(), .relay = relay.get(), .launch = launch, .patience_ns = 20'000'000});
    EXPECT_EQ(box->left, launch);
  }
  for (auto& rows : all) rows.check(1);
}

TEST(Language, AWarpDigestsABlockAsTheCpuDoes) {
  std::mt19937 random(7);
  std::vector<std::uint64_t> words(6000);
  for (auto& word : words) word = std::uint64_t{random()} << 32 | random();
  const auto bytes = std::as_bytes(std::span(words));
  DigestArguments arguments;
  for (const auto& [offset, size] : {std::pair{0, 4096}, {16, 4095}, {32, 20001}, {48, 15}, {160, 40000}}) {
    auto& range = arguments.ranges[arguments.count++];
    range = {address(bytes.data()) + static_cast<unsigned>(offset), static_cast<unsigned>(size), arguments.items};
    arguments.items += range.items();
  }
  xxh3::Keys keys[xxh3::kLanes];
  for (unsigned lane = 0; lane < xxh3::kLanes; ++lane) keys[lane] = xxh3::keys_of(lane);
  std::vector<std::uint64_t> hashes(arguments.items);
  std::vector<Rows::Sixteen> tails(arguments.count * xxh3::kBytes / 16);
  arguments.keys = address(keys);
  arguments.hashes = address(hashes.data());
  arguments.tails = address(tails.data());
  cuda_language::launch(rejoin_digest, 3, 64, arguments);
  for (std::size_t i = 0; i < arguments.count; ++i) {
    const auto& range = arguments.ranges[i];
    const auto of_it = std::span(hashes).subspan(range.first, range.items());
    const BytesView tail = std::as_bytes(std::span(tails)).subspan(i * xxh3::kBytes, range.size % xxh3::kBytes);
    if (!tail.empty()) of_it.back() = digest_of_block(tail);
    EXPECT_EQ(digest_of_hashes(range.size, of_it), digest({reinterpret_cast<const std::byte*>(range.data), range.size}))
        << i;
  }
}

}  // namespace
}  // namespace rejoin::device::kernels
