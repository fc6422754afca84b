// Process groups of a GPU's memory over real transports, in order with CUDA streams. The software driver ends the
// program where a thread of a group calls it while a stream waits.
#include <gmock/gmock.h>

#include "base/bytes.h"
#include "base/log.h"
#include "device/access.h"
#include "device/tests/fake_control.h"
#include "device/tests/library.h"
#include "rejoin/c.h"
#include "rejoin/process_group.h"
#include "rejoin/tests/process_groups.h"

namespace rejoin {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

struct DeviceProcessGroups : testing::TestWithParam<std::string> {
  static constexpr Duration kPatience = 60s;
  // It is loaded by its path, and found by its name from then on.
  const std::shared_ptr<device::Device> device = device::test_gpu();
  const device::Memory flag = *device->allocate_pinned(64);  // what streams are held up with
  std::vector<std::unique_ptr<device::Stream>> streams;
  std::vector<device::Memory> buffers;
  std::vector<std::unique_ptr<ProcessGroup>> groups;

  std::unique_ptr<ProcessGroup> open(const std::string& on = "cuda:0") {
    auto opened = ProcessGroup::open({.transport = GetParam(), .listen = "127.0.0.1:0", .advertise = {}}, on);
    EXPECT_TRUE(opened) << opened.error().message;
    return std::move(*opened);
  }
  void SetUp() override {
    spdlog::set_level(spdlog::level::err);  // each engine says that it stages
    for (int i = 0; i < 3; ++i) {
      groups.push_back(open());
      streams.push_back(*device->make_stream());
    }
  }
  ~DeviceProcessGroups() override { let_go(); }  // also of a test that has failed in the middle
  std::uint64_t& held() const { return *reinterpret_cast<std::uint64_t*>(flag.bytes.data()); }
  void let_go() const { std::atomic_ref(held()).store(1); }

