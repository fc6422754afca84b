// What `rejoin doctor` makes of what its probes find out.
#include <gtest/gtest.h>

#include <cerrno>
#include <map>
#include <nlohmann/json.hpp>

#include "base/fail.h"
#include "daemon/doctor.h"

namespace rejoin::daemon {
namespace {

using Verdict = Finding::Verdict;

// A node on which everything is right; each test breaks something.
struct DoctorFindings : testing::Test {
  DoctorSettings s;
  SocketFacts socket{.own_user = 7, .user = 7, .process = 100, .answer = ""};
  std::vector<CoordinatorFacts> coordinators{
      {.address = "c0:7000", .proven = true, .answered = true, .milliseconds = 1, .remote = true}};
  std::map<std::string, HostFacts> hosts{{"10.0.0.3", {.own = true}},
                                         {"127.0.0.1", {.loopback = true, .own = true}},
                                         {"0.0.0.0", {.own = true}},
                                         {"10.0.0.99", {}},
                                         {"nowhere", {.unresolved = "its name is not resolved: no such name"}}};
  LimitFacts limits{.memlock = 8 * 1024 * 1024, .descriptors = 1024, .descriptors_at_most = 4096};
  Result<> locked;
  Result<> peer;
  Result<std::vector<PortFacts>> ports = std::vector<PortFacts>{{.name = "mlx5_0:1",
                                                                 .why = "",
                                                                 .unregistered = "",
                                                                 .gid = "::ffff:10.0.0.3",
                                                                 .gid_index = 3,
                                                                 .mtu = 4096,
                                                                 .most_mtu = 4096,
                                                                 .ethernet = true}};
  Result<GpuFacts> gpus = GpuFacts{.names = {"NVIDIA H200 (CUDA device 0)"}, .peer_memory = true, .dma_buf = true};
  Result<StoreFacts> store = StoreFacts{.milliseconds = {2, 3, 4}};
  Result<> key;

