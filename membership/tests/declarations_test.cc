#include "membership/declarations.h"

#include <gtest/gtest.h>

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;

constexpr Duration kSilence = 1s;
constexpr TimePoint kStart{10s};

proto::RankUp declaring(std::uint32_t replica, std::uint64_t plan_hash, const std::string& settings = "ring") {
  proto::RankUp up;
  up.set_replica(replica);
  up.set_instance(100 + replica);
  up.set_plan_hash(plan_hash);
  up.set_settings(settings);
  return up;
}

// Four replicas of one rank, and what they have declared.
struct Declared {
  Declarations declarations{4, 1, kSilence};
  Replicas replicas;

  void registers(std::uint32_t number, std::uint64_t plan_hash) {
    ReplicaState& replica = replicas[ReplicaId(number)];
    replica.incarnation = Incarnation(number + 1);
    replica.ranks = {{.node = NodeId(number), .instance = std::uint64_t{100} + number}};
    replica.ranks[0].connected_node = true;
    declarations.registers(replica, declaring(number, plan_hash));
  }
  Mismatch mismatch(std::uint32_t number, std::uint64_t plan_hash, const std::string& settings = "ring") {
    const auto up = declaring(number, plan_hash, settings);
    return {.node = NodeId(number), .up = up, .declaration = &declarations.of(up), .since = kStart};
  }
};

using Fate = Declarations::Fate;

TEST(Declarations, WhatMoreThanHalfOfTheReplicasDeclareBinds) {
  Declared all;
  all.registers(0, 5), all.registers(1, 6), all.registers(2, 5);
  EXPECT_EQ(all.declarations.binding(all.replicas, false), nullptr);
  EXPECT_TRUE(all.declarations.dissent());
  all.registers(3, 5);
  const auto binding = all.declarations.binding(all.replicas, false);
  ASSERT_TRUE(binding);
  EXPECT_EQ(binding->of(0).plan_hash, 5u);
}

TEST(Declarations, WhatTheMembersHaveDeclaredBindsWhateverMostDeclare) {
  Declared all;
  for (std::uint32_t number = 0; number < 4; ++number) all.registers(number, 5);
  all.declarations.set_first({ReplicaId(0), {{6, "ring"}}});
  EXPECT_EQ(all.declarations.binding(all.replicas, true)->of(0).plan_hash, 6u);
  EXPECT_EQ(all.declarations.binding(all.replicas, false)->of(0).plan_hash, 5u);
}

TEST(Declarations, SettingsThatALogDoesNotHaveFitAny) {
  Declared all;
  const Declaration& its = all.declarations.of(declaring(0, 5, "ring"));
  EXPECT_TRUE(Declarations::fits(its, {5, ""}));
  EXPECT_FALSE(Declarations::fits(its, {5, "tree"}));
  EXPECT_FALSE(Declarations::fits(its, {6, "ring"}));
}

TEST(Declarations, OneOfThoseWhoHaveDeclaredItIsAskedAndAgainOnlyAfterAWhile) {
  Declared all;
  all.registers(2, 5), all.registers(3, 5);
  Declaration& its = *all.replicas.at(ReplicaId(2)).ranks[0].declaration;
  const auto question = all.declarations.question(its, all.replicas, kStart);
  ASSERT_TRUE(question);
  EXPECT_EQ(question->replica, 2u);
  EXPECT_EQ(question->instance, 102u);
  EXPECT_FALSE(all.declarations.question(its, all.replicas, kStart + kSilence / 16));
  EXPECT_TRUE(all.declarations.question(its, all.replicas, kStart + kSilence / 8));
  EXPECT_TRUE(all.declarations.on_content({}, &its));
  EXPECT_FALSE(all.declarations.question(its, all.replicas, kStart + kSilence)) << "it is known";
}

TEST(Declarations, WhoDiffersIsRefusedWhenTheDifferenceIsKnownOrHasBeenAskedForLong) {
  Declared all;
  for (std::uint32_t number = 0; number < 3; ++number) all.registers(number, 5);
  const auto binding = *all.declarations.binding(all.replicas, false);
  const Declaration* right = all.declarations.behind(binding.of(0));
  const Mismatch tensors = all.mismatch(3, 6), settings = all.mismatch(3, 5, "tree"), none = all.mismatch(3, 5);
  EXPECT_EQ(all.declarations.fate_of(tensors, binding.of(0), right, kStart), Fate::waits);
  EXPECT_EQ(all.declarations.fate_of(tensors, binding.of(0), right, kStart + kSilence / 2), Fate::refused);
  EXPECT_EQ(all.declarations.fate_of(settings, binding.of(0), right, kStart), Fate::refused);
  EXPECT_EQ(all.declarations.fate_of(none, binding.of(0), right, kStart), Fate::registers);
  EXPECT_EQ(all.declarations.difference(*settings.declaration, 0, right, binding, all.replicas),
            "it all-reduces over tree, and replicas 0, 1, 2 over ring; give all replicas the same");
}

TEST(Declarations, ThoseWhoDifferFromAMajorityAreRegisteredNoLonger) {
  Declared all;
  all.registers(0, 6);
  for (std::uint32_t number = 1; number < 4; ++number) all.registers(number, 5);
  const auto gone = all.declarations.turn_out_mismatches(all.replicas, {ReplicaId(1), {{5, "ring"}}}, kStart);
  EXPECT_EQ(gone, std::vector<std::uint64_t>{1});
  EXPECT_FALSE(all.replicas.contains(ReplicaId(0)));
  EXPECT_FALSE(all.declarations.dissent());
  const auto mismatches = all.declarations.take_mismatches();
  ASSERT_EQ(mismatches.size(), 1u);
  EXPECT_EQ(mismatches[0].up.instance(), 100u);
  EXPECT_TRUE(mismatches[0].was_registered);
}

TEST(Declarations, WithoutAMajorityItIsToldWhoDiffersOnceTheyHaveBeenAsked) {
  Declared all;
  all.registers(0, 5), all.registers(1, 6);
  const auto first = all.declarations.without_majority(all.replicas, kStart);
  EXPECT_EQ(first.questions.size(), 2u);
  EXPECT_TRUE(first.lines.empty());
  const auto later = all.declarations.without_majority(all.replicas, kStart + kSilence / 2);
  ASSERT_EQ(later.lines.size(), 1u);
  EXPECT_TRUE(later.lines[0].starts_with("replica 0 and replica 1: they declare different things")) << later.lines[0];
}

TEST(Declarations, OfManyOnlyThoseThatSomebodyHasAreKept) {
  Declared all;
  all.registers(0, 5);
  all.declarations.add(all.mismatch(1, 6));
  for (std::uint64_t hash = 100; hash < 130; ++hash) (void)all.declarations.of(declaring(2, hash));
  EXPECT_TRUE(all.declarations.behind({110, "ring"}));
  all.declarations.forget_unused(all.replicas);
  EXPECT_FALSE(all.declarations.behind({110, "ring"}));
  EXPECT_TRUE(all.declarations.behind({5, "ring"}));
  EXPECT_TRUE(all.declarations.behind({6, "ring"}));
}

}  // namespace
}  // namespace rejoin::membership
