// What `rejoin doctor` makes of what its probes find out.
#include <gtest/gtest.h>

#include <cerrno>
#include <nlohmann/json.hpp>

#include "daemon/tests/authority.h"
#include "daemon/tests/doctor_node.h"

namespace rejoin::daemon {
namespace {

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
  const auto not_text = nlohmann::json::parse(json_of({{Verdict::fail, "key", "/k\xff: No such file", ""}}));
  EXPECT_EQ(not_text.at("findings").at(0).at("found"), "/k\xef\xbf\xbd: No such file");
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

TEST_F(DoctorFindings, NoRemedyForACertificateMakesAKeyOfRandomBytes) {
  const test::Authority authority;
  const auto right = authority.sign("right"), other = authority.sign("other");
  s.certificates = {right.ca, right.cert, other.key};
  expect("key", "FAIL", {"does not belong to --tls-cert", "-> give the key that this certificate was made for"});
  s.certificates = {right.ca, "/nowhere", right.key};
  expect("key", "FAIL", {"--tls-cert /nowhere: No such file or directory -> name a file in PEM form"});
  EXPECT_EQ(lines("key").find("openssl rand"), std::string::npos) << lines("key");
  key = tl::unexpected(check(CertificateFiles{.ca = right.ca, .cert = "", .key = ""}).error());
  expect("key", "FAIL", {"--tls-ca without --tls-cert and --tls-key -> give all three"});
}

TEST_F(DoctorFindings, WarnsOfACertificateThatEndsSoon) {
  const test::Authority authority;
  s.certificates = authority.sign("long", {.from = -3600, .until = 3600});
  EXPECT_EQ(lines("key").find("WARN"), std::string::npos) << lines("key");
  s.certificates = authority.sign("short", {.from = -3600, .until = 600});
  expect("key", "WARN", {"short.pem (CN=short, valid until 20", "ends soon -> renew it"});
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
  socket.user_known = false;
  expect("socket", "FAIL",
         {"does not know: it calls all such users 7, and this one so, too -> ", "a number of its own"});
  socket.user_known = true;
  socket.answer.reset();
  expect("socket", "FAIL", {"process 100", "says nothing in 2000 ms"});
  socket.answer = "the library speaks protocol 1, and this rejoind 15 to 16: upgrade the library first";
  expect("socket", "FAIL", {"speaks protocol 1, and this rejoind 15 to 16 -> upgrade the library"});
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
  one = {.address = "c0:7000", .proven = true, .why = "it refuses this node: it speaks 17: upgrade this rejoind first"};
  expect("coordinator", "FAIL", {"it shows the key, and it refuses this node: it speaks 17 -> upgrade this rejoind"});
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

TEST_F(DoctorFindings, AtSeveralAddressesNobodyMayDecideAlone) {
  coordinators = {{.address = "c0:1", .proven = true, .answered = true}, {.address = "c1:1", .why = "refused"}};
  for (const bool another_leads : {false, true}) {
    coordinators[1].answered = coordinators[1].one_of_several = coordinators[1].leads = another_leads;
    expect("coordinator", "FAIL", {"c0:1: it decides alone (--store file)", "-> --connect takes its address only"});
  }
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

TEST_F(DoctorFindings, TellsAnAddressOfAFamilyThatTheDaemonDoesNotListenOn) {
  s.advertise = "fd00::3";
  expect(
      "advertised", "FAIL",
      {"told fd00::3, over IPv6 alone, and the daemon listens on 0.0.0.0, over IPv4 alone -> --data-listen [::]:7100",
       "or --advertise 10.0.0.3"});
  s.data_listen = "[::]:7100";
  expect("advertised", "ok", {"told fd00::3, port 7100"});
  s.advertise = "";
  own = {.v4 = "10.0.0.3", .v6 = "fd00::3", .v6_first = true};
  expect("advertised", "ok", {"told fd00::3, port 7100"});
  s.data_listen = "0.0.0.0:7100";
  expect("advertised", "ok", {"told 10.0.0.3, port 7100"});
  own.v4.clear();
  expect(
      "advertised", "FAIL",
      {"listens on 0.0.0.0, over IPv4 alone, and this machine has no IPv4 address", "-> --data-listen [::]:7100, or"});
  s.data_listen = "[::]:7100";
  s.advertise = "fe80::3%eth0";
  expect("advertised", "WARN", {"fe80::3%eth0: a link-local address", "-> --advertise fd00::3"});
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

TEST_F(DoctorFindings, TellsWhichWayAPairOfNodesIsNotReached) {
  using enum PathFacts::Reached;
  auto& one = pairs.others.front();
  expect("pair", "ok", {"n1:7100: 64 B there and back in "});
  one.verdict = way(0, 0, nothing);
  expect("pair", "FAIL",
         {"n1:7100: it is reached from here, and does not reach this node at n0:7100: no answer in 2000 ms",
          "-> let this node's firewall pass port 7100"});
  one.verdict.reset();
  expect("pair", "WARN", {"does not say whether"});
  one.paths.front() = way(0, 0, connected);
  expect("pair", "FAIL", {"n1:7100: no answer in 2000 ms -> look at the routes"});
  one.paths.front() = way(0, 0, nothing);
  expect("pair", "FAIL",
         {"it reaches this node, and is not reached from here: no answer", "-> let its firewall pass port"});
  one.came = false;
  expect("pair", "FAIL", {"is not reached from here, and has not come: no answer", "-> run the same command there"});
}

TEST_F(DoctorFindings, TellsOfAPathThatPassesLittle) {
  using enum PathFacts::Reached;
  auto& one = pairs.others.front();
  one.paths.front() = way(0, 0, small);
  expect("pair", "FAIL",
         {"n1:7100: 64 B ok, 1 MiB: no answer in 2000 ms -> MTU or PFC on the path", "ping -M do -s SIZE n1"});
  one.paths.front() = way(0, 0, sent);
  expect("pair", "FAIL", {"64 B ok, 1 MiB arrives, and does not come back: no answer", "MTU or PFC"});
  one.paths.front() = way(0, 0);
  one.verdict = way(0, 0, small);
  expect("pair", "FAIL", {"its way to this node: 64 B ok, 1 MiB: no answer", "MTU or PFC"});
  one.verdict = way(0, 0);
  one.paths.front().mtu_there = 1024;
  expect("pair", "WARN", {"packets of 4096 bytes here (ibverbs:mlx5_0), and of 1024 there"});
}

TEST_F(DoctorFindings, TellsARailOnlyFabricFromRailsThatAreBroken) {
  using enum PathFacts::Reached;
  auto& paths = pairs.others.front().paths;
  paths = {way(0, 0), way(0, 1, nothing), way(1, 0, nothing), way(1, 1)};
  expect("pair", "ok", {"a rail-only fabric"});
  paths = {way(0, 0), way(0, 1), way(1, 0, nothing), way(1, 1)};
  expect("pair", "WARN", {"from ibverbs:mlx5_1 to ibverbs:mlx5_0: no answer"});
  paths = {way(0, 0), way(0, 1), way(1, 0), way(1, 1, nothing)};
  expect("pair", "FAIL", {"from ibverbs:mlx5_1 to ibverbs:mlx5_1: no answer"});
  paths = {way(0, 0), way(0, 1), way(1, 0), way(1, 1)};
  expect("pair", "ok", {"on each of 4 ways"});
}

TEST_F(DoctorFindings, TellsOfClocksThatAreApartForSure) {
  coordinators.front().clock_ahead_ms = -4200;
  expect("clock", "WARN", {"c0:7000: its clock is 4.2 s behind this node's", "-> run chrony"});
  coordinators.front().clock_error_ms = 3500;
  expect("clock", "ok", {"c0:7000: its clock is 4200.0 ms behind this node's, give or take 3500.00"});
  pairs.others.front().clock_ahead_ms = 1500;
  expect("clock", "WARN", {"n1:7100: its clock is 1.5 s ahead of this node's"});
}

TEST_F(DoctorFindings, TellsOfDevicesThatAreBadlyConnectedWithTheMachine) {
  expect("pci", "ok", {"mlx5_0: 16 lanes of 16 GT/s, NUMA node 0, port 1 at 200 Gb/s"});
  buses[0].lanes = 8;
  expect("pci", "WARN", {"mlx5_0: its PCIe link has 8 lanes of 16 GT/s, and it could 16 of 16 -> give it a slot"});
  buses[0].lanes = 16;
  buses[0].speed = 8;
  expect("pci", "WARN", {"16 lanes of 8 GT/s, and it could 16 of 16"});
  buses[1].lanes = 4;
  expect("pci", "WARN", {"GPU 0000:3b:00.0: its PCIe link has 4 lanes"});
  buses[0].numa_node = 1;
  buses[0].own_cpus = false;
  expect("numa", "WARN",
         {"mlx5_0 is on NUMA node 1, and this process may run on none of its CPUs -> 'numactl --cpunodebind=1'",
          "mlx5_0 is on NUMA node 1, and every GPU on another: 0"});
  buses.push_back({.name = "mlx5_1", .port_speeds = {{1, 100}}});
  expect("pci", "WARN", {"mlx5_1:1 runs at 100 Gb/s, and mlx5_0:1 at 200 -> look at the slower one's cable"});
  s.transport = "ibverbs:mlx5_0:1;gid=3";
  EXPECT_EQ(lines("pci").find("mlx5_1"), std::string::npos) << "it is not used";
  s.transport = "tcp";
  expect("pci", "skipped", {"no RDMA device is used"});
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
  gpus->reach = {{.port = "mlx5_0", .dma_buf = true}, {.port = "mlx5_1", .why = "Operation not supported"}};
  expect("gpu", "ok", {"memory of NVIDIA H200 (CUDA device 0) was registered on mlx5_0, as a dma-buf"});
  expect("gpu", "WARN", {"can't be given to mlx5_1", "Operation not supported -> 'modprobe nvidia-peermem'"});
  gpus->peer_memory = true;
  expect("gpu", "WARN", {"nvidia-peermem is loaded and does not help"});
  gpus = GpuFacts{};
  expect("gpu", "WARN", {"no GPU"});
  gpus = fail(ErrorCode::io, "starting the CUDA driver: unknown error");
  expect("gpu", "FAIL", {"unknown error -> ", "nvidia-smi"});
}

TEST_F(DoctorFindings, TellsAStoreThatIsSlowOrAway) {
  store->milliseconds.push_back(200);
  expect("store", "WARN", {"4 writes", "200.0 ms at most", "SSD"});
  store->milliseconds.pop_back();
  store->bytes = 1800ull * 1024 * 1024;
  expect(
      "store", "WARN",
      {"etcd holds 1.8 GiB, and may hold 2.0 GiB unless its --quota-backend-bytes says otherwise -> 'etcdctl compact"});
  store->quota = 8ull * 1024 * 1024 * 1024;
  EXPECT_EQ(lines("store").find("WARN"), std::string::npos);
  store->clusters = {{"e0:2379", 7}, {"e1:2379", 7}};
  EXPECT_EQ(lines("store").find("FAIL"), std::string::npos);
  store->clusters.emplace_back("e2:2379", 0xab);
  expect("store", "FAIL", {"etcd at e2:2379 is of another cluster (ab) than at e0:2379 (7)", "--initial-cluster"});
  store->clusters.clear();
  store->alarms = {"memberID:1 alarm:NOSPACE"};
  store->milliseconds.clear();
  expect("store", "FAIL", {"alarm:NOSPACE -> 'etcdctl compact"});
  store = fail(ErrorCode::unavailable, "e0:2379: failed to connect");
  expect("store", "FAIL", {"failed to connect -> start etcd"});
  s.store.job = "";
  expect("store", "FAIL", {"--job NAME"});
}

TEST_F(DoctorFindings, SayWhoEncrypts) {
  EXPECT_EQ(lines("encryption"), "");
  s.transport = "tcp+aes";
  EXPECT_EQ(lines("encryption"),
            "ok    encryption: processes encrypt; this kernel could, with ;ktls=1 behind the transport\n");
  s.transport = "tcp+aes:10.0.0.3;ktls=1";
  EXPECT_EQ(lines("encryption"), "ok    encryption: the kernel encrypts for data connections with peers of ktls=1\n");
  kernel_tls = fail(ErrorCode::unavailable, "it has no module tls");
  EXPECT_EQ(lines("encryption").find("WARN  encryption: processes encrypt here, not the kernel: it has no module"), 0u);
  s.transport = "tcp+aes";
  EXPECT_EQ(lines("encryption"), "ok    encryption: processes encrypt\n");
}

}  // namespace
}  // namespace rejoin::daemon
