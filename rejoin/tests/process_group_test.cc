// A process group over real transports, with its threads: what the groups on the simulated fabric do not show.
#include "rejoin/process_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <future>
#include <numeric>
#include <thread>

#include "base/bytes.h"
#include "base/proof.h"
#include "base/tests/cancelled_thread.h"
#include "base/tests/threads.h"
#include "rejoin/c.h"
#include "rejoin/tests/process_groups.h"

namespace rejoin {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

constexpr Duration kPatience = 20s;

std::span<std::byte> of(std::vector<float>& floats) { return std::as_writable_bytes(std::span(floats)); }

struct ProcessGroups : testing::TestWithParam<std::string> {
  std::vector<std::unique_ptr<ProcessGroup>> groups;

  std::unique_ptr<ProcessGroup> open() {
    auto opened = ProcessGroup::open({.transport = GetParam(), .listen = "127.0.0.1:0", .advertise = {}});
    EXPECT_TRUE(opened) << opened.error().message;
    return std::move(*opened);
  }
  void SetUp() override {
    for (int i = 0; i < 3; ++i) groups.push_back(open());
  }
  std::vector<Result<>> reconfigure(std::uint64_t number, Duration limit = kPatience) {
    return rejoin::reconfigure(groups, number, limit);
  }
  void configured(std::uint64_t number) {
    for (const auto& result : reconfigure(number)) ASSERT_TRUE(result) << result.error().message;
  }
  std::vector<Result<>> all_reduce(std::vector<std::vector<float>>& buffers) {
    std::vector<std::shared_ptr<Work>> works;
    for (std::size_t i = 0; i < groups.size(); ++i)
      works.push_back(*groups[i]->start(
          {.kind = Collective::all_reduce, .inputs = {of(buffers[i])}, .outputs = {}, .limit = kPatience}));
    std::vector<Result<>> results;
    for (const auto& work : works) results.push_back(work->wait(kPatience));
    return results;
  }
};

TEST_P(ProcessGroups, ReduceAndGoOnWithoutOneAndWithAnother) {
  configured(1);
  for (const std::size_t count : {10, 10'000, 3'000'000}) {
    std::vector<std::vector<float>> buffers{3, std::vector<float>(count)};
    for (auto& buffer : buffers) std::iota(buffer.begin(), buffer.end(), 1.0f);
    for (const auto& result : all_reduce(buffers)) ASSERT_TRUE(result) << result.error().message;
    for (const auto& buffer : buffers) {
      ASSERT_EQ(buffer, buffers[0]);
      ASSERT_EQ(buffer[7], 24.0f);
    }
  }
  // One is closed while the others wait for it.
  std::vector<std::vector<float>> buffers{2, std::vector<float>(1'000'000, 1.0f)};
  groups.erase(groups.begin() + 1);
  std::vector<Result<>> results = all_reduce(buffers);
  for (const auto& result : results) {
    ASSERT_FALSE(result);
    EXPECT_THAT(result.error().message, HasSubstr("has left the process group"));
  }
  configured(2);
  for (const auto& result : all_reduce(buffers)) ASSERT_TRUE(result) << result.error().message;
  groups.push_back(open());
  configured(3);
  std::vector<std::vector<float>> ones{3, std::vector<float>(100'000, 1.0f)};
  for (const auto& result : all_reduce(ones)) ASSERT_TRUE(result) << result.error().message;
  EXPECT_EQ(ones[2], std::vector<float>(100'000, 3.0f));
  for (const auto& group : groups) group->shutdown(kPatience);
}

TEST_P(ProcessGroups, AMemberWithNothingUnderWayHearsThatAnotherHasGivenUp) {
  configured(1);
  std::vector<std::vector<float>> buffers{3, std::vector<float>(10)};
  for (const auto& result : all_reduce(buffers)) ASSERT_TRUE(result) << result.error().message;
  for (const auto& group : groups) EXPECT_FALSE(group->failed());
  groups[0]->abort("for a reason");
  const auto until = SteadyClock().now() + kPatience;
  for (const auto& group : groups)
    while (!group->failed() && SteadyClock().now() < until) std::this_thread::yield();
  for (const auto& group : groups) EXPECT_TRUE(group->failed());
  configured(2);
  for (const auto& group : groups) EXPECT_FALSE(group->failed());
}

TEST_P(ProcessGroups, ManyShortOnesFromTheirThreadsAndThenAllLeaveAtOnce) {
  configured(1);
  std::vector<std::future<float>> all;
  for (const auto& group : groups)
    all.push_back(std::async(std::launch::async, [&group] {
      std::vector<float> value(3, 1.0f);
      for (int i = 0; i < 200; ++i) {
        value.assign(3, 1.0f);
        const auto work =
            *group->start({.kind = Collective::all_reduce, .inputs = {of(value)}, .outputs = {}, .limit = kPatience});
        if (!work->wait(kPatience)) return -1.0f;
      }
      group->shutdown(kPatience);
      return value[1];
    }));
  for (auto& one : all) EXPECT_EQ(one.get(), 3.0f);
}

TEST_P(ProcessGroups, TheirThreadsTakeNoSignals) {
  groups.clear();
  const std::size_t before = test::threads_that_take(SIGTERM);
  groups.push_back(open());
  groups.push_back(open());
  configured(1);
  EXPECT_EQ(test::threads_that_take(SIGTERM), before);
}

TEST_P(ProcessGroups, TwoThreadsShutOneDownAtOnce) {
  for (std::uint64_t round = 1; round <= 10; ++round) {
    configured(round);
    std::vector<std::future<void>> both;
    for (int i = 0; i < 2; ++i)
      both.push_back(std::async(std::launch::async, [&] { groups[1]->shutdown(4 * kPatience); }));
    for (auto& one : both) EXPECT_EQ(one.wait_for(2 * kPatience), std::future_status::ready);
    for (auto& one : both) one.get();
    groups[1] = open();
  }
}

TEST_P(ProcessGroups, AThreadThatIsBeingCancelledDestroysThem) {
  configured(1);
  EXPECT_TRUE(in_cancelled_thread([&] { groups.clear(); }).came_back);
}

TEST_P(ProcessGroups, AChildThatDestroysSomeOfItsParentsChangesNothing) {
  configured(1);
  const auto waiting = std::async(std::launch::async, [&] { (void)groups[0]->next_done(2s); });
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    groups.clear();
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::vector<std::vector<float>> ones{3, std::vector<float>(100'000, 1.0f)};
  for (const auto& result : all_reduce(ones)) EXPECT_TRUE(result) << result.error().message;
}

TEST_P(ProcessGroups, AChildIsToldThatTheyAreItsParentsAndWaitsForNothing) {
  configured(1);
  std::vector<std::vector<float>> ones{3, std::vector<float>(100'000, 1.0f)};
  const auto alone =
      *groups[0]->start({.kind = Collective::all_reduce, .inputs = {of(ones[0])}, .outputs = {}, .limit = kPatience});
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    const auto parents = [](const auto& result) {
      return !result && result.error().message.find("make another group in this process") != std::string::npos;
    };
    const bool told = parents(groups[0]->start({.kind = Collective::barrier, .limit = kPatience})) &&
                      parents(groups[0]->reconfigure(2, {groups[0]->handle()}, kPatience)) &&
                      parents(alone->wait(kPatience)) && parents(groups[0]->next_done(kPatience)) && alone->done() &&
                      groups[0]->size() == 3;
    groups[0]->abort("the child's");
    groups[0]->shutdown(kPatience);
    ::_exit(told ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::vector<std::shared_ptr<Work>> others;
  for (const auto i : {1u, 2u})
    others.push_back(*groups[i]->start(
        {.kind = Collective::all_reduce, .inputs = {of(ones[i])}, .outputs = {}, .limit = kPatience}));
  for (const auto& other : others) EXPECT_TRUE(other->wait(kPatience));
  EXPECT_TRUE(alone->wait(kPatience));
  for (const auto& result : all_reduce(ones)) EXPECT_TRUE(result) << result.error().message;
}

INSTANTIATE_TEST_SUITE_P(Over, ProcessGroups,
                         testing::Values("tcp", "tcp+aes", "shm", "tcp:127.0.0.1,127.0.0.1", "tcp;threads=2"),
                         [](const auto& over) -> std::string {
                           if (over.param.find("threads") != std::string::npos) return "threads";
                           if (over.param.find(',') != std::string::npos) return "rails";
                           return over.param == "tcp+aes" ? "encrypted" : over.param;
                         });

TEST(ProcessGroup, WhatCanNotBeIsRefusedByName) {
  const auto group = *ProcessGroup::open({.transport = "tcp", .listen = "127.0.0.1:0", .advertise = {}});
  const auto other = *ProcessGroup::open({.transport = "shm", .listen = "", .advertise = {}});
  const auto message = [&](const std::vector<std::string>& members) {
    const auto result = group->reconfigure(1, members, 1s);
    return result ? std::string("accepted") : result.error().message;
  };
  EXPECT_THAT(message({"tcp 127.0.0.1:1"}), HasSubstr("'tcp 127.0.0.1:1' is no member of a process group"));
  EXPECT_THAT(message({}), HasSubstr("none of the 0 members is this one"));
  EXPECT_THAT(message({group->handle(), group->handle()}), HasSubstr("named twice, as ranks 0 and 1"));
  EXPECT_THAT(message({group->handle(), other->handle()}),
              HasSubstr("transport of member 1 is shm, and this one's is tcp"));
  const auto early = group->start({.kind = Collective::barrier, .inputs = {}, .outputs = {}, .limit = 1s});
  ASSERT_FALSE(early);
  EXPECT_THAT(early.error().message, HasSubstr("no members yet"));
}

TEST(ProcessGroup, AloneItIsAGroupOfOneAndWaitsCanBeInterrupted) {
  const auto group = *ProcessGroup::open({.transport = "tcp", .listen = "127.0.0.1:0", .advertise = {}});
  ASSERT_TRUE(group->reconfigure(1, {group->handle()}, kPatience));
  std::vector<float> one(10, 2.0f);
  const auto work =
      *group->start({.kind = Collective::all_reduce, .inputs = {of(one)}, .outputs = {}, .limit = kPatience});
  work->notify(17);
  ASSERT_TRUE(work->wait(kPatience));
  EXPECT_EQ(*group->next_done(kPatience), 17u);
  EXPECT_EQ(group->next_done(1ms).error().code, ErrorCode::timeout);
  const auto lonely = *ProcessGroup::open({.transport = "tcp", .listen = "127.0.0.1:0", .advertise = {}});
  const auto result = group->reconfigure(2, {group->handle(), lonely->handle()}, kPatience, [] { return true; });
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::cancelled);
  group->shutdown(kPatience);
  EXPECT_EQ(group->next_done(kPatience).error().code, ErrorCode::cancelled);
}

TEST(ProcessGroup, WithoutAnAddressAMemberListensOnAllAndNamesOneOfThem) {
  std::vector<std::string> handles;
  std::vector<rejoin_group*> groups(2);
  for (auto& group : groups) {
    ASSERT_EQ(rejoin_group_open_towards("tcp", nullptr, nullptr, nullptr, "127.0.0.1:1", &group), REJOIN_OK);
    handles.emplace_back(rejoin_group_handle(group));
    EXPECT_THAT(handles.back(), testing::Not(testing::AnyOf(HasSubstr(" 0.0.0.0:"), HasSubstr("[::]"))));
  }
  const char* members[] = {handles[0].c_str(), handles[1].c_str()};
  const auto reconfigure = [&](rejoin_group* group) {
    return rejoin_group_reconfigure(group, 1, members, 2, 20000, nullptr, nullptr);
  };
  auto first = std::async(std::launch::async, reconfigure, groups[0]);
  EXPECT_EQ(reconfigure(groups[1]), REJOIN_OK);
  EXPECT_EQ(first.get(), REJOIN_OK);
  for (auto* group : groups) rejoin_group_close(group);
}

// An address may have changed, of which not all have heard.
TEST(ProcessGroup, AMemberIsTheSameOneForThoseWhoKnowItAtAnotherAddress) {
  const auto one = *ProcessGroup::open({.transport = "tcp", .listen = "127.0.0.1:0", .advertise = {}});
  const auto other = *ProcessGroup::open({.transport = "tcp", .listen = "127.0.0.1:0", .advertise = {}});
  const std::string elsewhere = other->handle().substr(0, other->handle().rfind(' ')) + " 127.0.0.9:1";
  auto first = std::async(std::launch::async, [&] {
    return one->reconfigure(1, {one->handle(), other->handle()}, kPatience);
  });
  const auto second = other->reconfigure(1, {one->handle(), elsewhere}, kPatience);
  EXPECT_TRUE(second) << second.error().message;
  EXPECT_TRUE(first.get());
}

TEST(ProcessGroup, FromC) {
  rejoin_group* group = nullptr;
  ASSERT_EQ(rejoin_group_open("tcp", "127.0.0.1:0", nullptr, &group), REJOIN_OK);
  const char* members[] = {rejoin_group_handle(group)};
  ASSERT_EQ(rejoin_group_reconfigure(group, 1, members, 1, 5000, nullptr, nullptr), REJOIN_OK);
  EXPECT_EQ(rejoin_group_size(group), 1u);
  EXPECT_EQ(rejoin_group_failed(group), 0);
  rejoin_collective_call call{};
  call.kind = REJOIN_BARRIER;
  call.limit_ms = 5000;
  rejoin_work* work = nullptr;
  ASSERT_EQ(rejoin_group_start(group, &call, &work), REJOIN_OK);
  EXPECT_EQ(rejoin_work_wait(work, 5000, nullptr, nullptr), REJOIN_OK);
  EXPECT_EQ(rejoin_work_done(work), 1);
  rejoin_work_close(work);
  call.kind = 99;
  EXPECT_EQ(rejoin_group_start(group, &call, &work), REJOIN_INVALID_ARGUMENT);
  call.kind = REJOIN_ALL_REDUCE;
  call.input_count = 1;
  EXPECT_EQ(rejoin_group_start(group, &call, &work), REJOIN_INVALID_ARGUMENT);
  EXPECT_STREQ(rejoin_error(), "a list of buffers that is not empty is null");
  EXPECT_EQ(rejoin_group_abort(group, nullptr), REJOIN_INVALID_ARGUMENT);
  const char* nobody = nullptr;
  EXPECT_EQ(rejoin_group_reconfigure(group, 2, &nobody, 1, 5000, nullptr, nullptr), REJOIN_INVALID_ARGUMENT);
  EXPECT_STREQ(rejoin_error(), "member 0 of 1 is null");
  rejoin_group_close(group);
}

TEST(ProcessGroup, TheLastErrorIsToldUntilTheThreadHasEnded) {
  static std::string told;
  struct Late {
    ~Late() { told = rejoin_error(); }
  };
  std::thread([] {
    thread_local Late late;  // destroyed after what is made later
    (void)&late;
    const char* settings[] = {"help"};
    rejoin_session* session = nullptr;
    EXPECT_EQ(rejoin_open(settings, 1, &session), REJOIN_INVALID_ARGUMENT);
  }).join();
  EXPECT_EQ(told, "setting 0 of 1, 'help', is none: give NAME=VALUE");
}

// As a group's thread may have to, which a process that ends has still.
TEST(ProcessGroup, SecretsAreProvenWhileTheProcessEnds) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::atexit([] { ::_exit(mac_of(Nonce{}, {}) == Mac{} ? 1 : 0); });  // after OpenSSL's own, which is set later
    const auto group = *ProcessGroup::open({.transport = "tcp", .listen = "127.0.0.1:0", .advertise = {}});
    (void)mac_of(Nonce{}, {});
    std::exit(1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace rejoin
