// rejoind, the CLI and the minimal trainer as a user meets them: bad input, garbage, refusals, status.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <future>
#include <map>
#include <random>
#include <regex>
#include <set>

#include "base/unix_socket.h"
#include "local.pb.h"
#include "local/page.h"
#include "membership/log.h"
#include "membership/node.h"
#include "rejoin/session.h"
#include "tests/daemons.h"

namespace rejoin::test {
namespace {

const std::string kMinimal = binaries() + "/rejoin-minimal";

struct Job : Daemons {
  std::vector<std::unique_ptr<Process>> processes;

  void start(std::uint32_t replicas, std::uint64_t steps) {
    processes.push_back(start_coordinator(
        {"--replicas", std::to_string(replicas), "--ranks", "1", "--batch", "8", "--steps", std::to_string(steps)}));
    for (std::uint32_t r = 0; r < replicas; ++r) processes.push_back(start_node(r, {"--connect", coordinator}));
  }
  std::vector<std::string> environment(std::uint32_t replica) const {
    return {"REJOIN_REPLICA=" + std::to_string(replica), "REJOIN_RANK=0", "REJOIN_SOCKET=" + socket(replica)};
  }
};

TEST(Minimal, TwoReplicasLearnAndEndWithTheSameBits) {
  Job job;
  job.start(2, 300);
  Process first({kMinimal}, job.scratch.path + "/a", job.environment(0)),
      second({kMinimal}, job.scratch.path + "/b", job.environment(1));
  EXPECT_EQ(first.wait(std::chrono::seconds(30)), 0) << first.output();
  EXPECT_EQ(second.wait(std::chrono::seconds(30)), 0) << second.output();
  EXPECT_EQ(first.output(), second.output());
  EXPECT_NE(first.output().find("w = 3.0000 after step 300"), std::string::npos) << first.output();
  const Ended audit = run({kCli, "audit", job.scratch.path + "/log/decisions.log"});
  EXPECT_EQ(audit.status, 0) << audit.output;
  EXPECT_NE(audit.output.find("300 steps committed"), std::string::npos) << audit.output;
  EXPECT_NE(audit.output.find("4800 trained once, 0 lost, 0 repeated"), std::string::npos) << audit.output;
}

// Of a trainer that knows nothing of events, by a variable alone.
TEST(Minimal, ItsStepsAreInTheTraceBesideTheDaemons) {
  Job job;
  const std::string events = job.file("events");
  job.processes.push_back(
      job.start_coordinator({"--replicas", "1", "--ranks", "1", "--steps", "20", "--events", events}));
  job.processes.push_back(job.start_node(0, {"--connect", job.coordinator, "--events", events}));
  auto environment = job.environment(0);
  environment.push_back("REJOIN_EVENTS=" + events);
  Process trainer({kMinimal}, job.file("trainer"), environment);
  ASSERT_EQ(trainer.wait(std::chrono::seconds(30)), 0) << trainer.output();
  const std::string trace = job.file("trace.json");
  const Ended merged = run({kCli, "trace", events, "-o", trace});
  ASSERT_EQ(merged.status, 0) << merged.output;
  std::map<int, std::string> rows;
  std::set<std::string> spans;
  const auto json = nlohmann::json::parse(read_file(trace));
  for (const auto& event : json.at("traceEvents")) {
    const int pid = event.at("pid");
    if (event.at("ph") == "M") rows[pid] = event.at("args").at("name");
    if (event.at("ph") == "X" && rows.at(pid).starts_with("r0.0.")) spans.insert(event.at("name"));
  }
  ASSERT_EQ(rows.size(), 3u) << merged.output;
  for (const char* phase : {"compute", "reduce", "commit", "update"})
    for (const char* step : {" 1", " 20"}) EXPECT_TRUE(spans.contains(phase + std::string(step))) << phase << step;
  const Ended refused = run({kMinimal}, {job.environment(0)[0], job.environment(0)[2], "REJOIN_EVENTS=/dev/null/no"});
  EXPECT_NE(refused.output.find("event file /dev/null/no/r0.0."), std::string::npos) << refused.output;
}

// One trainer's session, on a weight of 1000 elements; a step adds its number.
std::unique_ptr<Session> small_session(const Job& job, std::uint32_t replica) {
  SessionConfig config;
  config.replica = replica;
  config.socket = job.socket(replica);
  auto session = *Session::open(config);
  const TensorId w = *session->add({.name = "w", .count = 1000});
  (void)*session->bucket({w});
  if (!session->allocate()) return nullptr;
  return session->join() ? std::move(session) : nullptr;
}

Result<> commit(Session& session) {
  return session.commit([&](const Update& update) {
    const auto w = Session::as<float>(*session.weight(update.tensor));
    for (std::uint64_t i = update.first; i < update.first + update.count; ++i) w[i] += static_cast<float>(update.step);
  });
}

// The only contributor dies in a step in which a joiner has caught up: nobody else holds the state, and nothing is
// lost.
TEST(Session, AJoinerThatHasCaughtUpTakesOverTheStepWhoseLastContributorDies) {
  Job job;
  job.silence_ms = "10000";  // however long a crowded machine takes
  job.start(2, 0);
  int go[2];
  ASSERT_EQ(::pipe(go), 0);
  const pid_t first = ::fork();  // it computes each step until it may go on
  if (first == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    auto session = small_session(job, 0);
    char may = 0;
    for (auto step = session->begin_step(); step && *step; step = session->begin_step())
      if (::read(go[0], &may, 1) != 1 || !session->all_reduce(0) || !commit(*session)) break;
    ::_exit(1);
  }
  std::uint64_t committed = 0;
  const auto let_it_commit = [&] {
    EXPECT_EQ(::write(go[1], "x", 1), 1);
    ++committed;
    EXPECT_TRUE(eventually([&] { return job.status().at("committed") == committed; })) << job.status().dump();
  };
  auto second = small_session(job, 1);
  ASSERT_NE(second, nullptr);
  ASSERT_TRUE(*second->begin_step());
  second.reset();
  second = small_session(job, 1);  // its next instance
  ASSERT_NE(second, nullptr);
  while (!HasFailure() && job.status().at("members").size() < 2) let_it_commit();
  // As a joiner, until it has to contribute.
  std::atomic<std::uint64_t> joined_at = 0;
  auto joining = std::async(std::launch::async, [&] {
    for (;;) {
      auto step = second->begin_step();
      if (!step || !*step || (*step)->contributes()) return step;
      joined_at = (*step)->number();
      EXPECT_EQ(second->position().error().code, ErrorCode::unavailable) << "its state is of no one step";
      if (!commit(*second)) return step;
    }
  });
  // What has arrived is brought up to date with the next commit, and verified then.
  const auto caught_up = [&] { return job.status().at("registered").at(1).at("caught_up") == true; };
  do let_it_commit();
  while (!HasFailure() && !eventually(caught_up, std::chrono::seconds(2)));
  ASSERT_EQ(job.status().at("members").at(1).at("role"), "catching_up");
  ASSERT_TRUE(eventually([&] { return joined_at == committed + 1; })) << "it has begun the step as a joiner";
  const std::string source = job.addresses("node0").at("status");
  const auto serving = [&] {
    const Ended told = run({kCli, "status", "--json", source});
    return nlohmann::json::parse(told.output).at("node_role").at("serving").size();
  };
  EXPECT_TRUE(eventually([&] { return serving() == 1; }));
  ::kill(first, SIGKILL);
  ::waitpid(first, nullptr, 0);
  const auto step = joining.get();
  ASSERT_TRUE(step && *step);
  EXPECT_TRUE((*step)->contributes());
  EXPECT_TRUE(eventually([&] { return serving() == 0; })) << "nobody is served any more, and the status says so";
  EXPECT_EQ((*step)->number(), committed + 1);
  EXPECT_EQ(second->version(), committed) << "and updated nothing";
  const auto position = second->position();
  ASSERT_TRUE(position) << position.error().message;
  EXPECT_EQ(position->step(), committed);
  EXPECT_FALSE((*step)->batch().empty());
  ASSERT_TRUE(second->all_reduce(0));
  ASSERT_TRUE(commit(*second));
  EXPECT_EQ(second->version(), committed + 1);
  for (const float w : Session::as<float>(*second->weight({0})))
    ASSERT_EQ(w, static_cast<float>((committed + 1) * (committed + 2) / 2)) << "the sum of all steps' numbers";
  EXPECT_EQ(job.status().at("steps_rolled_back"), 0);
}

// More descriptors than go in one message, and more names than one holds.
TEST(Session, AStateOfManyTensorsInManyAllocationsIsServed) {
  Job job;
  job.start(1, 3);
  SessionConfig config;
  config.socket = job.socket(0);
  std::vector<Mapping> memory;  // outlives the session
  auto session = *Session::open(config);
  std::vector<TensorId> ids;
  for (int i = 0; i < 4000; ++i) {
    const TensorSpec spec{.name = fmt::format("{:0>150}", i), .count = 64, .moments = 1};
    if (i < 300) memory.push_back(*Mapping::shareable(512));
    const auto id = i < 300 ? session->add(spec, {memory.back().span().first(256), memory.back().span().subspan(256)})
                            : session->add(spec);
    ASSERT_TRUE(id) << id.error().message;
    ids.push_back(*id);
  }
  ASSERT_TRUE(session->bucket(ids));
  ASSERT_TRUE(session->allocate());
  EXPECT_EQ(session->moment(ids[7], 0)->data(), memory[7].data() + 256);
  if (auto joined = session->join(); !joined) FAIL() << joined.error().message;
  std::uint64_t steps = 0, updates = 0;
  for (auto step = session->begin_step(); step && *step; step = session->begin_step(), ++steps) {
    ASSERT_TRUE(session->all_reduce(0));
    ASSERT_TRUE(session->commit([&](const Update&) { ++updates; }));
  }
  EXPECT_EQ(steps, 3u);
  EXPECT_EQ(updates, 3 * ids.size());
  EXPECT_EQ(run({kCli, "status", job.coordinator_status}).status, 0);
}

// Every rank on a node of its own, a relay for each replica: one alone in its process, one beside a node. A relay that
// is killed and started again costs nobody his place.
TEST(Relay, ReplicasOfManyNodesGoThroughItAndOutliveIt) {
  Job job;
  job.silence_ms = "10000";  // however long a crowded machine takes to start a process
  job.processes.push_back(job.start_coordinator({"--replicas", "2", "--ranks", "2", "--batch", "8"}));
  const auto relay = [&](const std::string& at) {
    return job.daemon("relay", {"--relay", at, "--connect", job.coordinator});
  };
  auto first_relay = relay("127.0.0.1:0");
  const std::string first = job.addresses("relay").at("relay");
  const auto node = [&](std::uint32_t n, std::vector<std::string> more) {
    job.processes.push_back(job.start_node(n, std::move(more)));
  };
  node(0, {"--connect", first});
  node(1, {"--connect", first});
  node(2, {"--relay", "127.0.0.1:0", "--connect", job.coordinator});
  node(3, {"--connect", job.addresses("node2").at("relay")});
  for (std::uint32_t n = 0; n < 4; ++n)
    job.processes.push_back(std::make_unique<Process>(
        std::vector{kMinimal}, job.scratch.path + "/trainer" + std::to_string(n),
        std::vector{"REJOIN_REPLICA=" + std::to_string(n / 2), "REJOIN_RANK=" + std::to_string(n % 2),
                    "REJOIN_SOCKET=" + job.socket(n)}));
  const auto committed = [&] { return job.status().at("committed").get<std::uint64_t>(); };
  ASSERT_TRUE(eventually([&] { return committed() > 20; })) << job.status().dump();
  EXPECT_EQ(job.status().at("nodes"), 2) << "the relays";
  const auto epoch = job.status().at("epoch");
  first_relay.reset();
  first_relay = relay(first);
  const auto then = committed();
  EXPECT_TRUE(eventually([&] { return committed() > then + 20; })) << job.status().dump();
  EXPECT_EQ(job.status().at("epoch"), epoch) << "nobody was lost";
}

TEST(Status, TellsForWhomTheJobWaits) {
  Job job;
  job.silence_ms = "6000";  // long enough to be asked
  job.start(2, 0);
  Process first({kMinimal}, job.scratch.path + "/a", job.environment(0));
  ASSERT_TRUE(eventually([&] {
    return run({kCli, "status", job.coordinator_status}).output.find("replica 1: 0 of 1 ranks have registered") !=
           std::string::npos;
  }));
  Process second({kMinimal}, job.scratch.path + "/b", job.environment(1));
  ASSERT_TRUE(eventually([&] {
    const auto status = job.status();
    return !status.is_null() && status.at("committed").get<int>() > 10;
  }));
  // A stopped trainer is named while the others wait for it, and they are not: in mid-step, or for the commit, where it
  // was stopped after it had given them all of its step.
  ::kill(second.pid(), SIGSTOP);
  std::string told, while_it_was_a_member;
  EXPECT_TRUE(eventually([&] {
    told = run({kCli, "status", job.coordinator_status}).output;
    if (told.find("\n  1  ") != std::string::npos) while_it_was_a_member = told;
    return told.find("waits for replica 1 rank 0: its reduction of step") != std::string::npos &&
           (told.find("; replica 0 waits for it: ") != std::string::npos ||
            std::regex_search(told, std::regex("\n  0 +[0-9]+ +contributor +1\n")));
  })) << while_it_was_a_member;
  EXPECT_EQ(told.find("waits for replica 0"), std::string::npos) << told;
}

// It gets what those get that the end has met: no step.
TEST(Session, ATrainerThatComesAfterTheEndHearsThatItIsOver) {
  Job job;
  job.start(1, 5);
  const Ended first = run({kMinimal}, job.environment(0), std::chrono::seconds(30));
  ASSERT_EQ(first.status, 0) << first.output;
  const auto comes_late = [&] {
    const Ended late = run({kMinimal}, job.environment(0), std::chrono::seconds(30));
    EXPECT_EQ(late.status, 0) << late.output;
    EXPECT_NE(late.output.find("the job was finished with step 5 before"), std::string::npos) << late.output;
    const std::string status = run({kCli, "status", job.coordinator_status}).output;
    EXPECT_NE(status.find("finished"), std::string::npos) << status;
    EXPECT_EQ(status.find("waits for"), std::string::npos) << status;
    EXPECT_EQ(job.status().at("blocked_on").size(), 0u);
  };
  comes_late();
  job.processes[0] = nullptr;
  job.processes[0] = job.start_coordinator({"--replicas", "1", "--ranks", "1", "--batch", "8", "--steps", "5",
                                            "--listen", job.coordinator, "--status", job.coordinator_status});
  comes_late();
}

TEST(Session, AnOrderlyEndIsNoWarning) {
  Job job;
  job.start(2, 20);
  {
    Process first({kMinimal}, job.file("a"), job.environment(0)), second({kMinimal}, job.file("b"), job.environment(1));
    ASSERT_EQ(first.wait(std::chrono::seconds(30)), 0) << first.output();
    ASSERT_EQ(second.wait(std::chrono::seconds(30)), 0) << second.output();
    EXPECT_EQ(first.output().find("warning"), std::string::npos) << first.output();
  }
  const auto log = [&](const char* name) { return read_file(job.file(std::string(name) + ".out")); };
  EXPECT_TRUE(eventually([&] {
    return log("node0").find("replica 0 rank 0 has left: the job is finished") != std::string::npos &&
           log("coordinator").find("replica 1 has left the finished job") != std::string::npos;
  })) << log("node0")
      << log("coordinator");
  ASSERT_EQ(::kill(job.processes[0]->pid(), SIGTERM), 0);
  EXPECT_EQ(job.processes[0]->wait(std::chrono::seconds(15)), 0);
  EXPECT_TRUE(eventually([&] { return log("node1").find("; the job is finished") != std::string::npos; }))
      << log("node1");
  for (const char* name : {"coordinator", "node0", "node1"})
    EXPECT_EQ(log(name).find("warn"), std::string::npos) << log(name);
}

TEST(Session, ATrainerThatWasStoppedSaysForHowLongAndThatItWasPutOut) {
  Job job;
  job.start(2, 0);
  Process first({kMinimal}, job.file("a"), job.environment(0)), second({kMinimal}, job.file("b"), job.environment(1));
  const auto committed = [&] { return job.status().value("committed", 0); };
  ASSERT_TRUE(eventually([&] { return committed() > 5; }));
  ::kill(second.pid(), SIGSTOP);
  ASSERT_TRUE(eventually([&] { return job.status().at("members").size() == 1; }));
  const int then = committed();
  ASSERT_TRUE(eventually([&] { return committed() > then + 5; }));
  ::kill(second.pid(), SIGCONT);
  EXPECT_EQ(second.wait(std::chrono::seconds(15)), 3) << second.output();
  EXPECT_NE(second.output().find(" s, so the daemon put it out (no sign of life for 1000 ms); it registers again"),
            std::string::npos)
      << second.output();
  EXPECT_NE(second.output().find(" s, and its replica was put out of the job: "), std::string::npos) << second.output();
  EXPECT_EQ(second.output().find("the daemon is gone"), std::string::npos) << second.output();
}

// Of two trainers with the same replica and rank the first stays, at one daemon and at two.
TEST(Session, ASecondTrainerForAPlaceIsRefusedAndTheFirstGoesOn) {
  Job job;
  job.start(2, 0);
  auto first = std::make_unique<Process>(std::vector{kMinimal}, job.file("a"), job.environment(0));
  Process other({kMinimal}, job.file("b"), job.environment(1));
  const auto committed = [&] { return job.status().value("committed", 0); };
  ASSERT_TRUE(eventually([&] { return committed() > 5; }));
  const auto epoch = job.status().at("epoch");
  for (const std::uint32_t node : {0u, 1u}) {
    const Ended second = run({kMinimal}, {"REJOIN_REPLICA=0", "REJOIN_RANK=0", "REJOIN_SOCKET=" + job.socket(node)},
                             std::chrono::seconds(15));
    EXPECT_NE(second.status, 0) << second.output;
    const auto who = node == 0 ? fmt::format("process {} of this node, node0, is replica 0 rank 0", first->pid())
                               : fmt::format("process {} on node node0 is replica 0 rank 0", first->pid());
    EXPECT_NE(second.output.find(who), std::string::npos) << second.output;
  }
  const int then = committed();
  EXPECT_TRUE(eventually([&] { return committed() > then + 5; }));
  EXPECT_EQ(job.status().at("epoch"), epoch) << first->output();
  // The next one after a kill is taken at once, at either daemon.
  for (const std::uint32_t node : {1u, 0u}) {
    first.reset();
    first = std::make_unique<Process>(
        std::vector{kMinimal}, job.file("again" + std::to_string(node)),
        std::vector<std::string>{"REJOIN_REPLICA=0", "REJOIN_RANK=0", "REJOIN_SOCKET=" + job.socket(node)});
    EXPECT_TRUE(eventually([&] {
      const auto members = job.status().at("members");
      return members.size() == 2 && members[0].at("role") == members[1].at("role");
    })) << first->output()
        << job.status().dump();
  }
}

TEST(Metrics, AreServedInPrometheusFormat) {
  Job job;
  job.start(1, 0);
  const auto colon = job.coordinator_status.rfind(':');
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(std::stoi(job.coordinator_status.substr(colon + 1))));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const std::string request = "GET /metrics HTTP/1.1\r\n\r\n";
  ASSERT_EQ(::send(fd, request.data(), request.size(), 0), static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[4096];
  for (ssize_t n; (n = ::recv(fd, buffer, sizeof buffer, 0)) > 0;) answer.append(buffer, static_cast<std::size_t>(n));
  ::close(fd);
  EXPECT_NE(answer.find("# TYPE rejoin_committed_step gauge"), std::string::npos) << answer;
}

TEST(Garbage, OnEveryPortIsRefusedAndChangesNothing) {
  Job job;
  job.start(1, 400);
  std::mt19937 random(7);
  const auto feed_tcp = [&](const std::string& where) {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(std::stoi(where.substr(where.rfind(':') + 1))));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    std::string bytes(random() % 5000 + 1, '\0');
    for (auto& c : bytes) c = static_cast<char>(random());
    (void)::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    ::close(fd);
  };
  const auto feed_unix = [&](const std::string& bytes) {
    const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof address.sun_path, "%s", job.socket(0).c_str());
    ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    (void)::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    ::close(fd);
  };
  Process trainer({kMinimal}, job.scratch.path + "/a", job.environment(0));
  for (int i = 0; i < 50; ++i) {
    feed_tcp(job.coordinator);
    feed_tcp(job.coordinator_status);
    std::string bytes(random() % 3000 + 1, '\0');
    for (auto& c : bytes) c = static_cast<char>(random());
    feed_unix(bytes);
    // Well-formed but meaningless: a hello of another version; one whose descriptors are none, or not what they should
    // be, or no state; more of them than were announced, or without a hello.
    proto::FromTrainer hello, more;
    hello.mutable_hello()->set_protocol(random() % 3);
    feed_unix(hello.SerializeAsString());
    hello.mutable_hello()->set_protocol(membership::kProtocolVersion);
    hello.mutable_hello()->set_layout(local::kLayoutVersion);
    hello.mutable_hello()->set_device("host");
    hello.mutable_hello()->set_descriptors(static_cast<std::uint32_t>(random() % 5));
    more.mutable_more();
    const Fd description = *make_sealed_memfd("description", bytes.size()), eventfd = *make_eventfd();
    (void)Mapping::of(description, bytes.size()).map([&](const Mapping& mapped) {
      std::memcpy(mapped.data(), bytes.data(), bytes.size());
    });
    std::vector<int> fds(random() % 5, eventfd.get());
    if (!fds.empty()) fds[0] = description.get();
    Fd socket = *connect_unix(job.socket(0));
    if (random() % 4 > 0) (void)send_with_fds(socket, as_bytes(hello.SerializeAsString()), fds);
    (void)send_with_fds(socket, as_bytes(more.SerializeAsString()), fds);
    proto::FromTrainer report;
    report.mutable_report()->mutable_reduced()->set_epoch(random());
    feed_unix(report.SerializeAsString());
    proto::FromTrainer leave;  // of somebody who never came
    leave.mutable_leave()->set_why(bytes);
    feed_unix(leave.SerializeAsString());
  }
  EXPECT_EQ(trainer.wait(std::chrono::seconds(30)), 0) << trainer.output();
  EXPECT_EQ(run({kCli, "status", job.coordinator_status}).status, 0);
}

