// The daemon of a node, between a coordinator and trainers that are this test's.
#include "daemon/node_server.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <spdlog/sinks/ostream_sink.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "base/log.h"
#include "base/refusals.h"
#include "daemon/tests/held_end.h"
#include "daemon/tests/one_node.h"
#include "daemon/tests/watches.h"

namespace rejoin::daemon {
namespace {

// The coordinator is on this machine.
TEST_F(OneNode, TellsOfWhoListensEverywhereByAnAddressOfTheFamilyThatItListensOn) {
  start(std::chrono::seconds(20), "tcp", {.data_listen = "0.0.0.0:0", .advertise = ""});
  const auto hosts = transport::or_loopback(transport::own_hosts());
  RawTrainer first(socket), second(socket);
  first.listens = "0.0.0.0:7001";
  second.listens = "10.1.2.3:7002|[::]:7003";
  first.card = "its secret 172.17.0.1:7004", first.card_listening = "its secret 0.0.0.0:7004";
  second.card = "what it likes";
  first.register_as(0);
  second.register_as(1);
  const auto up = [this](std::uint32_t replica) {
    return std::ranges::find_if(
        reports, [&](const auto& one) { return one.has_rank_up() && one.rank_up().replica() == replica; });
  };
  ASSERT_TRUE(comes_true([&] { return up(0) != reports.end() && up(1) != reports.end(); }));
  EXPECT_EQ(up(0)->rank_up().address(), hosts.v4 + ":7001");
  EXPECT_EQ(up(0)->rank_up().card(), "its secret " + hosts.v4 + ":7004");
  EXPECT_EQ(up(0)->rank_up().card_listening(), "");
  EXPECT_EQ(up(1)->rank_up().card(), "what it likes");
  EXPECT_TRUE(up(0)->rank_up().stream_address().starts_with("tcp=" + hosts.v4 + ":")) << up(0)->DebugString();
  EXPECT_EQ(up(1)->rank_up().address(), "10.1.2.3:7002|" + transport::with_own_host_for_any({"[::]:7003"}, hosts).text);
}

TEST_F(OneNode, LeavesItsThreadToOthersBetweenTheMessagesOfOneThatSendsWithoutEnd) {
  start(std::chrono::seconds(20));
  RawTrainer trainer(socket);
  register_as(0, trainer);
  const std::string bytes = heartbeat().SerializeAsString();
  while (send_with_fds(trainer.socket, as_bytes(bytes), {}))
    ;
  const int before = trainer.unread();
  EXPECT_TRUE(comes_true([&] { return trainer.unread() < before; }));
  EXPECT_GT(trainer.unread(), before / 4);
  EXPECT_TRUE(comes_true([&] { return trainer.unread() == 0; }));
}

TEST_F(OneNode, TellsOfAllThatHaveLeftBeforeItEnds) {
  start(std::chrono::seconds(20));
  RawTrainer first(socket), second(socket);
  register_as(0, first);
  register_as(1, second);
  bool ends = false;
  server->retire([&] { ends = true; });
  proto::FromTrainer leave;
  leave.mutable_leave();
  first.say(leave);
  second.say(leave);
  EXPECT_TRUE(comes_true([&] { return ends; }));
  EXPECT_EQ(std::ranges::count_if(reports, [](const auto& one) { return one.has_rank_down(); }), 2);
}

// With some such trainers at once it would be silent for its coordinator.
TEST_F(OneNode, LeavesItsThreadToOthersWhileAStateOfManyTensorsIsRead) {
  const auto cpu_time = [](clockid_t of) {
    timespec time;
    EXPECT_EQ(::clock_gettime(of, &time), 0);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  };
  std::vector<local::Tensor> tensors;
  for (int i = 0; i < 16384; ++i) tensors.push_back({.name = std::string(150, 'n') + std::to_string(i), .count = 1});
  start(std::chrono::seconds(60), "tcp");
  RawTrainer trainer(socket);
  trainer.owner = *local::Owner::make(*local::Manifest::make(tensors));
  trainer.register_as(0);
  const auto process = cpu_time(CLOCK_PROCESS_CPUTIME_ID), thread = cpu_time(CLOCK_THREAD_CPUTIME_ID);
  ASSERT_TRUE(comes_true([&] {
    const auto heard = trainer.hear();
    return heard && heard->has_welcome();
  }));
  const auto of_process = cpu_time(CLOCK_PROCESS_CPUTIME_ID) - process;
  EXPECT_LT(2 * (cpu_time(CLOCK_THREAD_CPUTIME_ID) - thread), of_process);
}

// The system still cleans up behind it.
struct AProcessThatEnds : OneNode {
  void is_heard_of(milliseconds silence, bool hangs_up) {
    start(silence);
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    const Fd here(ends[0]), there(ends[1]);
    const test::HeldEnd process(test::HeldEnd::First::stays, [&] {
      const Fd its = std::move(*connect_unix(socket));
      (void)send_with_fds(there, as_bytes("its socket"), {its.get()});
    });
    if (!process.traced()) GTEST_SKIP() << "ptrace is forbidden here";
    RawTrainer trainer(std::move(receive_with_fds(here, 64).value()->fds.at(0)));
    register_as(0, trainer);
    process.kill();
    if (hangs_up) trainer.socket.reset();
    ASSERT_TRUE(comes_true([&] { return down() != reports.end(); }));
    EXPECT_TRUE(down()->rank_down().ended());
    EXPECT_EQ(down()->rank_down().reason(), fmt::format("its process {} ended", process.pid()));
    const auto gone = server->status().at("gone");
    ASSERT_EQ(gone.size(), 1u);
    EXPECT_EQ(gone[0].at("pid"), process.pid());
    EXPECT_EQ(gone[0].at("lives"), false);
  }
};

TEST_F(AProcessThatEnds, IsHeardOfWhenItsSignOfLifeIsLate) { is_heard_of(std::chrono::seconds(2), false); }

TEST_F(AProcessThatEnds, IsHeardOfWhenItsSocketIsClosed) { is_heard_of(std::chrono::minutes(10), true); }

// Stands still in a line of the log of another thread's, until it may go on.
struct StandsStill : spdlog::sinks::sink {
  const std::thread::id main = std::this_thread::get_id();
  std::atomic<bool> stands = false, may_go_on = false;
  void log(const spdlog::details::log_msg&) override {
    if (std::this_thread::get_id() == main) return;
    stands = true;
    stands.notify_all();
    may_go_on.wait(false);
  }
  void flush() override {}
  void set_pattern(const std::string&) override {}
  void set_formatter(std::unique_ptr<spdlog::formatter>) override {}
};

TEST_F(OneNode, AnswersWhoLeavesWhenTheThreadThatWritesIntoItsMemoryHasEndedThat) {
  const auto sink = std::make_shared<StandsStill>();
  auto& sinks = spdlog::default_logger()->sinks();
  sinks.push_back(sink);
  start(std::chrono::seconds(20), "tcp");
  RawTrainer trainer(socket);
  register_as(0, trainer);
  const auto up = [this] { return std::ranges::find_if(reports, &proto::FromNode::has_rank_up); };
  ASSERT_TRUE(comes_true([&] { return up() != reports.end(); }));
  const std::string address = up()->rank_up().stream_address();
  asio::ip::tcp::socket stranger(io);
  stranger.connect({asio::ip::make_address("127.0.0.1"),
                    static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)))});
  asio::write(stranger, asio::buffer(std::string(4096, 'x')));
  ASSERT_TRUE(comes_true([&] { return sink->stands.load(); }));
  proto::FromTrainer leave;
  leave.mutable_leave();
  trainer.say(leave);
  trainer.say(heartbeat());  // an earlier library does
  EXPECT_TRUE(comes_true([&] { return std::ranges::any_of(reports, &proto::FromNode::has_rank_down); }))
      << "the others wait for nothing";
  io.run_for(milliseconds(100));
  const auto before = trainer.hear();
  EXPECT_FALSE(before && before->has_left());
  sink->may_go_on = true;
  sink->may_go_on.notify_all();
  EXPECT_TRUE(comes_true([&] {
    const auto heard = trainer.hear();
    return heard && heard->has_left();
  }));
  server.reset();
  sinks.pop_back();
}

