// A GPU's coder, through the seam: the CPU's bits.
#include "device/access.h"
#include "device/tests/library.h"
#include "ftar/coder.h"
#include "ftar/tests/passes.h"

namespace rejoin::ftar::coding {
namespace {

struct GpuCoder : testing::Test {
  static constexpr std::size_t kMost = 70000 * sizeof(float) + 4096, kPlaces = 6;
  std::shared_ptr<device::Device> gpu = device::test_gpu();
  std::unique_ptr<device::Access> access = *gpu->make_access();
  std::shared_ptr<device::Reducer> reducer = *device::Reducer::make(*gpu, {.blocks = 3, .threads = 64, .codes = true});
  std::unique_ptr<Coder> coder = make_coder(gpu, reducer);
  device::Memory memory = *gpu->allocate(kPlaces * kMost);
  std::size_t runs = 0;

  void wait() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!reducer->idle()) {
      const auto done = reducer->done();
      ASSERT_TRUE(done) << done.error().message;
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      device::pause();
    }
  }

  PassResult run(const PassData& data) {
    PassResult made = passes::room_for(data);
    Pass pass = data.pass;
    // Elements are `shift` behind a border; what is coded anywhere.
    const std::size_t shift = data.shift * size_of(pass.type), odd = ++runs % 5;
    const auto place = [&](std::size_t which, std::size_t by) { return memory.bytes.data() + which * kMost + by; };
    const auto given = [&](const std::byte*& pointer, std::size_t which, const Bytes& bytes, std::size_t by) {
      if (pointer == nullptr) return;
      pointer = place(which, by);
      EXPECT_TRUE(access->write(place(which, by), bytes));
    };
    const auto wanted = [&](std::byte*& pointer, std::size_t which, const Bytes& bytes, std::size_t by) {
      if (pointer == nullptr) return;
      pointer = place(which, by);
      EXPECT_TRUE(access->write(pointer, Bytes(bytes.size() + 64, std::byte{0xcd})));
    };
    given(pass.own, 0, data.own, shift);
    given(pass.arrived, 1, data.arrived, pass.arrived_width == Width::plain ? shift : odd);
    given(pass.feedback, 2, data.feedback, shift);
    wanted(pass.residual, 3, made.residual, shift);
    wanted(pass.coded, 4, made.coded, odd);
    wanted(pass.out, 5, made.out, shift);
    const auto loss = std::make_shared<Loss>();
    const auto number = coder->run(pass, loss);
    EXPECT_TRUE(number) << number.error().message;
    wait();
    const auto take = [&](Bytes& bytes, std::size_t which, std::size_t by) {
      if (bytes.empty()) return;
      const std::size_t size = bytes.size();
      bytes.resize(size + 64);
      EXPECT_TRUE(access->read({place(which, by), bytes.size()}, bytes.data()));
      for (std::size_t i = size; i < bytes.size(); ++i) EXPECT_EQ(bytes[i], std::byte{0xcd}) << "wrote past the end";
      bytes.resize(size);
    };
    take(made.residual, 3, shift);
    take(made.coded, 4, odd);
    take(made.out, 5, shift);
    made.loss = *loss;
    return made;
  }
};

TEST_F(GpuCoder, EveryPassHasTheCpusBits) {
  expect_the_cpus_bits({1, 15, 33, 1000, 20011}, [&](const PassData& data) { return run(data); });
}

// Many works one after the other, in several tiles each, whose losses are told apart.
TEST_F(GpuCoder, WhatIsLostIsToldOfEachWork) {
  constexpr std::size_t count = 70000;
  std::mt19937_64 random(5);
  Bytes own;
  for (std::size_t i = 0; i < count; ++i) put(own, std::normal_distribution<float>()(random));
  ASSERT_TRUE(access->write(memory.bytes.data(), own));
  std::vector<std::shared_ptr<Loss>> losses;
  std::vector<std::size_t> counts;
  for (std::size_t i = 0; i < 3 * device::kernels::Mailbox::kWorks; ++i) {
    counts.push_back(i % 3 == 0 ? count : 1000 + i);
    losses.push_back(i % 5 == 4 ? nullptr : std::make_shared<Loss>());
    ASSERT_TRUE(coder->run({.count = counts.back(),
                            .own = memory.bytes.data(),
                            .width = i % 2 == 0 ? Width::eight : Width::four,
                            .coded = memory.bytes.data() + kMost},
                           losses.back()));
    if (i % 7 == 0) wait();
  }
  wait();
  for (std::size_t i = 0; i < losses.size(); ++i) {
    if (!losses[i]) continue;
    Bytes coded(own.size());
    const Loss expected = coding::run({.count = counts[i],
                                       .own = own.data(),
                                       .width = i % 2 == 0 ? Width::eight : Width::four,
                                       .coded = coded.data()});
    ASSERT_NEAR(losses[i]->lost, expected.lost, expected.lost * 1e-3) << i;
    ASSERT_NEAR(losses[i]->of, expected.of, expected.of * 1e-3) << i;
  }
}

TEST_F(GpuCoder, DecodesAndClearsAsTheCpuDoes) {
  for (const auto type : {DataType::float32, DataType::bfloat16, DataType::float16})
    for (const auto width : {Width::eight, Width::four}) {
      constexpr std::size_t count = 4099;
      std::mt19937_64 random(6);
      const Bytes own = passes::values(type, count, random);
      Bytes coded(coded_bytes(type, own.size(), width)), decoded(own.size());
      coding::run({.type = type, .count = count, .own = own.data(), .width = width, .coded = coded.data()});
      coding::decode(type, width, decoded.data(), coded.data(), count);
      std::byte* out = memory.bytes.data() + kMost;
      ASSERT_TRUE(access->write(memory.bytes.data() + 3, coded));
      ASSERT_TRUE(coder->decode(type, width, out, memory.bytes.data() + 3, count));
      wait();
      Bytes got(own.size());
      ASSERT_TRUE(access->read({out, got.size()}, got.data()));
      EXPECT_EQ(got, decoded) << to_string(type);
      ASSERT_TRUE(coder->clear({out, got.size() - size_of(type)}));
      wait();
      ASSERT_TRUE(access->read({out, got.size()}, got.data()));
      std::fill(decoded.begin(), decoded.end() - static_cast<std::ptrdiff_t>(size_of(type)), std::byte{0});
      EXPECT_EQ(got, decoded) << to_string(type);
    }
}

}  // namespace
}  // namespace rejoin::ftar::coding
