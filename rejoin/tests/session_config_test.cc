// What a trainer may set, and name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "base/bytes.h"
#include "base/longest_time.h"
#include "rejoin/c.h"
#include "rejoin/card.h"
#include "rejoin/session.h"
#include "rejoin/training_state.h"

namespace rejoin {
namespace {

SessionConfig right() {
  SessionConfig config;
  config.socket = "@nobody";
  return config;
}

std::string refusal(const SessionConfig& config) {
  const auto checked = config.check();
  return checked ? "" : checked.error().message;
}

TEST(SessionConfig, ATimeThatWouldOverflowIsRefused) {
  EXPECT_EQ(refusal(right()), "");
  SessionConfig config = right();
  config.patience = config.between_steps = kLongestTime;
  EXPECT_EQ(refusal(config), "");
  config.patience = std::chrono::milliseconds::max();
  EXPECT_EQ(refusal(config), "--patience-ms (REJOIN_PATIENCE_MS) 9223372036854775807 is not from 0 to 1099511627776");
  config = right();
  config.between_steps = std::chrono::milliseconds(-1);
  EXPECT_EQ(refusal(config), "--between-steps-ms (REJOIN_BETWEEN_STEPS_MS) -1 is not from 0 to 1099511627776");
}

// So many of them in flight are one allocation.
TEST(SessionConfig, AChunkWhoseBuffersWouldOverflowIsRefused) {
  SessionConfig config = right();
  config.chunk_bytes = 1 * GiB;
  EXPECT_EQ(refusal(config), "");
  config.chunk_bytes = std::uint64_t{1} << 62;
  EXPECT_NE(refusal(config).find("chunks of 4611686018427387904 bytes; there must be 64 or a multiple of that, and at "
                                 "most 1073741824"),
            std::string::npos)
      << refusal(config);
}

// Neither is taken for a flag of a program's: nobody asks for its help, or its version.
TEST(SettingsInC, WhatIsNoNameWithAValueIsNamed) {
  const std::map<std::string, std::string> wrong{
      {"", "'', is none: give NAME=VALUE"},
      {"=1", "'=1', is none: give NAME=VALUE"},
      {"replica", "'replica', is none: give NAME=VALUE"},
      {"help", "'help', is none: give NAME=VALUE"},
      {"help=1", "'help=1', is none: give NAME=VALUE"},
      {"version", "'version', is none: give NAME=VALUE"},
      {"version=1", "'version=1', is none: give NAME=VALUE"},
      {"--replica=1", "'--replica=1', is named as a flag: leave out the dashes"},
      {"replica=", "'replica=', has no value: leave it out for its default"},
      {"replica=-1", "--replica: '-1' is not a whole number from 0 to 42949"},
      {"replica=4294967296", "is not a whole number from 0 to 4294967295"},
      {"replica=1e3", "'1e3' is not a whole number in decimal digits"},
      {"coding-error=0,15", "'0,15' is not a number such as 0.15"},
      {"replicas=1", "not expected: --replicas=1"}};
  for (const auto& [setting, told] : wrong) {
    const char* const settings[] = {"socket=@nobody", setting.c_str()};
    rejoin_session* session = nullptr;
    EXPECT_EQ(rejoin_open(settings, 2, &session), REJOIN_INVALID_ARGUMENT) << setting;
    EXPECT_THAT(rejoin_error(), testing::HasSubstr(told));
    EXPECT_EQ(session, nullptr);
  }
}

TEST(TrainingState, ANameThatIsNotUtf8IsRefused) {
  TrainingState state(4096);
  EXPECT_TRUE(state.add({.name = "café", .count = 1}));
  const auto added = state.add({.name = "caf\xe9", .count = 1});
  ASSERT_FALSE(added);
  EXPECT_EQ(added.error().message, "tensor 'caf?': its name is not UTF-8");
}

TEST(TrainingState, ABucketTooManyIsRefusedWhereItIsMade) {
  TrainingState state(1 << 20);
  for (std::size_t i = 0; i < ftar::kMaxBuckets; ++i)
    ASSERT_TRUE(state.bucket({*state.add({.name = std::to_string(i), .count = 1})}));
  const auto more = state.bucket({*state.add({.name = "more", .count = 1})});
  ASSERT_FALSE(more);
  EXPECT_EQ(more.error().message,
            "bucket 3500 would be one more than the 3500 that there may be: put several tensors into each");
}

// Where gradients lie, by bucket; others begin with a page of their own.
TEST(TrainingState, GradientsInTheTrainersMemoryAreAllocatedNowhereElse) {
  constexpr std::size_t page = 4096, large = 16 * page;
  std::vector<std::byte> own(large);
  const auto made = [&](const std::vector<std::uint64_t>& bytes) {
    auto state = std::make_unique<TrainingState>(1 << 20);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      const auto tensor = *state->add({.name = std::to_string(i), .count = bytes[i] / sizeof(float)});
      EXPECT_TRUE(state->bucket({tensor}, bytes[i] == large ? std::span(own) : std::span<std::byte>()));
    }
    EXPECT_TRUE(state->allocate());
    return state;
  };
  const auto some = made({100, large, page, 4});
  EXPECT_EQ(some->gradients().size(), 3 * page);
  for (const auto& [tensor, offset] : {std::pair(0, 0ul), {2, page}, {3, 2 * page}}) {
    const auto gradient = some->gradient(TensorId{static_cast<std::uint32_t>(tensor)});
    EXPECT_EQ(gradient.data(), some->gradients().data() + offset) << tensor;
    EXPECT_EQ(gradient.data(), some->buckets()[tensor].input.data()) << tensor;
  }
  EXPECT_EQ(some->gradient(TensorId{1}).data(), own.data());
  const auto none = made({large});
  EXPECT_TRUE(none->gradients().empty());
  EXPECT_EQ(none->buckets()[0].input.data(), own.data());
  EXPECT_EQ(none->reduced(TensorId{0}).size(), large);
}

// Others are told another host in the place of the one that is listened on, and nothing else than the card says.
TEST(Card, WhatItSaysOfAnAddressThatIsListenedOnForAllIsThat) {
  EXPECT_TRUE(check_card("what it likes", ""));
  EXPECT_TRUE(check_card("its secret 10.0.0.1:7004", "its secret 0.0.0.0:7004"));
  EXPECT_TRUE(check_card("[fe80::1]:7004", "[::]:7004"));
  for (const auto& none : {"nonsense", "its secret ", "its secret 10.0.0.1:7004", "0.0.0.0:7004 its secret"}) {
    const auto checked = check_card("its secret 10.0.0.1:7004", none);
    ASSERT_FALSE(checked) << none;
    EXPECT_EQ(checked.error().code, ErrorCode::invalid_argument);
    EXPECT_NE(checked.error().message.find(none), std::string::npos) << checked.error().message;
  }
  EXPECT_FALSE(check_card("another 10.0.0.1:7004", "its secret 0.0.0.0:7004"));
  EXPECT_FALSE(check_card(std::string(1025, 'c'), ""));
}

TEST(TrainingState, BucketsWhoseMemoryLiesOnEachOtherAreRefused) {
  TrainingState state(1 << 20);
  std::vector<TensorId> tensors;
  for (const auto* name : {"a", "b", "c"}) tensors.push_back(*state.add({.name = name, .count = 1000}));
  Bytes memory(12000);
  const auto own = std::span(memory);
  ASSERT_TRUE(state.bucket({tensors[0]}, own.subspan(4000, 4000)));
  for (const std::size_t at : {2000, 4000, 7999}) {
    const auto bucket = state.bucket({tensors[1]}, own.subspan(at, 4000));
    ASSERT_FALSE(bucket) << at;
    EXPECT_NE(bucket.error().message.find("bucket 1: the memory for its gradients and that of bucket 0 ('a')"),
              std::string::npos)
        << bucket.error().message;
  }
  EXPECT_TRUE(state.bucket({tensors[1]}, own.first(4000)));
  EXPECT_TRUE(state.bucket({tensors[2]}, own.last(4000)));
  EXPECT_TRUE(state.allocate());
}

TEST(C, NullIsRefusedInPlaceOfAList) {
  rejoin_session* session = nullptr;
  EXPECT_EQ(rejoin_open(nullptr, 1, &session), REJOIN_INVALID_ARGUMENT);
  EXPECT_STREQ(rejoin_error(), "the list of settings is null");
  const char* settings[] = {"socket=@nobody", "flight-dir=off"};
  ASSERT_EQ(rejoin_open(settings, 2, &session), REJOIN_OK) << rejoin_error();
  std::uint32_t number = 0;
  EXPECT_EQ(rejoin_add(session, nullptr, nullptr, &number), REJOIN_INVALID_ARGUMENT);
  EXPECT_EQ(rejoin_bucket(session, nullptr, 1, nullptr, &number), REJOIN_INVALID_ARGUMENT);
  rejoin_close(session);
}

}  // namespace
}  // namespace rejoin