// As of a notebook's cell that is run twice. What the first has said and nobody has read yet is no hang-up.
TEST_F(OneNode, RefusesASecondSessionOfOneProcessForAPlaceWhileTheFirstLives) {
  start(std::chrono::seconds(20));
  RawTrainer first(socket), second(socket);
  register_as(0, first);
  const std::string bytes = heartbeat().SerializeAsString();
  second.instance = 2;
  second.register_as(0);
  std::optional<proto::ToTrainer> heard;
  EXPECT_TRUE(comes_true([&] {
    while (send_with_fds(first.socket, as_bytes(bytes), {}))
      ;
    return (heard = second.hear()).has_value();
  }));
  EXPECT_NE(heard->refusal().find("is replica 0 rank 0 already, by another session"), std::string::npos)
      << heard->DebugString();
  EXPECT_FALSE(first.hung_up());
  first.socket.reset();
  RawTrainer third(socket);
  third.instance = 3;
  third.register_as(0);
  EXPECT_TRUE(comes_true([&] { return (heard = third.hear()).has_value(); }));
  EXPECT_TRUE(heard->has_welcome()) << heard->DebugString();
}

// What is wrong with it is the offer, whatever code its error has.
TEST_F(OneNode, CountsAnOfferWithoutSealsAsAnOffer) {
  start(std::chrono::seconds(20));
  const auto counted = [](refusals::Why why) { return refusals::counted()[static_cast<std::size_t>(why)]; };
  const auto offers = counted(refusals::Why::offer), places = counted(refusals::Why::place);
  RawTrainer trainer(socket);
  const Fd unsealed(::memfd_create("description", MFD_CLOEXEC));
  trainer.register_as(0, {unsealed.get()});
  EXPECT_TRUE(
      comes_true([&] { return counted(refusals::Why::offer) + counted(refusals::Why::place) > offers + places; }));
  EXPECT_EQ(counted(refusals::Why::offer), offers + 1);
  EXPECT_EQ(counted(refusals::Why::place), places);
}

