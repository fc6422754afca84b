// Two trainers whose gradients travel coded, and who clip: what coding has lost of a step counts as they say.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "tests/trainer_support.h"

namespace rejoin::test {
namespace {

struct Clipping : Trained {
  static constexpr std::uint64_t kCount = 40'000;  // more than skips the ring
  static constexpr float kSpike = 1e15f;

  std::unique_ptr<Session> coding(std::uint32_t replica) {
    SessionConfig with = config(replica);
    with.coding = "4";
    auto session = declared(with, kCount);
    EXPECT_TRUE(session->join());
    return session;
  }
  // A step in which the gradient of w is 1, and of one of its elements so much.
  static Result<> step(Session& session, float element) {
    auto begun = session.begin_step();
    if (!begun) return tl::unexpected(begun.error());
    const auto gradient = Session::as<float>(session.gradient({0}).value());
    std::ranges::fill(gradient, 1.0f);
    gradient[7] = element;
    for (BucketId bucket : {0, 1})
      if (auto reduced = session.all_reduce(bucket); !reduced) return reduced;
    return commit(session);
  }
  using Call = std::function<void(Session&)>;
  // By how much a result of the step after a spike differs from 1, where the trainers call these: after the spike's
  // step, when they have begun the next, and when its first bucket is under way.
  double off(const Call& between, const Call& begun_next = {}, const Call& late = {}) {
    start(2);
    std::unique_ptr<Session> sessions[] = {coding(0), coding(1)};
    const auto run = [&](Session& session) -> Result<> {
      if (auto stepped = step(session, kSpike); !stepped) return stepped;
      if (between) between(session);
      auto begun = session.begin_step();
      if (!begun) return tl::unexpected(begun.error());
      if (begun_next) begun_next(session);
      std::ranges::fill(Session::as<float>(session.gradient({0}).value()), 1.0f);
      if (auto reduced = session.all_reduce(1); !reduced) return reduced;
      if (late) late(session);
      if (auto reduced = session.all_reduce(0); !reduced) return reduced;
      return commit(session);
    };
    auto other = std::async(std::launch::async, [&] { return run(*sessions[1]); });
    const auto own = run(*sessions[0]), theirs = other.get();
    EXPECT_TRUE(own && theirs) << (own ? theirs : own).error().message;
    EXPECT_EQ(sessions[0]->state_digest().value(), sessions[1]->state_digest().value());
    double most = 0;
    const auto reduced = sessions[0]->reduced({0}).value();
    for (std::size_t i = 0; i < kCount; ++i) {
      float value = 0;
      std::memcpy(&value, reduced.data() + i * sizeof value, sizeof value);
      most = std::max(most, std::abs(static_cast<double>(value) - 1));
    }
    return most;
  }
};

constexpr double kOfItsOwn = 0.2;  // what 4 bits lose of ones, at two members

TEST_F(Clipping, ASpikeThatIsSkippedIsNotInTheNextStep) {
  EXPECT_LT(off([](Session& session) { EXPECT_TRUE(session.scale_feedback(1, 0)); }), kOfItsOwn);
}

TEST_F(Clipping, ASpikeThatIsClippedIsNotInTheNextStep) {
  EXPECT_LT(off([](Session& session) { EXPECT_TRUE(session.scale_feedback(1, 1 / kSpike)); }), kOfItsOwn);
}

TEST_F(Clipping, WhatIsToldOfAnotherStepOrTooLateChangesNothing) {
  EXPECT_GT(off(
                [](Session& session) {
                  EXPECT_TRUE(session.scale_feedback(0, 0));
                  EXPECT_TRUE(session.scale_feedback(2, 0));
                },
                {}, [](Session& session) { EXPECT_TRUE(session.scale_feedback(1, 0)); }),
            kSpike / 1000);
}

TEST_F(Clipping, WhatIsToldWithinTheNextStepHoldsBeforeItsFirstBucket) {
  EXPECT_LT(off({},
                [](Session& session) {
                  EXPECT_TRUE(session.scale_feedback(1, 1));
                  EXPECT_TRUE(session.scale_feedback(1, 0));  // the last one holds
                  EXPECT_TRUE(session.scale_feedback(3, 1));
                }),
            kOfItsOwn);
}

// Statistics, say, of which 4 bits would make zeros beside one that is large.
TEST_F(Clipping, WhatIsToBeKeptExactIsNotCoded) {
  start(2);
  const auto keep = [](Session& session, BucketId bucket) {
    EXPECT_REFUSED(session.keep_exact(bucket + 1), ErrorCode::not_found, "there is no bucket 1");
    EXPECT_TRUE(session.keep_exact(bucket));
    EXPECT_TRUE(session.allocate());
    EXPECT_REFUSED(session.keep_exact(bucket), ErrorCode::invalid_argument, "keep_exact() comes after allocate()");
  };
  const auto values = [&](std::uint32_t replica) -> Result<std::vector<float>> {
    SessionConfig with = config(replica);
    with.coding = "4";
    auto opened = Session::open(with);
    if (!opened) return tl::unexpected(opened.error());
    Session& session = **opened;
    const TensorId tensor = session.add({.name = "w", .count = kCount}).value();
    const BucketId bucket = session.bucket({tensor}).value();
    keep(session, bucket);
    EXPECT_TRUE(session.join());
    if (auto begun = session.begin_step(); !begun) return tl::unexpected(begun.error());
    const auto gradient = Session::as<float>(session.gradient(tensor).value());
    std::ranges::fill(gradient, 1e-3f);
    gradient[7] = kSpike;
    if (auto reduced = session.all_reduce(bucket); !reduced) return tl::unexpected(reduced.error());
    if (auto committed = commit(session); !committed) return tl::unexpected(committed.error());
    std::vector<float> all(kCount);
    std::memcpy(all.data(), session.reduced(tensor).value().data(), kCount * sizeof(float));
    return all;
  };
  auto other = std::async(std::launch::async, values, 1);
  const auto own = values(0), theirs = other.get();
  ASSERT_TRUE(own && theirs) << (own ? theirs : own).error().message;
  std::vector<float> exact(kCount, 1e-3f);
  exact[7] = kSpike;
  EXPECT_TRUE(*own == exact && *theirs == exact);
}

TEST_F(Clipping, AFactorThatIsNoneIsRefused) {
  start(1);
  auto session = declared(config(0));
  EXPECT_REFUSED(session->scale_feedback(1, 1), ErrorCode::invalid_argument, "scale_feedback() before join()");
  ASSERT_TRUE(session->join());
  ASSERT_TRUE(step_once(*session));
  for (const auto& [factor, text] : {std::pair(-0.5f, "-0.5"), std::pair(INFINITY, "inf"), std::pair(NAN, "nan")})
    EXPECT_REFUSED(session->scale_feedback(1, factor), ErrorCode::invalid_argument, "scale_feedback() of step 1 with",
                   text);
  EXPECT_TRUE(session->scale_feedback(1, 0.5f)) << "where nothing is coded, too";
  ASSERT_TRUE(*session->begin_step());
  ASSERT_TRUE(session->all_reduce(0) && session->all_reduce(1));
  ASSERT_TRUE(session->commit([&](const Update&) {
    EXPECT_REFUSED(session->scale_feedback(2, 1), ErrorCode::invalid_argument, "inside of an optimizer");
  }));
}

}  // namespace
}  // namespace rejoin::test
