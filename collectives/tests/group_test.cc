// Every collective operation, and messages between two, on members over the simulated fabric.
#include <gmock/gmock.h>

#include <algorithm>
#include <limits>

#include "collectives/combine.h"
#include "collectives/tests/members.h"

namespace rejoin::collectives {
namespace {

using testing::HasSubstr;

constexpr std::size_t kSizes[] = {0, 1, 5, 1'000, 8'192, 30'000, 400'003};  // elements

struct Groups : testing::TestWithParam<std::uint32_t> {
  const std::uint32_t n = GetParam();
  Members members{n, n};
  void SetUp() override { members.everyone(); }
  void all(const std::function<Call(std::uint32_t)>& call) {
    std::vector<Members::Work> works;
    for (std::uint32_t m = 0; m < n; ++m) works.push_back(members.submit(m, call(m)));
    members.expect_success(works);
  }
};
INSTANTIATE_TEST_SUITE_P(Of, Groups, testing::Values(1, 2, 3, 5, 9), testing::PrintToStringParamName());

TEST_P(Groups, AllReduceTheSameBitsOnAll) {
  for (const auto combine : {Combine::sum, Combine::mean, Combine::maximum})
    for (const auto count : kSizes) {
      SCOPED_TRACE(testing::Message() << count << " " << to_string(combine));
      std::vector<Floats> buffers;
      for (std::uint32_t m = 0; m < n; ++m) buffers.push_back(numbers(m, count));
      all([&](auto m) {
        return Call{.kind = Collective::all_reduce, .combine = combine, .inputs = {bytes_in(buffers[m])}};
      });
      Floats expected = numbers(0, count);
      for (std::uint32_t m = 1; m < n; ++m) {
        const auto more = numbers(m, count);
        for (std::size_t i = 0; i < count; ++i)
          expected[i] = combine == Combine::maximum ? std::max(expected[i], more[i]) : expected[i] + more[i];
      }
      for (std::size_t i = 0; i < count && combine == Combine::mean; ++i) expected[i] /= static_cast<float>(n);
      ASSERT_EQ(buffers[0], expected) << "whole numbers have no rounding";
      for (std::uint32_t m = 1; m < n; ++m) ASSERT_EQ(buffers[m], buffers[0]) << m;
    }
}

TEST_P(Groups, BroadcastGatherScatter) {
  for (const auto count : kSizes)
    for (std::uint32_t root = 0; root < n; root += 2) {
      SCOPED_TRACE(testing::Message() << count << " from " << root);
      std::vector<Floats> buffers;
      for (std::uint32_t m = 0; m < n; ++m) buffers.push_back(numbers(m, count));
      all([&](auto m) { return Call{.kind = Collective::broadcast, .root = root, .inputs = {bytes_in(buffers[m])}}; });
      for (std::uint32_t m = 0; m < n; ++m) ASSERT_EQ(buffers[m], numbers(root, count));

      std::vector<Floats> gathered(n, Floats(count)), inputs;
      for (std::uint32_t m = 0; m < n; ++m) inputs.push_back(numbers(m, count, 3));
      all([&](auto m) {
        Call call{.kind = Collective::gather, .root = root, .inputs = {bytes_in(inputs[m])}};
        if (m == root)
          for (auto& one : gathered) call.outputs.push_back(bytes_in(one));
        return call;
      });
      ASSERT_EQ(gathered, inputs);

      std::vector<Floats> scattered(n, Floats(count));
      all([&](auto m) {
        Call call{.kind = Collective::scatter, .root = root, .outputs = {bytes_in(scattered[m])}};
        if (m == root)
          for (auto& one : inputs) call.inputs.push_back(bytes_in(one));
        return call;
      });
      ASSERT_EQ(scattered, inputs);
    }
}

TEST_P(Groups, AllGatherReduceScatterAllToAllBarrier) {
  for (const auto count : kSizes) {
    SCOPED_TRACE(count);
    std::vector<Floats> inputs;
    std::vector<std::vector<Floats>> outputs(n, std::vector<Floats>(n, Floats(count)));
    for (std::uint32_t m = 0; m < n; ++m) inputs.push_back(numbers(m, count));
    all([&](auto m) {
      Call call{.kind = Collective::all_gather, .inputs = {bytes_in(inputs[m])}};
      for (auto& one : outputs[m]) call.outputs.push_back(bytes_in(one));
      return call;
    });
    for (const auto& gathered : outputs) ASSERT_EQ(gathered, inputs);

    std::vector<Floats> reduced(n, Floats(count));
    all([&](auto m) {
      Call call{.kind = Collective::reduce_scatter, .outputs = {bytes_in(reduced[m])}};
      for (auto& one : outputs[m]) call.inputs.push_back(bytes_in(one));
      return call;
    });
    for (std::uint32_t m = 0; m < n; ++m) {
      ASSERT_EQ(outputs[m], inputs) << "inputs are only read";
      for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(reduced[m][i], inputs[m][i] * static_cast<float>(n));
    }

    std::vector<std::vector<Floats>> sent(n), got(n);
    for (std::uint32_t m = 0; m < n; ++m)
      for (std::uint32_t other = 0; other < n; ++other) {
        sent[m].push_back(numbers(m, count + other, other));
        got[m].emplace_back(count + m);
      }
    all([&](auto m) {
      Call call{.kind = Collective::all_to_all};
      for (auto& one : sent[m]) call.inputs.push_back(bytes_in(one));
      for (auto& one : got[m]) call.outputs.push_back(bytes_in(one));
      return call;
    });
    for (std::uint32_t m = 0; m < n; ++m)
      for (std::uint32_t other = 0; other < n; ++other) ASSERT_EQ(got[m][other], sent[other][m]);
    all([](auto) { return Call{.kind = Collective::barrier}; });
  }
}

TEST_P(Groups, ManyAtOnceEndInTheirOrderWhateverTheirSizes) {
  std::vector<std::vector<Floats>> buffers(n);
  std::vector<Members::Work> works;
  for (std::uint32_t m = 0; m < n; ++m) {
    for (std::uint32_t k = 0; k < 30; ++k) buffers[m].push_back(numbers(m, (k * 7919) % 50'000, k));
    for (auto& buffer : buffers[m])
      works.push_back(members.submit(m, {.kind = Collective::all_reduce, .inputs = {bytes_in(buffer)}}));
  }
  members.expect_success(works);
  for (std::uint32_t m = 1; m < n; ++m) ASSERT_EQ(buffers[m], buffers[0]);
  for (std::uint32_t k = 0; k < 30; ++k) {
    Floats sums(buffers[0][k].size());
    for (std::uint32_t m = 0; m < n; ++m) {
      const auto more = numbers(m, sums.size(), k);
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += more[i];
    }
    ASSERT_EQ(buffers[0][k], sums);
  }
}

TEST(Group, MessagesBetweenTwoWaitForNothingElse) {
  Members members(3, 4);
  members.everyone();
  std::vector<Floats> sent, got;
  for (std::uint32_t k = 0; k < 12; ++k) {
    sent.push_back(numbers(k, k % 3 == 0 ? 10 : 5'000));
    got.emplace_back(sent.back().size());
  }
  // Receives before the sends of the same rank, tags in another order, and a barrier that waits for rank 2.
  std::vector<Members::Work> works, barrier;
  for (std::uint32_t m : {0u, 1u}) barrier.push_back(members.submit(m, {.kind = Collective::barrier}));
  for (std::uint32_t k = 0; k < 6; ++k)
    for (std::uint32_t m : {0u, 1u})
      works.push_back(members.submit(
          m, {.kind = Collective::receive, .root = 1 - m, .tag = k / 3, .inputs = {bytes_in(got[6 * m + k])}}));
  for (const std::uint32_t k : {3u, 4u, 5u, 0u, 1u, 2u})
    for (std::uint32_t m : {0u, 1u})
      works.push_back(members.submit(
          m, {.kind = Collective::send, .root = 1 - m, .tag = k / 3, .inputs = {bytes_in(sent[6 * (1 - m) + k])}}));
  members.expect_success(works);
  EXPECT_EQ(got, sent);
  EXPECT_FALSE(barrier[0]->result);
  barrier.push_back(members.submit(2, {.kind = Collective::barrier}));
  members.expect_success(barrier);
}

TEST(Group, WhatCanNotBeIsRefusedByName) {
  Members members(2);
  members.everyone();
  Floats four(4), five(5);
  const auto refused = [&](const Call& call) {
    const auto prepared = prepare(call, 0, 2);
    return prepared ? std::string("accepted") : prepared.error().message;
  };
  EXPECT_THAT(refused({.kind = Collective::broadcast, .root = 2, .inputs = {bytes_in(four)}}), HasSubstr("rank 2"));
  EXPECT_THAT(refused({.kind = Collective::send, .root = 0, .inputs = {bytes_in(four)}}),
              HasSubstr("this one is rank 0"));
  EXPECT_THAT(refused({.kind = Collective::all_gather, .inputs = {bytes_in(four)}, .outputs = {bytes_in(four)}}),
              HasSubstr("takes 2 output buffers here, and 1"));
  EXPECT_THAT(refused({.kind = Collective::reduce_scatter,
                       .inputs = {bytes_in(four), bytes_in(five)},
                       .outputs = {bytes_in(four)}}),
              HasSubstr("buffer 1 has 20 bytes, not 16"));
  EXPECT_THAT(refused({.kind = Collective::all_reduce, .type = DataType::float64, .inputs = {bytes_in(five)}}),
              HasSubstr("no whole number of float64"));
  EXPECT_THAT(refused({.kind = Collective::all_reduce, .combine = Combine::bitwise_or, .inputs = {bytes_in(four)}}),
              HasSubstr("a bitwise or is one of integers' bits, and float32 is no type of integers"));
}

TEST(Group, CombinesElementsOfAllTypes) {
  const auto one = [](Combine how, DataType type, auto a, auto b) {
    decltype(a) out{};
    combine(how, type, reinterpret_cast<std::byte*>(&out), reinterpret_cast<std::byte*>(&a),
            reinterpret_cast<std::byte*>(&b), 1, true, 2);
    return out;
  };
  EXPECT_EQ(one(Combine::mean, DataType::float32, 1.0f, 4.0f), 2.5f);
  EXPECT_EQ(one(Combine::mean, DataType::float16, std::uint16_t{0x7bff}, std::uint16_t{0x7bff}), 0x7c00) << "a sum";
  EXPECT_EQ(one(Combine::maximum, DataType::float64, -1.0, -4.0), -1.0);
  EXPECT_EQ(one(Combine::minimum, DataType::int32, -1, -4), -4);
  EXPECT_EQ(one(Combine::product, DataType::int64, std::int64_t{1} << 62, std::int64_t{6}), std::int64_t(1) << 63);
  EXPECT_EQ(one(Combine::product, DataType::bfloat16, std::uint16_t{0x4000}, std::uint16_t{0x4040}), 0x40c0);  // 2 × 3
  EXPECT_EQ(one(Combine::minimum, DataType::float16, std::uint16_t{0x3c00}, std::uint16_t{0x4000}), 0x3c00);   // 1, 2
  EXPECT_EQ(one(Combine::bitwise_and, DataType::int32, 0b1100, -6), 0b1000);
  EXPECT_EQ(one(Combine::bitwise_or, DataType::int64, std::int64_t{1} << 40, std::int64_t{5}), (1ll << 40) + 5);
  EXPECT_EQ(one(Combine::bitwise_xor, DataType::int32, -1, 7), -8);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto how : {Combine::maximum, Combine::minimum}) {
    EXPECT_TRUE(std::isnan(one(how, DataType::float32, nan, 1.0f)));
    EXPECT_TRUE(std::isnan(one(how, DataType::float32, 1.0f, nan)));
  }
}

TEST(Group, MemoryAtTheAddressZeroIsRefused) {
  Members members(2);
  members.everyone();
  Floats some(10);
  const std::span<std::byte> nowhere(static_cast<std::byte*>(nullptr), 40);
  for (const Call& call :
       {Call{.kind = Collective::all_reduce, .inputs = {nowhere}},
        Call{.kind = Collective::all_gather, .inputs = {bytes_in(some)}, .outputs = {nowhere, nowhere}}}) {
    const auto work = members.submit(0, call);
    ASSERT_TRUE(work->result);
    ASSERT_FALSE(*work->result);
    EXPECT_EQ(work->result->error().code, ErrorCode::invalid_argument);
    EXPECT_THAT(work->result->error().message, HasSubstr("has 40 bytes at the address 0: give it memory"));
  }
}

}  // namespace
}  // namespace rejoin::collectives