TEST(BadInput, EachGetsOneLineThatSaysWhatAndHowToMendIt) {
  Scratch scratch;
  const std::string key = scratch.key();
  const auto expect = [&](std::vector<std::string> arguments, const std::string& what,
                          std::vector<std::string> environment = {}) {
    const Ended ended = run(std::move(arguments), std::move(environment), std::chrono::seconds(20));
    EXPECT_NE(ended.status, 0) << what;
    EXPECT_LT(ended.status, 128) << ended.output;
    EXPECT_NE(ended.output.find(what), std::string::npos) << ended.output;
  };
  expect({kDaemon, "--no-such-flag"}, "not expected: --no-such-flag");
  expect({kDaemon}, "--job-key-file is required");
  expect({kDaemon, "--job-key-file", key, "--config", scratch.write("unknown", "replicas = 3\nreplica = 4\n")},
         "no setting is called 'replica'; the nearest is 'replicas'");
  expect({kDaemon, "--job-key-file", key, "--config", scratch.write("section", "[node]\nsilence-ms = 4000\n")},
         "no setting is called 'node.silence-ms'; the nearest is 'silence-ms'");
  expect({kDaemon, "--job-key-file", key}, "nothing to do: give --coordinator, or --socket");
  expect({kDaemon, "--job-key-file", scratch.path + "/none", "--coordinator"}, "No such file");
  expect({kDaemon, "--job-key-file", scratch.write("open", "0123456789abcdef0123", 0644), "--coordinator"},
         "chmod 600");
  expect({kDaemon, "--job-key-file", scratch.write("short", "abc"), "--coordinator"}, "use at least 16");
  expect({kDaemon, "--job-key-file", key, "--socket", "@x" + scratch.path},
         "needs the coordinator's address: --connect");
  expect(
      {kDaemon, "--job-key-file", key, "--coordinator", "--listen", "nowhere", "--log-directory", scratch.path + "/l1"},
      "not of the form host:port");
  expect({kDaemon, "--job-key-file", key, "--socket", scratch.path + "/s", "--connect", "127.0.0.1:1", "--transport",
          "pigeon"},
         "no transport 'pigeon': use shm, tcp, tcp:ADDRESS,ADDRESS…, ibverbs");
  expect({kMinimal}, "no daemon socket: set SessionConfig::socket, --socket or REJOIN_SOCKET");
  expect({kMinimal}, "start rejoind on this node with --socket", {"REJOIN_SOCKET=" + scratch.path + "/nobody.sock"});
  expect({kMinimal}, "REJOIN_* settings", {"REJOIN_REPLICA=first"});
  expect({kMinimal}, "no device is called 'gpu': there are host, cuda",
         {"REJOIN_SOCKET=" + scratch.path + "/nobody.sock", "REJOIN_DEVICE=gpu"});
  expect({kCli, "status", "127.0.0.1:1"}, "no daemon answers at 127.0.0.1:1");
  expect({kDaemon, "--job-key-file", key, "--coordinator", "--listen", "127.0.0.1:99999"},
         "--listen: address '127.0.0.1:99999': its port '99999' is not a number from 0 to 65535");
  expect({kDaemon, "--job-key-file", key, "--coordinator"}, "--steps: '-1'", {"REJOIN_STEPS=-1"});
  expect({kCli, "status", "127.0.0.1:99999"}, "its port '99999' is not a number from 0 to 65535");
  expect({kCli, "top", "127.0.0.1:1", "--count", "-1"}, "--count: '-1' is not a whole number");
  expect({kCli, "audit", scratch.path + "/none"}, "No such file");
  expect({kCli, "trace", scratch.path}, "no events in");
  std::filesystem::create_directory(scratch.path + "/full");
  std::filesystem::create_symlink("/dev/full", scratch.path + "/full/decisions.log");
  expect({kDaemon, "--job-key-file", key, "--coordinator", "--log-directory", scratch.path + "/full"}, "decisions.log");
}