std::size_t descriptors() {
  std::size_t count = 0;
  DIR* open = ::opendir("/proc/self/fd");
  while (::readdir(open) != nullptr) ++count;
  ::closedir(open);
  return count;
}

TEST_F(OneNode, LeavesItsThreadToOthersWhileManyCome) {
  start(std::chrono::seconds(20));
  std::vector<Fd> callers;
  for (int i = 0; i < 100; ++i) callers.push_back(*connect_unix(socket));
  const std::size_t before = descriptors();
  EXPECT_TRUE(comes_true([&] { return descriptors() > before; }));
  EXPECT_LT(descriptors(), before + 100);
  EXPECT_TRUE(comes_true([&] { return descriptors() >= before + 200; }));
}

// It was read no further, though its process and its socket were well, and put out for its silence.
TEST_F(OneNode, DropsATrainerAtOnceWhoseMessageIsTooLong) {
  start(std::chrono::seconds(60));
  RawTrainer trainer(socket);
  register_as(0, trainer);
  const int size = 1 << 20;
  ASSERT_EQ(::setsockopt(trainer.socket.get(), SOL_SOCKET, SO_SNDBUF, &size, sizeof size), 0);
  proto::FromTrainer message = heartbeat();
  message.mutable_report()->mutable_accusation()->set_what(std::string(513 * KiB, 'x'));
  if (!send_with_fds(trainer.socket, as_bytes(message.SerializeAsString()), {}))
    GTEST_SKIP() << "net.core.wmem_max is too small for a local message of 513 KiB";
  EXPECT_TRUE(comes_true([&] { return trainer.hung_up(); }));
}

struct GoneTrainers : OneNode {
  void leaves(const RawTrainer& trainer) {
    proto::FromTrainer leave;
    leave.mutable_leave();
    trainer.say(leave);
    ASSERT_TRUE(comes_true([&] { return trainer.hung_up(); }));
  }
  void say(const proto::ToNode& message) { coordinator.send(node, message.SerializeAsString()); }
  void plan(std::uint64_t epoch, std::uint64_t incarnation) {
    proto::ToNode message;
    auto& plan = *message.mutable_plan();
    plan.set_job(7);
    plan.set_epoch(epoch);
    auto& member = *plan.add_members();
    member.set_replica(0);
    member.set_incarnation(incarnation);
    say(message);
    ASSERT_TRUE(comes_true([&] { return server->status().at("epoch") == epoch; }));
  }
  nlohmann::json gone() const { return server->status().at("gone"); }
  void has_gone_of_another_job(bool registered_later);
};