  DoctorFindings() {
    s.key_file = "/key";
    s.socket = "/run/rejoin.sock";
    s.coordinators = "c0:7000";
    s.transport = "ibverbs";
    s.data_listen = "0.0.0.0:7100";
    s.peers = {"10.0.0.4:7100"};
    s.store.store = "etcd:e0:2379";
    s.store.job = "train";
  }
  Findings all() {
    Probes probes;
    probes.keys = [this](const std::string&, const std::string&) -> Result<JobKeys> {
      if (!key) return tl::unexpected(key.error());
      return JobKeys(JobKey("0123456789abcdef"));
    };
    probes.socket = [this](const std::string&) { return socket; };
    probes.coordinators = [this](const std::string&, const JobKeys&) { return coordinators; };
    probes.host = [this](const std::string& host) { return hosts.at(host); };
    probes.own_host_towards = [](const std::string&) { return "10.0.0.3"; };
    probes.peer = [this](const std::string&, const JobKeys&) { return peer; };
    probes.limits = [this] { return limits; };
    probes.lock_memory = [this](std::uint64_t) { return locked; };
    probes.ports = [this] { return ports; };
    probes.gpus = [this] { return gpus; };
    probes.store = [this] { return store; };
    return examine(s, probes);
  }
  // All lines of one check that say this of it.
  std::string lines(const std::string& check) {
    std::string found;
    for (const auto& one : all())
      if (one.check == check) found += line_of(one) + "\n";
    return found;
  }
  void expect(const std::string& check, const std::string& verdict, std::initializer_list<const char*> says) {
    const auto found = lines(check);
    EXPECT_NE(found.find(fmt::format("{:<4}  {}: ", verdict, check)), std::string::npos) << found;
    for (const auto* one : says) EXPECT_NE(found.find(one), std::string::npos) << one << " in " << found;
  }
};

TEST_F(DoctorFindings, FindsNothingWrongWhereEverythingIsRight) {
  for (const auto& one : all()) EXPECT_EQ(one.verdict, Verdict::ok) << line_of(one);
  EXPECT_EQ(exit_status(all(), true), 0);
}

TEST_F(DoctorFindings, EndsWith2WhereSomethingFailsAndWith1OfWarningsWhereItIsStrict) {
  socket.no_pidfd = "not permitted";
  EXPECT_EQ(exit_status(all(), false), 0);
  EXPECT_EQ(exit_status(all(), true), 1);
  key = fail(ErrorCode::refused, "key /key has mode 0644: others may use it; chmod 600 it");
  EXPECT_EQ(exit_status(all(), false), 2);
  EXPECT_EQ(exit_status(all(), true), 2);
}

TEST_F(DoctorFindings, SaysWhatToDoBehindAnArrowAndTheSameInJson) {
  key = fail(ErrorCode::refused, "key /key has mode 0644: others may use it; chmod 600 it");
  EXPECT_EQ(lines("key"), "FAIL  key: key /key has mode 0644: others may use it -> chmod 600 it\n");
  const auto json = nlohmann::json::parse(json_of(all()));
  const auto first = json.at("findings").at(0);
  EXPECT_EQ(first.at("verdict"), "FAIL");
  EXPECT_EQ(first.at("check"), "key");
  EXPECT_EQ(first.at("found"), "key /key has mode 0644: others may use it");
  EXPECT_EQ(first.at("remedy"), "chmod 600 it");
}

TEST_F(DoctorFindings, SkipsWhatDoesNotApply) {
  s = {};
  s.transport = "tcp";
  ports = fail(ErrorCode::unavailable, "no libibverbs");
  gpus = fail(ErrorCode::unavailable, "no driver");
  for (const auto& one : all())
    EXPECT_EQ(one.verdict, one.check == "descriptors" ? Verdict::ok : Verdict::skipped) << line_of(one);
}

TEST_F(DoctorFindings, WithoutAKeyShowsItToNobody) {
  key = fail(ErrorCode::io, "/key: no such file");
  expect("key", "FAIL", {"no such file -> ", "openssl rand"});
  expect("coordinator", "skipped", {"no key"});
  expect("peer", "skipped", {"no key"});
}

TEST_F(DoctorFindings, TellsWhyASocketCannotBeUsed) {
  for (const auto& [error, says] : {std::pair{ENOENT, "there is no /run/rejoin.sock -> start rejoind"},
                                    {ECONNREFUSED, "nobody listens"},
                                    {EACCES, "may not connect"},
                                    {ENOTSOCK, "no socket"},
                                    {EMFILE, "Too many open files"}}) {
    socket.error = error;
    expect("socket", "FAIL", {says});
  }
}

TEST_F(DoctorFindings, TellsADaemonOfAnotherUserVersionOrNamespace) {
  socket.user = 65534;
  expect("socket", "FAIL", {"of user 65534's daemon, and this is user 7 -> ", "one user"});
  socket.user = 7;
  socket.answer.reset();
  expect("socket", "FAIL", {"process 100", "says nothing in 2000 ms"});
  socket.answer = "the trainer's library speaks protocol 1";
  expect("socket", "FAIL", {"speaks protocol 1 -> use one version"});
  socket.answer = "";
  socket.same_processes = false;
  expect("socket", "WARN", {"another PID namespace", "shareProcessNamespace"});
  s.transport = "shm";
  expect("socket", "FAIL", {"another PID namespace"});
  socket.same_processes = true;
  socket.no_reading = "Operation not permitted";
  expect("socket", "WARN", {"process_vm_readv is refused", "seccomp"});
}

TEST_F(DoctorFindings, TellsWhatIsWrongWithACoordinator) {
  auto& one = coordinators.front();
  one = {.address = "c0:7000", .refused = true, .why = "its job key differs from ours; give both the same"};
  expect("coordinator", "FAIL", {"c0:7000: its job key differs from ours -> give both the same"});
  one = {.address = "c0:7000", .proven = true};
  expect("coordinator", "FAIL", {"another version"});
  one = {.address = "c0:7000"};
  expect("coordinator", "FAIL", {"no answer in 2000 ms -> start the coordinator"});
  one.why = "Connection refused";
  expect("coordinator", "FAIL", {"c0:7000: Connection refused"});
}

TEST_F(DoctorFindings, OneOfSeveralCoordinatorsMayBeAwayAndOneMustLead) {
  coordinators = {
      {.address = "c0:1", .why = "Connection refused"},
      {.address = "c1:1", .proven = true, .answered = true, .one_of_several = true, .leads = true, .term = 4}};
  expect("coordinator", "WARN", {"c0:1: Connection refused", "c1:1: the key is right", "leads in term 4"});
  coordinators[1].stalled = true;
  expect("coordinator", "WARN", {"does not take what it decides"});
  coordinators[1].stalled = coordinators[1].leads = false;
  expect("coordinator", "WARN", {"none of them leads -> "});
  coordinators[1].leader = "c2:1";
  expect("coordinator", "WARN", {"c1:1 says that c2:1 does, in term 4 -> add that one"});
}

TEST_F(DoctorFindings, RefusesToTellOtherMachinesOfTheLoopback) {
  s.data_listen = "127.0.0.1:0";
  expect("advertised", "FAIL", {"127.0.0.1: other nodes can't reach it", "-> --data-listen 0.0.0.0:0"});
  s.advertise = "10.0.0.3";
  expect("advertised", "FAIL", {"told 10.0.0.3, and the daemon listens on 127.0.0.1 alone -> --data-listen"});
  s.data_listen = "0.0.0.0:7100";
  s.advertise = "127.0.0.1";
  expect("advertised", "FAIL", {"127.0.0.1: other nodes can't reach it", "-> --advertise 10.0.0.3"});
  coordinators.front().remote = false;
  expect("advertised", "ok", {"told 127.0.0.1, port 7100"});
}

TEST_F(DoctorFindings, TellsAnAddressThatIsNotOursAndAPortThatNobodyKnows) {
  s.advertise = "10.0.0.99";
  expect("advertised", "WARN", {"no address of this machine", "translated"});
  s.advertise = "nowhere";
  expect("advertised", "FAIL", {"not resolved"});
  s.advertise = "";
  s.data_listen = "0.0.0.0:0";
  expect("advertised", "ok", {"told 10.0.0.3, and a port that the system picks -> ", "firewall"});
  s.transport = "shm";
  expect("advertised", "FAIL", {"catch up over shm -> --transport"});
}

TEST_F(DoctorFindings, TellsWhyAPeerIsNotReached) {
  peer = fail(ErrorCode::timeout, "no answer in 2000 ms");
  expect("peer", "FAIL", {"10.0.0.4:7100: no answer in 2000 ms -> start its rejoind"});
  peer = fail(ErrorCode::invalid_argument, "rail mlx5_0:1: this machine has no RDMA device; is its driver loaded?");
  expect("peer", "FAIL", {"no RDMA device -> is its driver loaded?"});
}

TEST_F(DoctorFindings, ComparesDescriptorsWithWhatTheJobNeeds) {
  s.replicas = 1024;
  s.ranks = 8;
  EXPECT_LT(descriptors_needed(s).trainer, 600u) << "it is not connected with all";
  s.full_mesh_members = 1024;
  const auto needed = descriptors_needed(s);
  EXPECT_GT(needed.trainer, 1024u);
  EXPECT_GT(needed.daemon, 8 * 1024u) << "each rank here catches up from all others at once";
  limits = {.descriptors = needed.trainer - 1, .descriptors_at_most = needed.daemon};
  expect("descriptors", "FAIL", {"a trainer may open", "-> 'ulimit -n"});
  limits.descriptors = needed.trainer;
  expect("descriptors", "ok", {"1024 replicas, and 8 ranks here"});
  limits.descriptors_at_most = needed.daemon - 1;
  expect("descriptors", "FAIL", {"at most", "LimitNOFILE"});
}

TEST_F(DoctorFindings, TriesToLockMemoryWhereItCannotBeRegistered) {
  ports->front().unregistered = "rail mlx5_0:1: registration failed";
  expect("memlock", "FAIL", {"64 MiB on mlx5_0:1", "LimitMEMLOCK"});
  ports->clear();
  locked = fail(ErrorCode::io, "mlock: Cannot allocate memory");
  expect("rdma", "FAIL", {"no RDMA device for --transport ibverbs"});
  expect("memlock", "FAIL", {"the limit is 8.0 MiB", "Cannot allocate memory", "LimitMEMLOCK"});
  for (const auto* without : {"tcp", "ucx:tcp"}) {
    s.transport = without;
    expect("memlock", "skipped", {without, "locks no memory"});
  }
  s.transport = "ucx:rc,tcp";
  expect("memlock", "FAIL", {"can't be locked"});
}

TEST_F(DoctorFindings, TellsWhatIsWrongWithAPort) {
  auto& port = ports->front();
  port.mtu = 1024;
  port.link_local = true;
  expect("rdma", "WARN", {"link-local", "packets of 1024 bytes; it could 4096", "gid=N"});
  port.ethernet = false;
  EXPECT_EQ(lines("rdma").find("WARN"), std::string::npos) << "InfiniBand's GIDs are link-local as a rule";
  port.why = "rail mlx5_0:1: the port is PORT_DOWN; is its link up?";
  expect("rdma", "FAIL", {"PORT_DOWN -> is its link up?"});
  s.transport = "tcp";
  expect("rdma", "WARN", {"PORT_DOWN"});
}

TEST_F(DoctorFindings, TellsWhatIsWrongWithGpus) {
  s.cuda_connections = "1";
  expect("gpu", "WARN", {"CUDA_DEVICE_MAX_CONNECTIONS=1"});
  gpus->peer_memory = gpus->dma_buf = false;
  expect("gpu", "WARN", {"neither nvidia-peermem", "modprobe"});
  gpus->names.clear();
  expect("gpu", "WARN", {"no GPU"});
  gpus = fail(ErrorCode::io, "starting the CUDA driver: unknown error");
  expect("gpu", "FAIL", {"unknown error -> ", "nvidia-smi"});
}

TEST_F(DoctorFindings, TellsAStoreThatIsSlowOrAway) {
  store->milliseconds.push_back(200);
  expect("store", "WARN", {"4 writes", "200.0 ms at most", "SSD"});
  store = fail(ErrorCode::unavailable, "e0:2379: failed to connect");
  expect("store", "FAIL", {"failed to connect -> start etcd"});
  s.store.job = "";
  expect("store", "FAIL", {"--job NAME"});
}

}  // namespace
}  // namespace rejoin::daemon