// A trainer, and a daemon at its socket that does what the test says.
struct Greeted {
  Scratch scratch;
  const std::string path = scratch.path + "/daemon.sock";
  const Fd listener = *listen_unix(path);
  Process trainer{{kMinimal}, scratch.path + "/out", {"REJOIN_SOCKET=" + path}};
  Fd connection;

  bool accepted() {
    return eventually([&] {
      connection = Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      return static_cast<bool>(connection);
    });
  }
  bool heard(proto::FromTrainer& message) {
    return eventually([&] {
      const auto received = receive_with_fds(connection, 512 * KiB);
      return received && received->has_value() &&
             message.ParseFromArray((*received)->bytes.data(), static_cast<int>((*received)->bytes.size()));
    });
  }
  bool welcomes(std::uint32_t protocol, std::uint64_t silence_ms) {
    proto::ToTrainer message;
    message.mutable_welcome()->set_protocol(protocol);
    message.mutable_welcome()->set_silence_ms(silence_ms);
    return send_with_fds(connection, as_bytes(message.SerializeAsString()), {}).has_value();
  }
};

// A daemon of another version at the trainer's socket: answers each hello with its own welcome.
TEST(BadInput, ATrainerUnderADaemonOfAnotherVersionEndsAndSaysSo) {
  Greeted daemon;
  ASSERT_TRUE(daemon.accepted()) << daemon.trainer.output();
  proto::FromTrainer hello;
  ASSERT_TRUE(daemon.heard(hello));
  ASSERT_TRUE(daemon.welcomes(membership::kProtocolVersion + 1, 0));
  EXPECT_EQ(daemon.trainer.wait(std::chrono::seconds(10)), 1) << daemon.trainer.output();
  EXPECT_NE(daemon.trainer.output().find("use one version of both"), std::string::npos) << daemon.trainer.output();
}

