// A job's decisions out of a log's files, and into a store.
#include "daemon/log_transfer.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "daemon/log_copy.h"
#include "daemon/tests/memory_store.h"
#include "membership/coordinator.h"
#include "membership/log.h"

namespace rejoin::daemon {
namespace {

proto::LogRecord job_record(std::uint64_t id) {
  proto::LogRecord record;
  record.mutable_job()->set_replicas(2);
  record.mutable_job()->set_ranks(1);
  record.mutable_job()->set_batch(4);
  record.mutable_job()->set_id(id);
  return record;
}

proto::LogRecord incarnated(std::uint64_t incarnation) {
  proto::LogRecord record;
  record.mutable_incarnated()->set_incarnation(incarnation);
  return record;
}

proto::LogRecord led(std::uint64_t term) {
  proto::LogRecord record;
  record.mutable_led()->set_term(term);
  return record;
}

struct Transfer : testing::Test {
  Transfer() {
    char name[] = "/tmp/rejoin-transfer.XXXXXX";
    directory = ::mkdtemp(name);
  }
  ~Transfer() override { std::filesystem::remove_all(directory); }
  std::string write(const std::string& name, const std::vector<proto::LogRecord>& records) {
    auto log = membership::Log::open(directory + "/" + name);
    EXPECT_TRUE(log && log->append(records));
    return directory + "/" + name + "/decisions.log";
  }
  Result<Transferred> import(const std::string& log, bool replace = false,
                             Duration watch = std::chrono::milliseconds(20)) {
    MemoryStore store(io, data);
    return import_log(io, store, log, replace, "job x in memory", "/rejoin/x/", watch);
  }
  proto::Leader leader() const {
    proto::Leader in_store;
    EXPECT_TRUE(in_store.ParseFromString(data.leader));
    return in_store;
  }
  std::string directory;
  asio::io_context io{1};
  MemoryStoreData data;
};

TEST_F(Transfer, AnImportStandsForAllRecordsAndItsTermIsHigherThanAnyBefore) {
  const auto log = write("a", {job_record(7), led(12), incarnated(1), incarnated(2)});
  const auto done = import(log);
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(done->records, 4u);
  EXPECT_EQ(done->job, 7u);
  EXPECT_EQ(data.snapshot_position, 4u);
  EXPECT_EQ(leader().term(), 1012u);
  EXPECT_EQ(leader().instance(), 0u);
  EXPECT_GT(leader().since_ms(), 0u);
  proto::LogRecord snapshot;
  ASSERT_TRUE(snapshot.ParseFromString(data.snapshot));
  EXPECT_EQ(snapshot.snapshot().position(), 4u);
  EXPECT_EQ(snapshot.snapshot().job().id(), 7u);
  EXPECT_EQ(snapshot.snapshot().last_incarnation(), 2u);
}

TEST_F(Transfer, AnImportIsDoneOnceAlsoWhereAnswersAreLost) {
  data.deadline = std::chrono::milliseconds(2);
  data.lose_answers = 2;
  const auto done = import(write("a", {job_record(7), incarnated(1)}));
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(data.snapshot_position, 2u);
  data.stands_still = true;
  const auto late = import(write("b", {job_record(7), incarnated(1)}), true);
  ASSERT_FALSE(late);
  EXPECT_NE(late.error().message.find("job x in memory does not answer: no endpoint"), std::string::npos)
      << late.error().message;
  EXPECT_NE(late.error().message.find("Nothing was written: see to it, and do this again"), std::string::npos);
  EXPECT_EQ(late.error().message.find("--replace"), std::string::npos) << "it was not what the answer lacked";
}

TEST_F(Transfer, AnImportWhoseClaimIsNotAnsweredMayHaveChangedTheLead) {
  data.deadline = std::chrono::milliseconds(2);
  data.lose_answers = 1000;
  const auto late = import(write("a", {job_record(7), incarnated(1)}));
  ASSERT_FALSE(late);
  EXPECT_NE(late.error().message.find("do this again with --replace"), std::string::npos) << late.error().message;
}

TEST_F(Transfer, WhatTheStoreHasIsReplacedOnlyWhereThatIsSaidAndWhereItCanBe) {
  ASSERT_TRUE(import(write("a", {job_record(7), incarnated(1), incarnated(2)})));
  const auto longer = write("b", {job_record(7), incarnated(1), incarnated(2), incarnated(3)});
  const auto shorter = write("c", {job_record(7)});
  const auto revision = data.leader_revision;
  const auto refused = import(longer);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("job x in memory has 3 decisions already"), std::string::npos);
  EXPECT_NE(refused.error().message.find("--replace"), std::string::npos);
  const auto mixed = import(shorter, true);
  ASSERT_FALSE(mixed);
  for (const char* part : {"they would be mixed", "(etcdctl del --prefix /rejoin/x/)"})
    EXPECT_NE(mixed.error().message.find(part), std::string::npos) << mixed.error().message;
  EXPECT_EQ(data.leader_revision, revision) << "nothing is changed";
  const auto done = import(longer, true);
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(data.snapshot_position, 4u);
  EXPECT_EQ(leader().term(), 2000u);
  EXPECT_TRUE(import(longer, true)) << "again";
}

TEST_F(Transfer, AnotherJobsLogIsNotPutInPlaceOfAJobs) {
  ASSERT_TRUE(import(write("a", {job_record(7), incarnated(1)})));
  const auto other = write("b", {job_record(8), incarnated(1), incarnated(2), incarnated(3)});
  const auto expect_refused = [&](const std::string& present) {
    const auto revision = data.revision;
    for (const bool replace : {false, true}) {
      const auto refused = import(other, replace);
      ASSERT_FALSE(refused);
      for (const std::string& part : {present, std::string("is of job 0000000000000008: nothing is changed"),
                                      std::string("(etcdctl del --prefix /rejoin/x/)")})
        EXPECT_NE(refused.error().message.find(part), std::string::npos) << refused.error().message;
    }
    EXPECT_EQ(data.revision, revision);
  };
  expect_refused("job x in memory has 2 decisions of job 0000000000000007, and ");
  data = {};
  proto::LogEntry begins;
  *begins.add_records() = job_record(7);
  data.log[0] = begins.SerializeAsString();
  expect_refused("job x in memory has 1 decisions of job 0000000000000007, and ");
}

// Each import that is refused ends with the leader's next sign, long before the time for it is over.
TEST_F(Transfer, NothingIsImportedUnderALeaderThatShowsThatItLives) {
  constexpr Duration kLong = std::chrono::seconds(20), kShort = std::chrono::milliseconds(1);
  proto::LogEntry begins;
  *begins.add_records() = job_record(7);
  data.log[0] = begins.SerializeAsString();
  proto::Leader leads;
  leads.set_term(1), leads.set_name("c1"), leads.set_address("host:7000"), leads.set_instance(5);
  const auto log = write("a", {job_record(7), incarnated(1)});
  const auto import_under = [&](Duration silence, Duration watch, bool lives) {
    leads.set_silence_ms(static_cast<std::uint64_t>(milliseconds(silence)));
    data.leader = leads.SerializeAsString();
    data.leader_revision = data.alive_revision = ++data.revision;
    asio::steady_timer sign(io);
    const std::function<void()> renew = [&] {
      sign.expires_after(std::chrono::milliseconds(20));
      sign.async_wait([&](asio::error_code) {
        data.alive_revision = ++data.revision;
        if (lives) renew();
      });
    };
    if (lives) renew();
    auto done = import(log, true, watch);
    lives = false;
    io.restart();
    io.run();
    return done;
  };
  for (const auto& [silence, watch] : {std::pair<Duration, Duration>{{}, kLong}, {4 * kLong, kShort}}) {
    const auto refused = import_under(silence, watch, true);
    ASSERT_FALSE(refused);
    EXPECT_NE(refused.error().message.find("c1 at host:7000 leads in job x in memory, and lives: nothing is changed"),
              std::string::npos)
        << refused.error().message;
    EXPECT_EQ(leader().term(), 1u);
  }
  const auto done = import_under({}, kShort, false);
  EXPECT_TRUE(done) << "it has ended: " << done.error().message;
}

// The log of a single coordinator, compacted: nothing says of how many records its snapshot is.
TEST_F(Transfer, ALogWithoutPositionGetsOne) {
  membership::Coordinator machine({.replicas = 2, .ranks = 1, .batch = 4});
  ASSERT_TRUE(machine.replay(job_record(7)));
  const auto done = import(write("a", {machine.snapshot(), incarnated(5)}));
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(data.snapshot_position, 2u);
}

// The copy of a store's decisions, compacted while replicas had shares: its own record for older releases is no
// decision.
TEST_F(Transfer, ACopyIsOfAsManyRecordsAsTheStoreHad) {
  membership::Coordinator machine({.replicas = 2, .ranks = 1, .batch = 4});
  ASSERT_TRUE(machine.replay(job_record(7)));
  auto snapshot = machine.snapshot();
  snapshot.mutable_snapshot()->set_position(40);
  snapshot.mutable_snapshot()->mutable_ledger()->mutable_balance()->set_at_most(1500);
  {
    const auto copy = LogCopy::open(directory + "/a");
    ASSERT_TRUE(copy) << copy.error().message;
    (*copy)->add({job_record(7)});
    (*copy)->begin_with(snapshot);
    (*copy)->add({incarnated(5)});
  }
  const auto again = LogCopy::open(directory + "/a");
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ((*again)->position(), 41u);
  const auto done = import(directory + "/a/decisions.log");
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(data.snapshot_position, 41u);
}

// A snapshot that the copy got from the store stands for more than its archives have.
TEST_F(Transfer, ACopyHasArchivesAsFarAsNothingIsMissing) {
  membership::Coordinator machine({.replicas = 2, .ranks = 1, .batch = 4});
  ASSERT_TRUE(machine.replay(job_record(7)));
  const auto begin_with = [&](LogCopy& copy, std::uint64_t position) {
    auto snapshot = machine.snapshot();
    snapshot.mutable_snapshot()->set_position(position);
    copy.begin_with(snapshot);
  };
  const auto records = [&] {
    auto read = membership::read_log(directory + "/a/decisions.log");
    EXPECT_TRUE(read) << read.error().message;
    return *read;
  };
  {
    const auto copy = LogCopy::open(directory + "/a");
    (*copy)->add({job_record(7), incarnated(1)});
    begin_with(**copy, 2);
    (*copy)->add({incarnated(2)});
    begin_with(**copy, 3);
    (*copy)->add({incarnated(3)});
  }
  EXPECT_EQ(records().size(), 4u);
  EXPECT_TRUE(records().front().has_job());
  {
    const auto copy = LogCopy::open(directory + "/a");
    EXPECT_EQ((*copy)->position(), 4u);
    begin_with(**copy, 40);
    (*copy)->add({incarnated(4)});
    begin_with(**copy, 41);
    (*copy)->add({incarnated(5)});
  }
  ASSERT_EQ(records().size(), 3u);
  EXPECT_EQ(records().front().snapshot().position(), 40u);
  EXPECT_EQ(membership::records_of_job(records()), 42u);
}

// It was full, say: what is in it stays, and the copy goes on.
TEST_F(Transfer, ACopyThatCanNotBeCompactedGoesOnAsItIs) {
  membership::Coordinator machine({.replicas = 2, .ranks = 1, .batch = 4});
  ASSERT_TRUE(machine.replay(job_record(7)));
  auto snapshot = machine.snapshot();
  snapshot.mutable_snapshot()->set_position(2);
  for (const bool has_all : {true, false}) {
    const std::string in = directory + (has_all ? "/all" : "/gap");
    auto disk = membership::Disk::real();
    disk.link = [](const char*, const char*) { return errno = ENOSPC, -1; };
    {
      const auto copy = LogCopy::open(in, disk);
      (*copy)->add({job_record(7), incarnated(1)});
      if (has_all) (*copy)->compact(snapshot);
      else (*copy)->begin_with(snapshot);
      (*copy)->add({incarnated(2)});
    }
    const auto copy = LogCopy::open(in);
    EXPECT_EQ((*copy)->position(), has_all ? 3u : 2u) << "without what lies between, it can't go on";
  }
}

// They are written as they are read, and not when all are there.
TEST_F(Transfer, AnExportOfManyRecordsHasThemAll) {
  std::vector<proto::LogRecord> records{job_record(7)};
  for (std::uint64_t step = 1; step <= 60; ++step) {
    auto& epoch = *records.emplace_back().mutable_epoch();
    epoch.set_epoch(step);
    epoch.set_reason(std::string(100'000, 'r'));
  }
  const auto log = write("a", records), out = directory + "/out";
  const auto done = export_log(log, out);
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(done->records, 61u);
  const auto read = membership::parse_one_file(out);
  ASSERT_TRUE(read) << read.error().message;
  ASSERT_EQ(read->records.size(), 61u);
  for (std::size_t i = 0; i < 61; ++i)
    ASSERT_EQ(read->records[i].SerializeAsString(), records[i].SerializeAsString()) << i;
  EXPECT_GT(read->marked, read->intact);
  const auto damaged = membership::parse_one_file(log)->intact - 10;
  std::fstream(log, std::ios::in | std::ios::out | std::ios::binary).seekp(static_cast<std::streamoff>(damaged)) << '?';
  EXPECT_FALSE(export_log(log, out + "2"));
  EXPECT_FALSE(std::filesystem::exists(out + "2")) << "half of it would pass for all";
}

TEST_F(Transfer, AnExportHasWhatTheArchivesHaveAndOverwritesNothing) {
  membership::Coordinator machine({.replicas = 2, .ranks = 1, .batch = 4});
  for (const auto& record : {job_record(7), incarnated(1)}) ASSERT_TRUE(machine.replay(record));
  {
    auto log = membership::Log::open(directory + "/a");
    ASSERT_TRUE(log && log->append({job_record(7), incarnated(1)}));
    ASSERT_TRUE(log->compact(machine.snapshot()));
    ASSERT_TRUE(log->append({incarnated(2)}));
  }
  const std::string out = directory + "/out";
  const auto done = export_log(directory + "/a/decisions.log", out);
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(done->records, 3u);
  const auto read = membership::parse_one_file(out);
  ASSERT_TRUE(read) << read.error().message;
  ASSERT_EQ(read->records.size(), 3u);
  EXPECT_TRUE(read->records[0].has_job());
  EXPECT_EQ(read->torn, 0u);
  EXPECT_GT(read->marked, read->intact);
  const auto again = export_log(directory + "/a/decisions.log", out);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().message, out + " exists: give a name that nothing has yet");
  std::filesystem::remove(directory + "/a/decisions.1.log");
  const auto rest = export_log(directory + "/a/decisions.log", out + "2");
  ASSERT_TRUE(rest) << rest.error().message;
  EXPECT_EQ(rest->records, 2u);
  const auto imported = import(out);
  ASSERT_TRUE(imported) << imported.error().message;
  EXPECT_EQ(data.snapshot_position, 3u);
}

}  // namespace
}  // namespace rejoin::daemon
