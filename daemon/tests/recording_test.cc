// Flight recordings: written by threads that overtake each other, cut off, damaged, of machines whose clocks differ.
#include "daemon/recording.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "base/events.h"
#include "base/fail.h"
#include "base/fd.h"
#include "base/flight.h"
#include "base/flight_ring.h"
#include "daemon/incidents.h"
#include "tests/process.h"

namespace rejoin::daemon {
namespace {

using events::Numbers;
using testing::HasSubstr;

constexpr flight::Sizes kSmall{{8, 4, 16}};

struct RingMemory {
  explicit RingMemory(const flight::Sizes& its = kSmall) : sizes(its) {}
  const flight::Sizes sizes;
  Bytes bytes = Bytes(sizes.bytes() + 64);
  std::span<std::byte> aligned{bytes.data() + (64 - reinterpret_cast<std::uintptr_t>(bytes.data()) % 64),
                               sizes.bytes()};
  flight::Rings rings{aligned, sizes, [] {
                        flight::Header header{.pid = 4711, .opened_ns = 5, .opened_wall_ns = 6};
                        std::strcpy(header.who, "r1.0");
                        return header;
                      }()};
  Recording read() const {
    auto read = parse_recording(aligned, "file");
    EXPECT_TRUE(read);
    return read.value_or(Recording{});
  }
};

TEST(FlightRing, WhatIsWrittenIsReadAndTheLastOfEachRingStay) {
  RingMemory memory;
  memory.rings.put(events::Kind::epoch, 7, {.epoch = 3, .step = 9},
                   "0,1\nwithout replica 2: its process 17 ended and " + std::string(40, 'x'));
  for (std::uint64_t i = 0; i < 20; ++i)
    memory.rings.put(events::Kind::committed, static_cast<std::int64_t>(10 + i), {.epoch = 3, .step = i}, "");
  const Recording read = memory.read();
  EXPECT_EQ(read.name(), "r1.0, process 4711 on ");
  ASSERT_EQ(read.events.size(), 9u) << "eight of every step's, and the epoch";
  EXPECT_EQ(read.events[0].kind, events::Kind::epoch);
  EXPECT_EQ(read.events[0].first_text(), "0,1");
  EXPECT_EQ(read.events[0].more_text(), "without replica 2: its process 17 ended and " + std::string(40, 'x'));
  EXPECT_EQ(read.events[1].numbers.step, 12u);
  EXPECT_EQ(read.events.back().numbers.step, 19u);
  EXPECT_EQ(read.begins[0], 22);
  EXPECT_EQ(read.begins[2], 0) << "nothing of that ring is overwritten";
  EXPECT_EQ(read.damaged + read.missing, 0u);
}

TEST(FlightRing, AllNumbersComeBackAndLongTextIsCut) {
  RingMemory memory;
  const Numbers numbers{
      .epoch = ~0ull, .step = 1ull << 63, .replica = ~0u, .number = 0x80000001, .a = 5, .b = ~0ull - 1};
  memory.rings.put(events::Kind::peer_lost, 1, numbers, std::string(1000, 'y'));
  const auto events = memory.read().events;
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].numbers.epoch, numbers.epoch);
  EXPECT_EQ(events[0].numbers.step, numbers.step);
  EXPECT_EQ(events[0].numbers.replica, numbers.replica);
  EXPECT_EQ(events[0].numbers.number, numbers.number);
  EXPECT_EQ(events[0].numbers.a, numbers.a);
  EXPECT_EQ(events[0].numbers.b, numbers.b);
  EXPECT_EQ(events[0].text, std::string(flight::kMostText, 'y'));
}

// As the coordinator names them, by the ring's order: from 0 or the other end, but for one.
std::string members(std::uint32_t count, bool from_the_end, std::optional<std::uint32_t> without) {
  std::string text;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t replica = from_the_end ? count - 1 - i : i;
    if (replica != without) text += fmt::format("{}{}", text.empty() ? "" : ",", replica);
  }
  return text;
}

