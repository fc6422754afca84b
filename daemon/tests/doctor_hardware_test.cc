// `rejoin doctor` on hardware that is made up.
#include <gtest/gtest.h>

#include <fstream>

#include "daemon/doctor_probes.h"
#include "device/tests/fake_control.h"
#include "tests/process.h"

namespace rejoin::daemon {
namespace {

// A machine's /sys with these files.
TEST(DoctorBuses, AreReadAsTheKernelTellsOfThem) {
  const test::Scratch scratch;
  const std::filesystem::path sys = scratch.path + "/sys";
  const auto write = [&](const std::string& file, const std::string& text) {
    std::filesystem::create_directories((sys / file).parent_path());
    std::ofstream(sys / file) << text << "\n";
  };
  const auto device = [&](const std::string& at, const char* lanes, const char* speed, const char* node) {
    write(at + "/current_link_width", lanes);
    write(at + "/max_link_width", "16");
    write(at + "/current_link_speed", speed);
    write(at + "/max_link_speed", "32.0 GT/s PCIe");
    write(at + "/numa_node", node);
  };
  device("class/infiniband/mlx5_0/device", "8", "16.0 GT/s PCIe", "1");
  write("class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE");
  write("class/infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)");
  write("class/infiniband/mlx5_0/ports/2/state", "1: DOWN");
  write("class/infiniband/mlx5_0/ports/2/rate", "10 Gb/sec (4X SDR)");
  write("class/infiniband/rxe0/ports/1/state", "4: ACTIVE");  // of software: on no bus
  device("bus/pci/devices/0000:3b:00.0", "16", "Unknown", "-1");
  write("bus/pci/devices/0000:3b:00.0/vendor", "0x10de");
  write("bus/pci/devices/0000:3b:00.0/class", "0x030200");
  write("bus/pci/devices/0000:00:00.0/vendor", "0x8086");
  write("devices/system/node/node0/cpulist", "0-1022");
  write("devices/system/node/node1/cpulist", "1023,100000-100003");
  const auto all = probe_buses(sys);
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].name, "mlx5_0");
  EXPECT_EQ(all[0].lanes, 8u);
  EXPECT_EQ(all[0].most_lanes, 16u);
  EXPECT_EQ(all[0].speed, 16);
  EXPECT_EQ(all[0].most_speed, 32);
  EXPECT_EQ(all[0].numa_node, 1);
  EXPECT_FALSE(all[0].own_cpus);
  EXPECT_EQ(all[0].port_speeds, (std::map<std::uint32_t, double>{{1, 200}}));
  EXPECT_EQ(all[1].name, "rxe0");
  EXPECT_EQ(all[1].lanes, 0u);
  EXPECT_EQ(all[2].name, "GPU 0000:3b:00.0");
  EXPECT_TRUE(all[2].gpu);
  EXPECT_FALSE(all[2].numa_node);
  EXPECT_EQ(all[2].speed, 0);
  EXPECT_TRUE(probe_buses(scratch.path + "/none").empty());
}

// Devices made of software: a GPU, and the RDMA devices fake0 and fake1.
TEST(DoctorGpus, GiveTheirMemoryToEachPortThatIsUsed) {
  const device::fake::Control control(REJOIN_FAKE_CUDA);
  for (const bool dma_buf : {true, false}) {
    control.set_dma_buf(dma_buf);
    const auto facts = probe_gpus("ibverbs:fake0,nothing", REJOIN_FAKE_CUDA);
    control.set_dma_buf(false);
    ASSERT_TRUE(facts) << facts.error().message;
    EXPECT_EQ(facts->untried, "");
    ASSERT_EQ(facts->reach.size(), 2u);
    EXPECT_EQ(facts->reach[0].port, "fake0");
    EXPECT_EQ(facts->reach[0].dma_buf, dma_buf);
    EXPECT_EQ(facts->reach[0].why, "");
    EXPECT_NE(facts->reach[1].why.find("no RDMA device 'nothing'"), std::string::npos) << facts->reach[1].why;
  }
  EXPECT_TRUE(probe_gpus("tcp", REJOIN_FAKE_CUDA)->reach.empty());
}

}  // namespace
}  // namespace rejoin::daemon
