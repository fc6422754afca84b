// What is near, on a machine that is made up, and running near it on the one that there is.
#include "transport/placement.h"

#include <gtest/gtest.h>

#include <fstream>
#include <thread>

#include "tests/process.h"
#include "transport/factory.h"

namespace rejoin::transport {
namespace {

namespace fs = std::filesystem;

// Two sockets: a GPU and two NICs behind one switch of the first one's, one of them behind a further bridge, another
// NIC and GPU of the same socket, and a GPU and a NIC of the second.
struct Machine {
  test::Scratch scratch;
  fs::path sys = scratch.path + "/sys";

  void write(const fs::path& file, const std::string& text) const {
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  void device(const std::string& way, const char* node) const {
    const fs::path directory = sys / "devices" / way;
    write(directory / "numa_node", node);
    fs::create_directories(sys / "bus/pci/devices");
    fs::create_directory_symlink(directory, sys / "bus/pci/devices" / directory.filename());
  }
  void nic(const std::string& name, const std::string& way, const char* node) const {
    device(way, node);
    fs::create_directories(sys / "class/infiniband" / name);
    fs::create_directory_symlink(sys / "devices" / way, sys / "class/infiniband" / name / "device");
  }
  Machine() {
    write(sys / "devices/system/node/node0/cpulist", "0-1");
    write(sys / "devices/system/node/node1/cpulist", "2-3");
    const std::string first = "pci0000:10/0000:10:01.0/0000:11:00.0/";
    device(first + "0000:12:00.0/0000:19:00.0", "0");
    nic("mlx5_0", first + "0000:12:01.0/0000:1a:00.0", "0");
    nic("mlx5_1", first + "0000:12:02.0/0000:1b:00.0", "0");
    nic("mlx5_2", "pci0000:20/0000:20:01.0/0000:21:00.0", "0");
    device("pci0000:30/0000:30:01.0/0000:3b:00.0", "0");
    device("pci0000:a0/0000:a0:01.0/0000:ab:00.0", "1");
    nic("mlx5_3", "pci0000:b0/0000:b0:01.0/0000:b1:00.0", "1");
    nic("mlx5_4", "pci0000:b0/0000:b0:01.0/0000:b2:00.0", "-1");
  }
  std::vector<std::string> ports() const { return {"mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1", "mlx5_4:1"}; }
};

using Ports = std::vector<std::string>;

TEST(Placement, PortsBehindTheGpusSwitchAreTheNearestThenThoseOfItsNodeThenAll) {
  const Machine machine;
  const auto near = [&](const char* device) { return nearest_ports(machine.ports(), device, machine.sys); };
  EXPECT_EQ(near("cuda:0000:19:00.0"), (Ports{"mlx5_0:1", "mlx5_1:1"}));
  EXPECT_EQ(near("cuda:0000:3B:00.0"), (Ports{"mlx5_0:1", "mlx5_1:1", "mlx5_2:1"})) << "none has its root";
  EXPECT_EQ(near("cuda:0000:ab:00.0"), Ports{"mlx5_3:1"});
  EXPECT_EQ(near("cuda:0000:ff:00.0"), machine.ports()) << "no such GPU";
  EXPECT_EQ(near("host"), machine.ports());
  const Ports without{"mlx5_4:1", "rxe0:1"};
  EXPECT_EQ(nearest_ports(without, "cuda:0000:19:00.0", machine.sys), without) << "nothing is known of any";
  EXPECT_EQ(nearest_ports(machine.ports(), "cuda:0000:19:00.0", machine.scratch.path), machine.ports()) << "no /sys";
}

TEST(Placement, ThreadsAreForTheGpusNodeAndOtherwiseForThatOfAllRails) {
  const Machine machine;
  const auto node = [&](const char* transport, const char* device) {
    return numa_node_for(transport, device, machine.sys);
  };
  EXPECT_EQ(node("ibverbs:mlx5_3", "cuda:0000:19:00.0"), 0) << "the GPU";
  EXPECT_EQ(node("ibverbs:mlx5_3:1;gid=3", "host"), 1);
  EXPECT_EQ(node("ibverbs:mlx5_0,mlx5_2", "host"), 0);
  EXPECT_EQ(node("ibverbs:mlx5_0,mlx5_3", "host"), std::nullopt) << "on two";
  EXPECT_EQ(node("ibverbs:mlx5_3,mlx5_4", "host"), std::nullopt) << "of one it is not known";
  EXPECT_EQ(node("ibverbs:mlx5_3", "cuda:0000:ff:00.0"), 1) << "no such GPU";
  for (const char* transport : {"shm", "tcp", "tcp:127.0.0.1", "tcp+aes:192.0.2.1;ktls=1", "ucx:rc"})
    EXPECT_EQ(node(transport, "host"), std::nullopt) << transport;
  fs::remove_all(machine.sys / "devices/system/node/node1");
  EXPECT_EQ(node("ibverbs:mlx5_0", "cuda:0000:19:00.0"), std::nullopt) << "the only node";
}

TEST(Placement, RailsOfTcpAreWhereTheInterfaceOfTheirAddressIs) {
  const Machine machine;
  machine.write(machine.sys / "class/net/lo/device/numa_node", "1");
  EXPECT_EQ(numa_node_for("tcp:127.0.0.1", "host", machine.sys), 1);
  EXPECT_EQ(numa_node_for("tcp+aes:127.0.0.1;ktls=1", "host", machine.sys), 1);
}

std::vector<int> cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  EXPECT_EQ(::sched_getaffinity(0, sizeof set, &set), 0);
  std::vector<int> all;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) all.push_back(cpu);
  return all;
}

// Of two nodes this process may run on one CPU of the first, and on all it may of the second.
TEST(Placement, AThreadRunsNearWhileItAsksToAsFarAsItMayAndAsBeforeAfterwards) {
  const auto before = cpus();
  if (before.size() < 2) GTEST_SKIP() << "this process may run on one CPU alone";
  const Machine machine;
  const auto own = [&](const std::string& list) {
    machine.write(machine.sys / "devices/system/node/node1/cpulist", list);
  };
  const auto moved_to = [&](std::optional<int> node) {
    std::vector<int> inside;
    bool moved = false;
    std::thread thread([&] {
      const RunNear near(node, machine.sys);
      moved = near.moved();
      std::thread([&] { inside = cpus(); }).join();
    });
    thread.join();
    EXPECT_EQ(moved, inside != before);
    return inside;
  };
  own(std::to_string(before.back()) + ",100000");
  EXPECT_EQ(moved_to(1), std::vector<int>{before.back()});
  EXPECT_EQ(moved_to(std::nullopt), before);
  EXPECT_EQ(moved_to(7), before) << "no such node";
  own("1000-1023");
  EXPECT_EQ(moved_to(1), before) << "on none of its CPUs may it run";
  own("0-1023");
  EXPECT_EQ(moved_to(1), before) << "it is there";
  {
    own(std::to_string(before.front()));
    const RunNear near(1, machine.sys);
    EXPECT_EQ(cpus(), std::vector<int>{before.front()});
  }
  EXPECT_EQ(cpus(), before);
}

}  // namespace
}  // namespace rejoin::transport