TEST(FlightRing, OfTheLargestJobWhoWasLostIsKnownInWhateverOrderItsMembersAre) {
  RingMemory memory(flight::kSizes);
  memory.rings.put(events::Kind::epoch, 1, {.epoch = 1}, members(1024, false, {}) + "\nstart");
  memory.rings.put(events::Kind::epoch, 2, {.epoch = 2}, members(1024, true, 700) + "\nwithout replica 700");
  memory.rings.put(events::Kind::epoch, 3, {.epoch = 3}, members(1024, false, {}) + "\nreplica 700 is back");
  memory.rings.put(events::Kind::enter_epoch, 4, {.epoch = 4}, members(1024, true, 3));
  memory.rings.put(events::Kind::epoch, 5, {.epoch = 5}, members(1024, false, 3) + "\n0 and 1 connect again");
  const auto incidents = find_incidents(join({memory.read()}));
  std::vector<std::string> titles;
  for (const auto& one : incidents.all) titles.push_back(one.title());
  EXPECT_THAT(titles, testing::ElementsAre("epoch 2, without replica 700", "epoch 4, without replica 3",
                                           "epoch 5, of the same members"));
  EXPECT_EQ(incidents.decisions[1].reason, "without replica 700");
}

// A process of an earlier version has cut it; of one that was killed here the rest is not written.
TEST(FlightRing, AListOfMembersThatIsCutOffSaysNothingOfWhoWasLost) {
  RingMemory memory(flight::kSizes);
  const auto former = [](const std::string& text) { return text.substr(0, flight::kMostText); };
  memory.rings.put(events::Kind::epoch, 1, {.epoch = 1}, former(members(200, false, 5)));
  memory.rings.put(events::Kind::epoch, 2, {.epoch = 2}, former(members(90, false, {}) + "\n" + std::string(80, 'x')));
  memory.rings.put(events::Kind::enter_epoch, 3, {.epoch = 3}, members(100, false, {}));
  memory.aligned[flight::kSizes.bytes() - flight::kSlotBytes * (flight::kSizes.slots[2] - 7 - 7 - 4)] ^= std::byte{1};
  const auto joined = join({memory.read()});
  ASSERT_EQ(joined.all[0].events.size(), 3u);
  const auto decisions = find_incidents(joined).decisions;
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].members.size(), 90u);
  EXPECT_THAT(joined.notes, testing::Contains(HasSubstr("does not have all members of 2 epochs")));
}

TEST(FlightRing, WritersThatOvertakeEachOtherLeaveNoWrongEvent) {
  RingMemory memory;
  constexpr std::uint64_t each = 20'000;
  const auto write = [&](std::uint64_t who) {
    for (std::uint64_t i = 0; i < each; ++i)
      memory.rings.put(events::Kind::committed, static_cast<std::int64_t>(i), {.epoch = who, .step = i, .a = who * i},
                       "");
  };
  std::thread one(write, 3), other(write, 5);
  write(7);
  for (int i = 0; i < 200; ++i)  // while it is written to
    for (const auto& event : memory.read().events) ASSERT_EQ(event.numbers.a, event.numbers.epoch * event.numbers.step);
  one.join();
  other.join();
  const auto read = memory.read();
  EXPECT_LE(read.damaged, 2u) << "of each writer that stood still at most one is lost";
  EXPECT_GE(read.events.size(), 6u);
  for (const auto& event : read.events) EXPECT_EQ(event.numbers.a, event.numbers.epoch * event.numbers.step);
}

TEST(FlightReader, WhatIsWholeOfADamagedOrCutFileIsReadAndTheRestCounted) {
  RingMemory memory;
  for (std::uint64_t i = 0; i < 8; ++i)
    memory.rings.put(events::Kind::committed, static_cast<std::int64_t>(i), {.step = i}, "");
  memory.rings.put(events::Kind::note, 9, {}, "words");
  Bytes bytes(memory.aligned.begin(), memory.aligned.end());
  bytes[flight::kHeaderBytes + 3 * flight::kSlotBytes + 40] ^= std::byte{1};
  auto read = parse_recording(bytes, "file");
  ASSERT_TRUE(read);
  EXPECT_EQ(read->damaged, 1u);
  EXPECT_EQ(read->events.size(), 8u);
  bytes.resize(flight::kHeaderBytes + 5 * flight::kSlotBytes + 63);
  read = parse_recording(bytes, "file");
  ASSERT_TRUE(read);
  EXPECT_EQ(read->events.size(), 4u) << "five are there, and one of them is damaged";
  EXPECT_EQ(read->missing, 5u);
  const auto joined = join({*read});
  EXPECT_THAT(joined.notes, testing::Contains(HasSubstr("file is cut off: 5 events")));
  EXPECT_THAT(joined.notes, testing::Contains(HasSubstr("file has 1 damaged places")));
  for (const std::size_t length : {0, 7, 100}) {
    bytes.resize(length);
    EXPECT_FALSE(parse_recording(bytes, "file"));
  }
}