  std::vector<Result<>> reconfigure(std::uint64_t number) { return rejoin::reconfigure(groups, number, kPatience); }
  void configured(std::uint64_t number) {
    for (const auto& result : reconfigure(number)) ASSERT_TRUE(result) << result.error().message;
  }
  void fill(std::size_t i, const std::vector<float>& values) {  // on its stream
    const auto bytes = std::as_bytes(std::span(values));
    EXPECT_TRUE(streams[i]->copy(buffers[i].bytes.data(), bytes.data(), bytes.size()));
  }
  // One for each member, with these values.
  void make_buffers(const std::vector<float>& values) {
    buffers.clear();
    for (std::size_t i = 0; i < streams.size(); ++i) {
      buffers.push_back(*device->allocate(values.size() * sizeof(float)));
      fill(i, values);
    }
  }
  // As `.item()` and `.cpu()` do: into pageable memory, behind what the stream waits for.
  std::vector<float> read(std::size_t i) {
    std::vector<float> values(buffers[i].bytes.size() / 4);
    EXPECT_TRUE(streams[i]->copy(std::as_writable_bytes(std::span(values)).data(), buffers[i].bytes.data(),
                                 buffers[i].bytes.size()));
    EXPECT_TRUE(streams[i]->synchronize());
    return values;
  }
  std::shared_ptr<Work> start(std::size_t i, Collective kind = Collective::all_reduce, Combine combine = Combine::sum) {
    auto work = groups[i]->start({.kind = kind,
                                  .combine = combine,
                                  .inputs = {buffers[i].bytes},
                                  .outputs = {},
                                  .limit = kPatience,
                                  .on_device = true,
                                  .stream = streams[i]->handle()});
    EXPECT_TRUE(work) << work.error().message;
    return *work;
  }
};

TEST_P(DeviceProcessGroups, BeginBehindTheirStreamsWhichWaitForThemAndNobodyElseDoes) {
  configured(1);
  for (const std::size_t count : {10, 1'000'000}) {
    std::vector<float> ones(count, 1.0f), twos(count, 2.0f);
    make_buffers(twos);
    held() = 0;
    ASSERT_TRUE(streams[2]->wait_until(&held(), 1));
    std::vector<std::shared_ptr<Work>> works;
    for (std::size_t round = 0; round < 3; ++round)  // one behind the other
      for (std::size_t i = 0; i < 3; ++i) {
        if (round == 0 && i == 2) {
          auto copied = device->allocate_pinned(count * 4);  // a copy of pageable memory would wait here
          ASSERT_TRUE(copied);
          std::ranges::copy(std::as_bytes(std::span(ones)), copied->bytes.begin());
          ASSERT_TRUE(streams[i]->copy(buffers[i].bytes.data(), copied->bytes.data(), count * 4));
          works.push_back(start(i));
          ASSERT_TRUE(works.back()->wait_on(streams[i]->handle()));
          EXPECT_FALSE(works.front()->done()) << "the last one's stream has not come there";
          let_go();
          ASSERT_TRUE(streams[i]->synchronize());
          continue;
        }
        works.push_back(start(i, Collective::all_reduce, round == 2 ? Combine::mean : Combine::sum));
        ASSERT_TRUE(works.back()->wait_on(streams[i]->handle()));
      }
    std::vector<std::vector<float>> got;
    for (std::size_t i = 0; i < 3; ++i) got.push_back(read(i));
    for (const auto& work : works) {
      const auto ended = work->wait(kPatience);
      ASSERT_TRUE(ended) << ended.error().message;
    }
    for (const auto& values : got) ASSERT_EQ(values, std::vector<float>(count, 15.0f));
  }
  for (const auto& group : groups) group->shutdown(kPatience);
}

TEST_P(DeviceProcessGroups, AMembersEndLetsTheOthersStreamsGoOnAndTheyGoOnWithoutIt) {
  configured(1);
  constexpr std::size_t count = 500'000;
  const std::vector<float> ones(count, 1.0f);
  make_buffers(ones);
  std::vector<std::shared_ptr<Work>> works;
  for (const std::size_t i : {0, 2}) {
    works.push_back(start(i));
    ASSERT_TRUE(works.back()->wait_on(streams[i]->handle()));
  }
  groups.erase(groups.begin() + 1);
  for (const std::size_t i : {0, 2}) ASSERT_TRUE(streams[i]->synchronize());
  for (const auto& work : works) {
    const auto result = work->wait(kPatience);
    ASSERT_FALSE(result);
    EXPECT_THAT(result.error().message, HasSubstr("has left the process group"));
    EXPECT_FALSE(work->wait_on(streams[0]->handle())) << "who comes late is told";
  }
  configured(2);
  for (std::size_t i = 0; i < 2; ++i) fill(i, ones);
  works.clear();
  for (std::size_t i = 0; i < 2; ++i) works.push_back(start(i));
  for (std::size_t i = 0; i < 2; ++i) ASSERT_TRUE(works[i]->wait_on(streams[i]->handle()));
  for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(read(i), std::vector<float>(count, 2.0f));
}

// Works that were given and that no kernel takes end with an error, and keep no stream.
TEST_P(DeviceProcessGroups, AKernelThatIsNotLaunchedFailsTheGroup) {
  const device::fake::Control fake{device::cuda_library().c_str()};
  if (fake.set_options == nullptr) GTEST_SKIP() << "a real driver launches it";
  configured(1);
  make_buffers(std::vector<float>(1'000, 1.0f));
  for (const auto& stream : streams) ASSERT_TRUE(stream->synchronize());
  std::vector<std::shared_ptr<Work>> works;
  for (std::size_t i = 0; i < 3; ++i) {
    if (i == 2) fake.set_options({.no_launch = true});
    works.push_back(start(i));
    ASSERT_TRUE(works.back()->wait_on(streams[i]->handle()) || i == 2);
  }
  fake.set_options({});
  for (const auto& work : works) {
    const auto result = work->wait(kPatience);
    ASSERT_FALSE(result);
    EXPECT_THAT(result.error().message, HasSubstr("launching a kernel"));
  }
  for (const auto& stream : streams) ASSERT_TRUE(stream->synchronize());
}

// Copies and additions that were given are never done, and no call of the group's thread would say so.
TEST_P(DeviceProcessGroups, AGpuThatDiesFailsTheGroupWhichCanBeClosed) {
  const device::fake::Control fake{device::cuda_library().c_str()};
  if (fake.set_options == nullptr) GTEST_SKIP() << "the context of a real driver stays dead";
  configured(1);
  make_buffers(std::vector<float>(100'000, 1.0f));
  for (const auto& stream : streams) ASSERT_TRUE(stream->synchronize());
  ASSERT_TRUE(streams[2]->wait_until(&held(), 1));
  std::vector<std::shared_ptr<Work>> works;
  for (std::size_t i = 0; i < 3; ++i) works.push_back(start(i));
  fake.set_options({.dead = true});
  let_go();
  std::vector<Result<>> results;
  for (const auto& work : works) results.push_back(work->wait(kPatience));
  groups.clear();
  fake.set_options({});
  for (const auto& result : results) {
    ASSERT_FALSE(result);
    EXPECT_THAT(result.error().message, HasSubstr("CUDA error 700"));
  }
}

TEST_P(DeviceProcessGroups, WhatCanNotBeIsRefusedByName) {
  groups.resize(1);
  groups.push_back(open("host"));
  for (const auto& result : reconfigure(1)) {
    ASSERT_FALSE(result);
    EXPECT_THAT(result.error().message, HasSubstr("all have a GPU's memory, or none"));
  }
  groups.erase(groups.begin());
  configured(2);
  buffers.push_back(*device->allocate(64));
  const auto work = groups[0]->start({.kind = Collective::all_reduce,
                                      .inputs = {buffers[0].bytes},
                                      .outputs = {},
                                      .limit = 1s,
                                      .on_device = true,
                                      .stream = streams[0]->handle()});
  ASSERT_FALSE(work);
  EXPECT_THAT(work.error().message, HasSubstr("opened without a device"));
  const device::fake::Control fake{device::cuda_library().c_str()};
  if (fake.begin_capture != nullptr) {
    const auto on_gpu = open();
    const std::vector<std::string> alone{on_gpu->handle()};
    ASSERT_TRUE(on_gpu->reconfigure(1, alone, kPatience, {}));
    fake.begin_capture(streams[0]->handle());
    const auto captured = on_gpu->start({.kind = Collective::all_reduce,
                                         .inputs = {buffers[0].bytes},
                                         .outputs = {},
                                         .limit = 1s,
                                         .on_device = true,
                                         .stream = streams[0]->handle()});
    EXPECT_TRUE(fake.end_capture(streams[0]->handle()));
    ASSERT_FALSE(captured);
    EXPECT_THAT(captured.error().message, HasSubstr("captured into a graph"));
  }
  const auto barrier = *groups[0]->start({.kind = Collective::barrier, .inputs = {}, .outputs = {}, .limit = 1s});
  EXPECT_THAT(barrier->wait_on(streams[0]->handle()).error().message, HasSubstr("wait() for this"));
  const auto none = ProcessGroup::open({.transport = GetParam(), .listen = "127.0.0.1:0", .advertise = {}}, "cuda:99");
  ASSERT_FALSE(none);
  EXPECT_THAT(none.error().message, HasSubstr("no CUDA device 99"));
}

TEST_P(DeviceProcessGroups, FromC) {
  rejoin_group* group = nullptr;
  ASSERT_EQ(rejoin_group_open_on(GetParam().c_str(), "127.0.0.1:0", nullptr, "cuda:0", &group), REJOIN_OK);
  const char* members[] = {rejoin_group_handle(group)};
  ASSERT_EQ(rejoin_group_reconfigure(group, 1, members, 1, 5000, nullptr, nullptr), REJOIN_OK);
  const std::vector<float> values{1.0f, 2.0f, 3.0f};
  for (int i = 0; i < 2; ++i) buffers.push_back(*device->allocate(12));
  fill(0, values);
  const rejoin_memory from{buffers[0].bytes.data(), 12}, to{buffers[1].bytes.data(), 12};
  rejoin_collective_call call{};
  call.kind = REJOIN_ALL_GATHER;
  call.inputs = &from, call.input_count = 1;
  call.outputs = &to, call.output_count = 1;
  call.limit_ms = 5000;
  call.on_device = 1, call.stream = streams[0]->handle();
  rejoin_work* work = nullptr;
  ASSERT_EQ(rejoin_group_start(group, &call, &work), REJOIN_OK);
  ASSERT_EQ(rejoin_work_wait_on(work, streams[1]->handle()), REJOIN_OK);
  EXPECT_EQ(read(1), values);
  rejoin_work_close(work);
  rejoin_group_close(group);
}

INSTANTIATE_TEST_SUITE_P(Over, DeviceProcessGroups, testing::Values("tcp", "shm"),
                         [](const auto& over) { return over.param; });

}  // namespace
}  // namespace rejoin