// A daemon may take its time to get at a trainer's memory, and ignores what is said meanwhile.
TEST(Session, ATrainerSaysNothingToADaemonThatHasNotWelcomedIt) {
  Greeted daemon;
  for (int time = 0; time < 2; ++time) {
    ASSERT_TRUE(daemon.accepted()) << daemon.trainer.output();
    proto::FromTrainer message;
    ASSERT_TRUE(daemon.heard(message));
    ASSERT_TRUE(message.has_hello());
    pollfd readable{daemon.connection.get(), POLLIN, 0};
    EXPECT_EQ(::poll(&readable, 1, 300), 0);  // many heartbeats
    ASSERT_TRUE(daemon.welcomes(membership::kProtocolVersion, 200));
    ASSERT_TRUE(daemon.heard(message));
    EXPECT_TRUE(message.report().has_heartbeat());
  }
}

TEST(Top, ShowsDaemonsAgainAndAgain) {
  Job job;
  job.start(1, 0);
  Process trainer({kMinimal}, job.scratch.path + "/a", job.environment(0));
  ASSERT_TRUE(eventually([&] {
    return run({kCli, "status", job.coordinator_status}).output.find("step 0 committed") == std::string::npos;
  }));
  const std::string node = job.addresses("node0").at("status");
  const Ended top =
      run({kCli, "top", job.coordinator_status, node, "127.0.0.1:1", "--count", "3", "--interval-ms", "50"});
  EXPECT_EQ(top.status, 0) << top.output;
  EXPECT_NE(top.output.find("steps a second"), std::string::npos) << top.output;
  EXPECT_NE(top.output.find("replica 0 rank 0 pid"), std::string::npos) << top.output;
  EXPECT_NE(top.output.find("no daemon answers at 127.0.0.1:1"), std::string::npos) << top.output;
}

