// One of several coordinators by itself; how they behave together is tested in sim/.
#include "membership/replicated_coordinator.h"

#include <gtest/gtest.h>

namespace rejoin::membership {
namespace {

using Outcome = StoreAnswer::Outcome;

TEST(ReplicatedCoordinator, SaysOnceThatItClaimsWhileTheStoreDoesNotAnswer) {
  TimePoint now{std::chrono::seconds(1)};
  ReplicatedCoordinator::Options options;
  options.name = "c0";
  options.address = "c0:1";
  options.instance = 1;
  ReplicatedCoordinator one(options, now);
  int claims = 0, told = 0;
  const auto look = [&](const ReplicatedCoordinator::Actions& actions) {
    for (const auto& note : actions.notes) told += note.text.find("claims the lead") != std::string::npos ? 1 : 0;
    return actions.request;
  };
  auto request = look(one.on_tick(now));
  for (int i = 0; i < 100; ++i, now += std::chrono::milliseconds(100)) {
    StoreAnswer answer;
    const bool claim = request && request->kind == StoreRequest::Kind::claim;
    claims += claim ? 1 : 0;
    if (!claim) answer.outcome = Outcome::done;  // it reads: there is nothing
    else answer.error = "nobody is there";
    request = look(one.on_answer(answer, now));
    if (!request) request = look(one.on_tick(now));
  }
  EXPECT_GT(claims, 10);
  EXPECT_EQ(told, 1);
}

}  // namespace
}  // namespace rejoin::membership
