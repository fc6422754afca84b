// A copy of the decisions that can't be opened, or is taken away: the coordinators have a store, and go on without it.
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "daemon/tests/cluster.h"

namespace rejoin::daemon {
namespace {

struct LostCopy : Cluster {
  // Leaves a copy of `steps` steps at least, with an archive where it is to be compacted, and a store that has more.
  void leave_a_copy(std::uint64_t steps = 20) {
    ASSERT_TRUE(start(0));
    ASSERT_TRUE(start(1));
    start_nodes();
    ASSERT_TRUE(commit_more(steps));
    if (log_compact < 64 * MiB)
      ASSERT_TRUE(until([&] { return std::filesystem::exists(log_directory(0) + "/decisions.1.log"); }));
    end(0);
    ASSERT_TRUE(commit_more(3));
  }
  std::string file() const { return log_directory(0) + "/decisions.log"; }
  void damage(std::streamoff at) const {
    std::fstream log(file(), std::ios::in | std::ios::out | std::ios::binary);
    log.seekg(at);
    const char byte = static_cast<char>(log.get() ^ 1);
    log.seekp(at).put(byte);
    ASSERT_TRUE(log.flush());
  }
  std::string alarm(std::size_t i) const {
    const auto alarms = servers[i]->status().at("alarms");
    return alarms.size() == 1 ? alarms.at(0).get<std::string>() : alarms.dump();
  }
  // It can lead: the other one ends.
  void expect_that_it_starts_and_leads(const std::vector<std::string>& says, membership::Disk disk) {
    const auto started = start(0, std::move(disk));
    ASSERT_TRUE(started) << started.error().message;
    for (const auto& part : says) EXPECT_NE(alarm(0).find(part), std::string::npos) << part << ": " << alarm(0);
    EXPECT_EQ(alarm(0).find("new job"), std::string::npos) << alarm(0);
    EXPECT_NE(servers[0]->status().at("store").at("copy"), "");
    end(1);
    ASSERT_TRUE(commit_more(5));
    EXPECT_EQ(leader(), 0u);
    EXPECT_TRUE(why_failed[0].empty()) << why_failed[0];
  }
  void expect_that_it_starts_and_leads(const std::vector<std::string>& says) {
    expect_that_it_starts_and_leads(says, membership::Disk::real());
  }
};

TEST_F(LostCopy, ADamagedOneKeepsNobodyFromStarting) {
  leave_a_copy();
  damage(150);
  expect_that_it_starts_and_leads({"the copy of the decisions in " + log_directory(0) + " is given up: ", "is damaged",
                                   "'rejoin audit", "What counts is in the store"});
}

TEST_F(LostCopy, OneThatIsGoneKeepsNobodyFromStarting) {
  log_compact = 2 * KiB;
  leave_a_copy(60);
  std::filesystem::remove(file());
  expect_that_it_starts_and_leads({"is gone, and archives of it are there", "What counts is in the store"});
  end(0);
  std::ofstream(file(), std::ios::trunc).flush();
  ASSERT_TRUE(start(0));
  EXPECT_NE(alarm(0).find("holds no decision, and archives of it are there"), std::string::npos) << alarm(0);
}

TEST_F(LostCopy, KeepsAsManyArchivesAsItIsTold) {
  log_compact = 2 * KiB;
  log_archives = 2;
  leave_a_copy(60);
  ASSERT_TRUE(start(0));
  ASSERT_TRUE(until([&] {
    return std::filesystem::exists(log_directory(0) + "/decisions.4.log") &&
           !std::filesystem::exists(log_directory(0) + "/decisions.2.log");
  }));
  nodes.clear();
  end(0);
  EXPECT_LE(std::distance(std::filesystem::directory_iterator(log_directory(0)), {}), 3);
}

TEST_F(LostCopy, AFullDiskKeepsNobodyFromStarting) {
  leave_a_copy();
  auto full = membership::Disk::real();
  full.write = [](int, const void*, std::size_t, off_t) -> ssize_t { return errno = ENOSPC, -1; };
  expect_that_it_starts_and_leads({"No space left on device", "Make room"}, full);
  end(0);
  ASSERT_TRUE(start(0));  // with room it goes on from where it ends
  ASSERT_TRUE(commit_more(3));
  nodes.clear();
  ASSERT_TRUE(until([&] { return servers[0]->machine().position() == store.end(); }));
  end(0);
  EXPECT_EQ(copy_of(0).size(), store.end());
}

TEST_F(LostCopy, ADirectoryThatCantBeMadeKeepsNobodyFromStarting) {
  leave_a_copy();
  std::filesystem::remove_all(log_directory(0));
  std::ofstream(log_directory(0)) << "a file\n";
  expect_that_it_starts_and_leads({log_directory(0), "see to the disk"});
}

// What can be read of it has been decided, wherever the damage is: a store without that has lost it.
TEST_F(LostCopy, WhatCanBeReadOfItIsNotForgottenWhereTheStoreIs) {
  for (const std::streamoff damaged : {150, 30}) {
    leave_a_copy();
    nodes.clear();
    end(1);
    const auto before = copy_of(0).size();
    damage(damaged);
    store = {};
    ASSERT_TRUE(start(0));
    ASSERT_TRUE(until([&] { return !why_failed[0].empty(); }));
    EXPECT_NE(why_failed[0].find("the store holds nothing of this job"), std::string::npos) << why_failed[0];
    const auto legible = membership::legible_records(log_directory(0));
    EXPECT_EQ(legible.has_value(), damaged > 100) << "the first record is longer than that";
    if (legible) EXPECT_LT(legible->size(), before);
    else EXPECT_NE(why_failed[0].find("can't be read (" + legible.error().message), std::string::npos) << why_failed[0];
    end(0);
    why_failed.assign(2, "");
    store = {};
    for (std::size_t i = 0; i < 2; ++i) std::filesystem::remove_all(log_directory(i));
  }
}

TEST_F(LostCopy, WhereItIsCutOrTakenAwayInUseTheJobGoesOnAndTheWordsSaySo) {
  ASSERT_TRUE(start(0));
  start_nodes();
  ASSERT_TRUE(commit_more(5));
  std::filesystem::remove(file());
  ASSERT_TRUE(until([&] { return servers[0]->status().at("store").at("copy") != ""; }));
  for (const char* part : {"was removed or moved away", "What counts is in the store"})
    EXPECT_NE(alarm(0).find(part), std::string::npos) << alarm(0);
  EXPECT_EQ(alarm(0).find("checkpoint"), std::string::npos) << alarm(0);
  ASSERT_TRUE(commit_more(5));
  end(0);
  ASSERT_TRUE(start(0));
  ASSERT_TRUE(commit_more(5));
  std::filesystem::resize_file(file(), 50);
  ASSERT_TRUE(until([&] { return servers[0]->status().at("store").at("copy") != ""; }));
  EXPECT_NE(alarm(0).find("was cut"), std::string::npos) << alarm(0);
  EXPECT_EQ(alarm(0).find("checkpoint"), std::string::npos) << alarm(0);
  ASSERT_TRUE(commit_more(5));
}

// The process ends then all the same: nothing waits for the copy.
TEST_F(LostCopy, OneWhoseDiskStandsStillIsLeftToItself) {
  struct Standing {
    std::atomic<bool> stands{false}, written{false};
  };
  const auto standing = std::make_shared<Standing>();  // the thread outlives this test
  auto disk = membership::Disk::real();
  disk.write = [standing](int fd, const void* bytes, std::size_t size, off_t at) {
    while (standing->stands) std::this_thread::yield();
    const auto result = ::pwrite(fd, bytes, size, at);
    standing->written = true;
    return result;
  };
  const std::string in = log_directory(0);
  std::filesystem::create_directories(in);
  auto copy = LogCopy::open(in, disk, 20ms);
  ASSERT_TRUE(copy) << copy.error().message;
  standing->stands = true;
  standing->written = false;
  proto::LogRecord snapshot;
  snapshot.mutable_snapshot()->set_position(1);
  (*copy)->begin_with(snapshot);
  copy->reset();
  EXPECT_FALSE(standing->written);
  standing->stands = false;
  EXPECT_TRUE(until([&] { return standing->written.load(); })) << "it ends by itself when its disk goes on";
}

TEST_F(LostCopy, OneThatAnotherProcessHasOpenIsAnError) {
  const auto other = membership::Log::open(log_directory(0));
  ASSERT_TRUE(other);
  const auto refused = start(0);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("in use by another coordinator"), std::string::npos)
      << refused.error().message;
}

}  // namespace
}  // namespace rejoin::daemon