// Neither is wrong: the daemon that answers late, or the address.
TEST(Status, ADaemonThatIsStoppedIsSaidToBeSilent) {
  Job job;
  job.start(1, 0);
  const Ended wrong = run({kCli, "status", job.coordinator});  // where daemons connect
  EXPECT_NE(wrong.output.find("is not a Rejoin daemon"), std::string::npos) << wrong.output;
  ASSERT_EQ(::kill(job.processes.front()->pid(), SIGSTOP), 0);
  Process top({kCli, "top", job.coordinator_status, "--count", "1"}, job.file("top.out"));
  const Ended status = run({kCli, "status", job.coordinator_status});
  EXPECT_EQ(status.status, 1);
  EXPECT_EQ(top.wait(std::chrono::seconds(30)), 0);
  const std::string silent = job.coordinator_status + " accepted the connection and did not answer in 5 s";
  for (const auto& output : {status.output, top.output()}) EXPECT_NE(output.find(silent), std::string::npos) << output;
}

// Somebody has removed the first one's file, and a second daemon has bound the path.
TEST(Node, ThatEndsLeavesTheSocketOfTheNextOneAlone) {
  Job job;
  job.start(1, 0);
  std::filesystem::remove(job.socket(0));
  std::filesystem::remove(job.file("node0.json"));
  const auto second = job.start_node(0, {"--connect", job.coordinator});
  Process& first = *job.processes.back();
  ASSERT_EQ(::kill(first.pid(), SIGTERM), 0);
  EXPECT_EQ(first.wait(std::chrono::seconds(15)), 0) << first.output();
  EXPECT_TRUE(connect_unix(job.socket(0))) << "the second one's trainers can't reach it";
  ASSERT_EQ(::kill(second->pid(), SIGTERM), 0);
  EXPECT_EQ(second->wait(std::chrono::seconds(15)), 0) << second->output();
  EXPECT_FALSE(std::filesystem::exists(job.socket(0))) << "and its own it removes";
}