TEST(FlightReader, AHeaderThatMakesNoSenseIsAnError) {
  for (const std::size_t at : {0, 8, 12, 16, 20}) {
    RingMemory memory;
    memory.aligned[at] ^= std::byte{0x15};
    const auto read = parse_recording(memory.aligned, "file");
    ASSERT_FALSE(read) << at;
    EXPECT_THAT(read.error().message, HasSubstr("file"));
  }
}

// It is killed then.
pid_t in_child(auto what) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    what();
    ::kill(::getpid(), SIGKILL);
  }
  ::waitpid(pid, nullptr, 0);
  return pid;
}

TEST(Flight, AKilledProcessLeavesItsEventsAndOldOnesAreRemoved) {
  const test::Scratch scratch;
  const auto recordings = [&] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(scratch.path))
      if (entry.path().extension() == flight::kSuffix) names.push_back(entry.path().string());
    return names;
  };
  const pid_t pid = in_child([&] {
    flight::open(scratch.path, "r0.1/../x", "test");
    flight::set_job(77);
    flight::record(events::Kind::note, {}, "the last words");
    const pid_t grandchild = ::fork();  // which has no recording
    if (grandchild == 0) {
      if (flight::is_open()) flight::record(events::Kind::note, {}, "not its own");
      ::_exit(flight::is_open() ? 1 : 0);
    }
    int status = 1;
    ::waitpid(grandchild, &status, 0);
    flight::record(events::Kind::note, {.a = static_cast<std::uint64_t>(status)}, "of a child");
  });
  ASSERT_EQ(recordings().size(), 1u);
  struct stat status {};
  ASSERT_EQ(::stat(recordings()[0].c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  const auto read = read_recordings({scratch.path});
  ASSERT_TRUE(read && read->all.size() == 1);
  const auto too_many = read_recordings({scratch.path}, 0, 100);
  ASSERT_FALSE(too_many) << "three events do not fit";
  EXPECT_NE(too_many.error().message.find("name the recordings of the replicas"), std::string::npos);
  const auto& one = read->all[0];
  EXPECT_EQ(one.pid, static_cast<std::uint32_t>(pid));
  EXPECT_EQ(one.who, "r0.1/../x");
  EXPECT_EQ(one.job, 77u);
  EXPECT_EQ(one.clock, flight::clock_id());
  EXPECT_FALSE(one.lives);
  ASSERT_EQ(one.events.size(), 3u);
  EXPECT_EQ(one.events[1].text, "the last words");
  EXPECT_EQ(one.events[2].numbers.a, 0u) << "the child had no recording, and harmed nothing";
  // As many as may be, and strangers that nobody touches.
  scratch.write("notes.txt", "mine");
  std::filesystem::create_directory(scratch.path + "/a.flight");
  for (std::size_t i = 0; i < flight::kMostLeft + 3; ++i) {
    const auto copy = fmt::format("{}/r0.1.{}{}", scratch.path, i, flight::kSuffix);
    std::filesystem::copy_file(one.file, copy);
    std::filesystem::last_write_time(copy, std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
  }
  // One that has just been made is left alone, however long ago that is here by now.
  std::filesystem::last_write_time(one.file, std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
  in_child([&] { flight::open(scratch.path, "r0.1", "test"); });
  EXPECT_EQ(recordings().size(), flight::kMostLeft + 2 + 1) << "these, the two youngest, and the directory";
  EXPECT_TRUE(std::filesystem::exists(scratch.path + "/notes.txt"));
}

// As a supervisor does it with a trainer that is refused.
TEST(Flight, WhoIsStartedInVainAgainAndAgainDoesNotPushOutWhatSaysWhy) {
  const test::Scratch scratch;
  const auto hour_ago = std::filesystem::file_time_type::clock::now() - std::chrono::hours(1);
  const auto record_one = [&](std::uint64_t job) {
    std::set<std::string> before;
    for (const auto& entry : std::filesystem::directory_iterator(scratch.path)) before.insert(entry.path());
    in_child([&] {
      flight::open(scratch.path, "r1.0", "test");
      flight::set_job(job);
    });
    std::string made;
    for (const auto& entry : std::filesystem::directory_iterator(scratch.path))
      if (!before.contains(entry.path())) made = entry.path();
    return made;
  };
  const std::string of_job = record_one(77), in_vain = record_one(0);
  ASSERT_FALSE(of_job.empty() || in_vain.empty());
  std::filesystem::last_write_time(of_job, hour_ago);
  for (std::size_t i = 0; i < flight::kMostLeft + 12; ++i) {
    const auto copy = fmt::format("{}/r1.0.{}{}", scratch.path, i, flight::kSuffix);
    std::filesystem::copy_file(in_vain, copy);
    std::filesystem::last_write_time(copy, hour_ago + std::chrono::seconds(i + 1));
  }
  record_one(77);
  EXPECT_TRUE(std::filesystem::exists(of_job));
  EXPECT_TRUE(
      std::filesystem::exists(fmt::format("{}/r1.0.{}{}", scratch.path, flight::kMostLeft + 11, flight::kSuffix)));
  std::size_t left = 0;
  for (const auto& entry : std::filesystem::directory_iterator(scratch.path)) left += entry.is_regular_file();
  EXPECT_EQ(left, 1 + flight::kMostJoblessLeft + 2) << "it, the newest in vain, and the two that are young";
}

// As a tmpfs without a limit, or one of FUSE.
TEST(Flight, AFileSystemThatDoesNotSayHowLargeItIsKeepsWhatIsLeft) {
  const test::Scratch scratch;
  constexpr int kNotAllowed = 77;
  const pid_t pid = ::fork();
  if (pid == 0) {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", scratch.path.c_str(), "tmpfs", 0, "size=0") != 0)
      ::_exit(kNotAllowed);
    const pid_t ended = ::fork();
    if (ended == 0) flight::open(scratch.path, "r0.0", "test"), ::_exit(0);
    ::waitpid(ended, nullptr, 0);
    for (const auto& file : std::filesystem::directory_iterator(scratch.path))
      std::filesystem::last_write_time(file, std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
    flight::open(scratch.path, "r0.0", "test");
    const std::filesystem::directory_iterator files(scratch.path);
    ::_exit(static_cast<int>(std::distance(begin(files), end(files))));
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  if (WEXITSTATUS(status) == kNotAllowed) GTEST_SKIP() << "nobody may mount here";
  EXPECT_EQ(WEXITSTATUS(status), 2);
}

TEST(Flight, WhereNoneCanBeWrittenTheProcessGoesOn) {
  const test::Scratch scratch;
  scratch.write("file", "");
  for (const auto& directory : std::vector{scratch.path + "/file", std::string("/proc/nowhere/below")}) {
    const auto opened = flight::try_open(directory, "r0.0", "test");
    ASSERT_FALSE(opened);
    EXPECT_THAT(opened.error().message, HasSubstr(directory));
  }
  // As on a full disk: nothing of it stays.
  const rlimit small{.rlim_cur = 1 << 20, .rlim_max = RLIM_INFINITY};
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto full = flight::try_open(scratch.path + "/full", "r0.0", "test");
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ASSERT_FALSE(full);
  EXPECT_THAT(full.error().message, testing::AllOf(HasSubstr("r0.0."), HasSubstr("2.8 MiB: File too large")));
  EXPECT_TRUE(std::filesystem::is_empty(scratch.path + "/full"));
  flight::open(scratch.path + "/file", "r0.0", "test");
  EXPECT_FALSE(flight::is_open());
  flight::record(events::Kind::note, {}, "nobody hears it");
}

// A signal would end the process.
TEST(SealedMemory, ThatIsLargerThanAFileMayBeIsAnErrorThatSaysSo) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit lower = before;
  lower.rlim_cur = 1 << 20;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &lower), 0);
  const auto made = make_sealed_memfd("state", 2 << 20);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ASSERT_FALSE(made);
  EXPECT_NE(made.error().message.find("ulimit -f"), std::string::npos) << made.error().message;
}

}  // namespace
}  // namespace rejoin::daemon
