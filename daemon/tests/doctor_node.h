// A node on which everything is right, for tests of which each breaks something.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "base/fail.h"
#include "daemon/doctor.h"

namespace rejoin::daemon {

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
                                         {"::", {.own = true, .v4 = false, .v6 = true}},
                                         {"fd00::3", {.own = true, .v4 = false, .v6 = true}},
                                         {"fe80::3%eth0", {.own = true, .link_local = true, .v4 = false, .v6 = true}},
                                         {"10.0.0.99", {}},
                                         {"nowhere", {.unresolved = "its name is not resolved: no such name"}}};
  transport::OwnHosts own{.v4 = "10.0.0.3", .v6 = ""};
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
  Result<> key, kernel_tls;
  PairsFacts pairs{.own = "n0:7100",
                   .others = {{.node = "n1:7100", .paths = {way(0, 0)}, .came = true, .verdict = way(0, 0)}}};
  std::vector<BusFacts> buses{{.name = "mlx5_0",
                               .lanes = 16,
                               .most_lanes = 16,
                               .speed = 16,
                               .most_speed = 16,
                               .numa_node = 0,
                               .port_speeds = {{1, 200}}},
                              {.name = "GPU 0000:3b:00.0",
                               .gpu = true,
                               .lanes = 16,
                               .most_lanes = 16,
                               .speed = 2.5,
                               .most_speed = 32,
                               .numa_node = 0}};

  static PathFacts way(std::size_t own, std::size_t theirs, PathFacts::Reached reached = PathFacts::Reached::all) {
    const auto name = [](std::size_t rail) { return fmt::format("ibverbs:mlx5_{}", rail); };
    return {.own = own,
            .theirs = theirs,
            .here = name(own),
            .there = name(theirs),
            .reached = reached,
            .why = reached == PathFacts::Reached::all ? "" : "no answer in 2000 ms",
            .mtu = 4096,
            .mtu_there = 4096};
  }

  DoctorFindings() {
    s.key_file = "/key";
    s.socket = "/run/rejoin.sock";
    s.coordinators = "c0:7000";
    s.transport = "ibverbs";
    s.data_listen = "0.0.0.0:7100";
    s.peers = {"10.0.0.4:7100"};
    s.pairs = {"n0:7100", "n1:7100"};
    s.store.store = "etcd:e0:2379";
    s.store.job = "train";
  }
  Findings all() {
    Probes probes;
    probes.keys = [this](const std::string&, const std::string&) -> Result<JobKeys> {
      if (!key) return tl::unexpected(key.error());
      JobKeys keys(JobKey("0123456789abcdef"));
      return s.certificates.given() ? JobKeys::with_certificates(std::move(keys), s.certificates) : keys;
    };
    probes.socket = [this](const std::string&) { return socket; };
    probes.coordinators = [this](const std::string&, const JobKeys&) { return coordinators; };
    probes.host = [this](const std::string& host) { return hosts.at(host); };
    probes.own_hosts_towards = [this](const std::string&) { return own; };
    probes.peer = [this](const std::string&, const JobKeys&) { return peer; };
    probes.pairs = [this](const JobKeys&) -> Result<PairsFacts> { return pairs; };
    probes.buses = [this] { return buses; };
    probes.limits = [this] { return limits; };
    probes.lock_memory = [this](std::uint64_t) { return locked; };
    probes.ports = [this] { return ports; };
    probes.gpus = [this] { return gpus; };
    probes.store = [this] { return store; };
    probes.kernel_tls = [this] { return kernel_tls; };
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

}  // namespace rejoin::daemon