TEST(Relay, WhoseCoordinatorIsItselfIsRefused) {
  Job job;
  std::string port;
  {  // of a relay that was here before
    const auto before = job.daemon("relay", {"--relay", "127.0.0.1:0", "--connect", "127.0.0.1:1"});
    const std::string address = job.addresses("relay").at("relay");
    port = address.substr(address.rfind(':'));
  }
  for (const char* host : {"127.0.0.1", "0.0.0.0"}) {
    const Ended relay =
        run({kDaemon, "--job-key-file", job.key, "--relay", host + port, "--connect", "127.0.0.1" + port}, {},
            std::chrono::seconds(20));
    EXPECT_EQ(relay.status, 1) << relay.output;
    EXPECT_NE(relay.output.find("--connect 127.0.0.1" + port + " leads to this relay itself"), std::string::npos)
        << relay.output;
  }
}

// The log of a job that was killed when a replica had been lost, and its samples had not gone out again.
TEST(Audit, WhatWaitsToBeTrainedAgainIsNotLostUntilTheJobIsFinished) {
  Scratch scratch;
  std::vector<proto::LogRecord> records(3);
  records[0].mutable_job()->set_batch(10);
  records[1].mutable_epoch()->set_epoch(1);
  records[1].mutable_epoch()->set_step(1);
  records[1].mutable_epoch()->add_members()->set_replica(1);
  records[2].mutable_committed()->set_step(1);
  auto& batch = *records[2].mutable_committed()->add_members()->add_batch();
  batch.set_begin(10);
  batch.set_end(20);
  ASSERT_TRUE(membership::Log::open(scratch.path)->append(records));
  const std::string log = scratch.path + "/decisions.log";
  const Ended open = run({kCli, "audit", log});
  EXPECT_EQ(open.status, 0) << open.output;
  EXPECT_NE(open.output.find("20 samples: 10 trained once, 0 lost, 0 repeated, 10 to be trained again"),
            std::string::npos)
      << open.output;
  EXPECT_NE(open.output.find("The log does not tell whether the job is finished."), std::string::npos) << open.output;
  const Ended finished = run({kCli, "audit", log, "--steps", "1"});
  EXPECT_EQ(finished.status, 1) << finished.output;
  EXPECT_NE(finished.output.find("10 trained once, 10 lost, 0 repeated, 0 to be"), std::string::npos)
      << finished.output;
}

TEST(Daemon, OneWhoseStreamGoesOverAnotherTransportIsNamedBeforeItIsNeeded) {
  Job job;
  const auto coordinator = job.start_coordinator({"--replicas", "2", "--ranks", "1", "--batch", "8"});
  const auto first = job.start_node(0, {"--connect", job.coordinator}),
             second = job.start_node(1, {"--connect", job.coordinator, "--transport", "tcp:127.0.0.1,127.0.0.2"});
  Process a({kMinimal}, job.file("a"), job.environment(0)), b({kMinimal}, job.file("b"), job.environment(1));
  EXPECT_TRUE(eventually([&] { return job.status().value("committed", 0) > 2; })) << "what works goes on";
  const auto says = [&](const char* log, const std::string& line) {
    EXPECT_TRUE(eventually([&] { return read_file(job.file(log)).find(line) != std::string::npos; }))
        << read_file(job.file(log));
  };
  says("node0.out", "the catch-up stream of replica 1's daemon goes over tcp over 2 rails, and this node's over shm");
  says("node1.out", "the catch-up stream of replica 0's daemon goes over shm, and this node's over tcp over 2 rails");
  says("node1.out", "Start all daemons of a job with the same --transport");
  const std::string log = read_file(job.file("node0.out"));
  const auto once = log.find("neither replica can catch up");
  EXPECT_EQ(log.find("neither replica can catch up", once + 1), std::string::npos) << log;
}