TEST_F(GoneTrainers, AreToldOfUntilAnotherHasTheirPlaceElsewhere) {
  start(std::chrono::seconds(20));
  RawTrainer trainer(socket);
  register_as(0, trainer);
  proto::ToNode answer;
  auto& registered = *answer.mutable_registered();
  registered.set_instance(1);
  registered.set_incarnation(3);
  registered.set_job(7);
  say(answer);
  plan(1, 3);
  EXPECT_TRUE(gone().empty());
  leaves(trainer);
  ASSERT_EQ(gone().size(), 1u);
  EXPECT_EQ(gone()[0].at("reason"), "of its own accord");
  EXPECT_EQ(gone()[0].at("lives"), true);
  plan(2, 3);
  EXPECT_EQ(gone().size(), 1u) << "that is the one that has gone";
  RawTrainer second(socket);
  register_as(0, second);
  EXPECT_TRUE(gone().empty());
  leaves(second);
  EXPECT_EQ(gone().size(), 1u) << "it had not been registered";
  plan(3, 4);
  EXPECT_TRUE(gone().empty());
}

void GoneTrainers::has_gone_of_another_job(bool registered_later) {
  start(std::chrono::seconds(20));
  RawTrainer trainer(socket);
  register_as(9, trainer);
  proto::ToNode answer;
  auto& refused = *answer.mutable_refused();
  refused.set_replica(9);
  refused.set_instance(10);
  refused.set_why(static_cast<std::uint32_t>(refusals::Why::job));
  say(answer);
  ASSERT_TRUE(comes_true([&] {
    const auto heard = trainer.hear();
    return heard && heard->control().has_refused();
  }));
  if (registered_later) {
    auto& registered = *answer.mutable_registered();
    registered.set_replica(9);
    registered.set_instance(10);
    registered.set_incarnation(3);
    say(answer);
    ASSERT_TRUE(comes_true([&] {
      const auto heard = trainer.hear();
      return heard && heard->control().has_registered();
    }));
  }
  leaves(trainer);
  EXPECT_EQ(gone().size(), registered_later ? 1u : 0u);
}

TEST_F(GoneTrainers, AreNoneThatAreNoPartOfTheJob) { has_gone_of_another_job(false); }

TEST_F(GoneTrainers, AreThoseThatAnotherCoordinatorHasRefusedBefore) { has_gone_of_another_job(true); }

TEST_F(GoneTrainers, AreForgottenWhereTheyAreTooMany) {
  start(std::chrono::seconds(20));
  constexpr std::uint32_t most = 256;
  for (std::uint32_t replica = 0; replica <= most; ++replica) {
    RawTrainer trainer(socket);
    register_as(replica, trainer);
    leaves(trainer);
  }
  ASSERT_EQ(gone().size(), most);
  EXPECT_EQ(gone()[0].at("replica"), 1);
}

TEST_F(OneNode, RefusesATrainerForWhomTheSystemHasNoWatchLeftAndTakesTheNext) {
  start(std::chrono::seconds(20));
  for (const int which : {1, 2}) {  // its socket's, its process's
    const test::NoWatch none(which);
    const RawTrainer trainer(socket);
    EXPECT_TRUE(comes_true([&] { return trainer.hung_up(); })) << which;
    EXPECT_TRUE(none.has_come());
  }
  RawTrainer trainer(socket);
  register_as(0, trainer);
}

TEST_F(OneNode, LogsOnceAMinuteThatAnotherUserCalls) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  start(std::chrono::seconds(20));
  std::ostringstream log;
  auto& sinks = spdlog::default_logger()->sinks();
  sinks.push_back(std::make_shared<spdlog::sinks::ostream_sink_mt>(log));
  for (int call = 0; call < 3; ++call) {
    ASSERT_EQ(::syscall(SYS_setresuid, -1, 65534, -1), 0);  // this thread alone
    const RawTrainer stranger(socket);
    ASSERT_EQ(::syscall(SYS_setresuid, -1, 0, -1), 0);
    EXPECT_TRUE(comes_true([&] { return stranger.hung_up(); }));
  }
  sinks.pop_back();
  EXPECT_EQ(server->status().at("rejected"), 3);
  const std::string line = "a local connection of user 65534 was refused; this daemon serves user 0\n";
  EXPECT_NE(log.str().find(line), std::string::npos) << log.str();
  EXPECT_EQ(log.str().find(line), log.str().rfind(line)) << log.str();
}

}  // namespace
}  // namespace rejoin::daemon