// A daemon in a container of its own: the kernel has no number for its trainers there.
TEST(Trainer, OfAnotherPidNamespaceTakesPartAndTheDaemonSaysWhatThatCosts) {
  if (::geteuid() != 0) GTEST_SKIP() << "a PID namespace needs root";
  Job job;
  job.silence_ms = "20000";  // its end shows by its socket, long before
  const auto coordinator = job.start_coordinator({"--replicas", "2", "--ranks", "1", "--batch", "8"});
  std::vector<std::unique_ptr<Process>> daemons;
  for (std::uint32_t node = 0; node < 2; ++node) {
    const std::string name = "node" + std::to_string(node);
    daemons.push_back(std::make_unique<Process>(
        std::vector<std::string>{"/usr/bin/unshare", "--pid", "--fork", "--kill-child", kDaemon, "--job-key-file",
                                 job.key, "--name", name, "--address-file", job.file(name + ".json"), "--silence-ms",
                                 job.silence_ms, "--socket", job.socket(node), "--connect", job.coordinator,
                                 "--transport", "tcp"},
        job.file(name + ".out")));
    job.addresses(name);
  }
  Process first({kMinimal}, job.file("first"), job.environment(0));
  auto second = std::make_unique<Process>(std::vector{kMinimal}, job.file("second"), job.environment(1));
  const auto members = [&] { return job.status().value("members", nlohmann::json::array()).size(); };
  ASSERT_TRUE(eventually([&] { return job.status().value("committed", 0) > 2; })) << job.status().dump();
  const std::string log = read_file(job.file("node1.out"));
  EXPECT_NE(log.find("PID namespace that this daemon doesn't see"), std::string::npos) << log;
  EXPECT_NE(log.find("hostPID: true"), std::string::npos) << log;
  second.reset();
  EXPECT_TRUE(eventually([&] { return members() == 1; })) << "its end is known without its silence";
  second = std::make_unique<Process>(std::vector{kMinimal}, job.file("again"), job.environment(1));
  EXPECT_TRUE(eventually([&] { return members() == 2 && job.status()["members"][1]["role"] == "contributor"; }))
      << second->output();
  Process twin({kMinimal}, job.file("twin"), job.environment(1));
  EXPECT_EQ(twin.wait(std::chrono::seconds(15)), 1) << "a place is one process's\n" << twin.output();
  EXPECT_EQ(members(), 2u);
}

TEST(Settings, ArePrintedInFullAtStart) {
  Job job;
  job.start(1, 0);
  const std::string output = read_file(job.scratch.path + "/node0.out");
  for (const char* setting : {"silence-ms=1000", "compression=\"auto\"", "stream-limit=0", "socket=", "listen="})
    EXPECT_NE(output.find(setting), std::string::npos) << setting << " is not in:\n" << output;
}

TEST(BadInput, APortOrSocketInUseIsNamed) {
  Job job;
  job.start(1, 0);
  const Ended port = run({kDaemon, "--job-key-file", job.key, "--coordinator", "--listen", job.coordinator,
                          "--log-directory", job.scratch.path + "/other"});
  EXPECT_NE(port.output.find("can't listen on " + job.coordinator), std::string::npos) << port.output;
  const Ended log =
      run({kDaemon, "--job-key-file", job.key, "--coordinator", "--log-directory", job.scratch.path + "/log"});
  EXPECT_NE(log.output.find("in use by another coordinator"), std::string::npos) << log.output;
  const Ended socket =
      run({kDaemon, "--job-key-file", job.key, "--socket", job.socket(0), "--connect", job.coordinator});
  EXPECT_NE(socket.output.find("in use by a running process"), std::string::npos) << socket.output;
}

TEST(BadInput, AnotherJobKeyIsRefusedOnBothSides) {
  Job job;
  job.start(1, 0);
  const std::string other = job.scratch.write("other", "another key, long enough");
  Process stranger(
      {kDaemon, "--job-key-file", other, "--socket", job.scratch.path + "/x.sock", "--connect", job.coordinator},
      job.scratch.path + "/x.out");
  EXPECT_TRUE(eventually([&] {
    return stranger.output().find("its job key differs from ours; give both the same --job-key-file") !=
           std::string::npos;
  })) << stranger.output();
}

// The demo's trainer declares other tensors than the minimal one.
std::vector<std::string> demo_trainer(const Job& job, std::uint32_t replica) {
  return {binaries() + "/rejoin-demo-trainer",
          "--replica",
          std::to_string(replica),
          "--socket",
          job.socket(replica),
          "--data",
          REJOIN_DATA};
}

TEST(BadInput, ATrainerWithAnotherStateOrPlaceIsRefusedWithTheReason) {
  Job job;
  job.start(3, 0);
  Process other(demo_trainer(job, 1), job.file("other"));  // the first to come is not right for that
  ASSERT_TRUE(eventually([&] {
    return run({kCli, "status", job.coordinator_status}).output.find("replica 1: 0 of 1") == std::string::npos;
  }));
  const Ended outside = run({kMinimal}, {"REJOIN_REPLICA=9", "REJOIN_RANK=0", "REJOIN_SOCKET=" + job.socket(1)});
  EXPECT_NE(outside.output.find("outside this job of 3 replicas"), std::string::npos) << outside.output;
  Process first({kMinimal}, job.file("a"), job.environment(0)), third({kMinimal}, job.file("c"), job.environment(2));
  EXPECT_GT(other.wait(std::chrono::seconds(15)), 0) << other.output();
  const std::string why = "tensors or buckets differ from those of replicas 0, 2: tensor '";
  EXPECT_NE(other.output().find(why), std::string::npos) << other.output();
  EXPECT_TRUE(eventually([&] { return job.status().at("committed") > 5; })) << job.status().dump();
  const std::string status = run({kCli, "status", job.coordinator_status}).output;
  EXPECT_NE(status.find("REFUSED replica 1 rank 0: its " + why), std::string::npos) << status;
  EXPECT_NE(read_file(job.file("coordinator.out")).find(why), std::string::npos);
}

TEST(BadInput, WithoutAMajorityOfEqualStatesTheStatusSaysWhoDiffersInWhat) {
  Job job;
  job.start(2, 0);
  Process other(demo_trainer(job, 1), job.file("other")), first({kMinimal}, job.file("a"), job.environment(0));
  std::string status;
  EXPECT_TRUE(eventually([&] {
    status = run({kCli, "status", job.coordinator_status}).output;
    return status.find("replica 0 and replica 1 declare different things") != std::string::npos &&
           status.find("differ from those of replica 0: tensor '") != std::string::npos;
  })) << status;
  EXPECT_EQ(first.output() + other.output(), "") << "both wait";
}

// Over shared memory and over TCP no ring can be made of them.
TEST(BadInput, ATrainerWithAnotherTransportIsRefusedWithBoth) {
  Job job;
  job.start(3, 0);
  auto environment = job.environment(1);
  environment.push_back("REJOIN_TRANSPORT=tcp");
  Process first({kMinimal}, job.file("a"), job.environment(0)), other({kMinimal}, job.file("b"), environment),
      third({kMinimal}, job.file("c"), job.environment(2));
  EXPECT_GT(other.wait(std::chrono::seconds(15)), 0) << other.output();
  EXPECT_NE(other.output().find("it all-reduces over tcp in chunks of 1048576 bytes, 4 in flight, up to 32768 bytes "
                                "direct, and replicas 0, 2 over shm in"),
            std::string::npos)
      << other.output();
}

// Both are TCP, and what goes over several rails is no plain connection.
TEST(BadInput, TrainersWithOtherRailsAreNamedWithBoth) {
  Job job;
  job.start(2, 0);
  auto plain = job.environment(0), rails = job.environment(1);
  plain.push_back("REJOIN_TRANSPORT=tcp");
  rails.push_back("REJOIN_TRANSPORT=tcp:127.0.0.1,127.0.0.2");
  Process first({kMinimal}, job.file("a"), plain), second({kMinimal}, job.file("b"), rails);
  EXPECT_TRUE(eventually([&] {
    return run({kCli, "status", job.coordinator_status})
               .output.find("of replica 1, it all-reduces over tcp over 2 rails in") != std::string::npos;
  }));
  EXPECT_EQ(first.output() + second.output(), "") << "nobody tries to connect";
}

// Started in another working directory, say: the default --log-directory is a relative one.
TEST(Log, OfAnotherJobCostsNobodyItsState) {
  Job job;
  job.start(2, 0);
  Process first({kMinimal}, job.scratch.path + "/a", job.environment(0)),
      second({kMinimal}, job.scratch.path + "/b", job.environment(1));
  const auto committed = [&] { return job.status().value("committed", std::uint64_t{0}); };
  ASSERT_TRUE(eventually([&] { return committed() > 20; }));
  const auto again_with = [&](const std::string& directory) {
    job.log_directory = directory;
    ::kill(job.processes[0]->pid(), SIGKILL);
    job.processes[0]->wait(std::chrono::seconds(10));
    job.processes[0] = job.start_coordinator({"--replicas", "2", "--ranks", "1", "--batch", "8", "--listen",
                                              job.coordinator, "--status", job.coordinator_status});
  };
  again_with("elsewhere");
  EXPECT_TRUE(eventually([&] {
    return run({kCli, "status", job.coordinator_status}).output.find("start the coordinator with that job's") !=
           std::string::npos;
  })) << run({kCli, "status", job.coordinator_status}).output;
  again_with("log");
  const auto before = committed();
  EXPECT_GT(before, 20u);
  EXPECT_TRUE(eventually([&] { return committed() > before + 20; }));
  EXPECT_EQ(first.output() + second.output(), "");
}

// The trainers have a GPU, of software; the daemons were started without its driver, and need none.
TEST(Gpu, ADaemonHasNoContextOnItsTrainersGpu) {
  Job job;
  job.start(2, 0);
  const auto trainer = [&](std::uint32_t replica, const char* output) {
    return std::make_unique<Process>(
        std::vector<std::string>{binaries() + "/rejoin-demo-trainer", "--replica", std::to_string(replica), "--socket",
                                 job.socket(replica), "--data", REJOIN_DATA, "--device", "cuda:0", "--params", "20000"},
        job.scratch.path + output, std::vector<std::string>{"LD_LIBRARY_PATH=" REJOIN_FAKE_CUDA});
  };
  const auto both_contribute = [&] {
    const auto members = job.status().at("members");
    return members.size() == 2 && members[0].at("role") == "contributor" && members[1].at("role") == "contributor";
  };
  const auto first = trainer(0, "/a");
  auto second = trainer(1, "/b");
  ASSERT_TRUE(eventually(both_contribute)) << first->output() << second->output();
  second.reset();
  ASSERT_TRUE(eventually([&] { return job.status().at("members").size() == 1; }));
  second = trainer(1, "/c");
  EXPECT_TRUE(eventually(both_contribute, std::chrono::seconds(60))) << job.status().dump() << second->output();
  // A daemon that is killed and comes back serves the state again.
  job.processes[1] = nullptr;
  job.processes[1] = job.start_node(0, {"--connect", job.coordinator});
  second.reset();
  ASSERT_TRUE(eventually([&] { return job.status().at("members").size() == 1; }));
  second = trainer(1, "/d");
  EXPECT_TRUE(eventually(both_contribute, std::chrono::seconds(10))) << job.status().dump() << "\nfirst:\n"
                                                                     << first->output() << "\nsecond:\n"
                                                                     << second->output() << "\ndaemon:\n"
                                                                     << job.processes[1]->output() << "\ncoordinator:\n"
                                                                     << job.processes[0]->output();
  for (const auto& process : job.processes)
    EXPECT_EQ(read_file(fmt::format("/proc/{}/maps", process->pid())).find("libcuda"), std::string::npos);
}

}  // namespace
}  // namespace rejoin::test
