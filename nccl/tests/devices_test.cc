// What NCCL is offered, among RDMA devices made of software (transport/tests/fake_verbs.h).
#include "nccl/devices.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "base/log.h"
#include "transport/tests/fake_verbs.h"

namespace rejoin::nccl {
namespace {

Result<std::vector<DeviceInfo>> find(const std::string& devices) {
  return find_devices({.devices = devices, .address = "127.0.0.1"});
}

TEST(NcclDevices, GpuMemoryIsOfferedByItsAddressOnlyWithPeerMemory) {
  const auto found = [](const std::string& modules, const std::string& devices) {
    return (*find_devices({.devices = devices, .address = "127.0.0.1", .modules = modules})).at(0);
  };
  const std::filesystem::path modules = std::filesystem::temp_directory_path() / fmt::format("nccl-{}", ::getpid());
  std::filesystem::create_directories(modules / "nvidia_peermem");
  for (const char* devices : {"ibverbs:fake0", "ibverbs:fake0,fake1"}) {
    EXPECT_FALSE(found(modules / "none", devices).cuda);
    EXPECT_TRUE(found(modules / "none", devices).dma_buf);
    EXPECT_TRUE(found(modules, devices).cuda);
  }
  EXPECT_FALSE(found(modules, "tcp").cuda) << "sockets reach no GPU, whatever is loaded";
  EXPECT_FALSE(found(modules, "tcp").dma_buf);
  std::filesystem::remove_all(modules);
}

TEST(NcclDevices, AreTransportsWithTheirSettings) {
  for (const char* devices : {"tcp", "tcp;threads=1", "tcp:127.0.0.1;threads=1", "tcp+aes", "tcp+aes:127.0.0.1;ktls=0",
                              "shm", "ibverbs:fake0;depth=64,fake1"}) {
    const auto found = find(devices);
    ASSERT_TRUE(found) << found.error().message;
    EXPECT_EQ(found->at(0).transport, devices);
  }
  EXPECT_EQ(find("tcp:127.0.0.1;threads=1")->at(0).guid, find("tcp:127.0.0.1")->at(0).guid) << "one interface";
}

TEST(NcclDevices, ThatCantBeMadeAreNamedWithTheSettingBeforeNcclTakesThem) {
  const auto expect = [](const std::string& devices, const std::string& words) {
    const auto found = find(devices);
    ASSERT_FALSE(found) << devices;
    EXPECT_TRUE(found.error().message.starts_with("REJOIN_NCCL_DEVICES: device 1 (" + devices.substr(4) + "): ") &&
                found.error().message.find(words) != std::string::npos)
        << found.error().message;
  };
  expect("tcp bogus:x", "no transport 'bogus:x'");
  expect("tcp tcp:no..name", "no..name");
  expect("tcp tcp:", "an address is missing");
  for (const char* host : {"0.0.0.0", "224.0.0.1", "255.255.255.255", "[::]", "[ff02::1]"})
    expect(fmt::format("tcp tcp:127.0.0.1,{}", host), fmt::format("'{}' is no address of one machine", host));
  expect("tcp tcp;depth=1", "'depth=1' is no setting of tcp");
  expect("tcp shm:x", "no transport 'shm:x'");
  expect("tcp ibverbs:none0", "no RDMA device 'none0'");
  expect("tcp ibverbs", "names no RDMA device");
}

TEST(NcclDevices, AreNotSetByAVariableThatIsMisspelt) {
  spdlog::set_level(spdlog::level::warn);
  testing::internal::CaptureStdout();
  ::setenv("REJOIN_NCCL_DEVICES", "shm", 1);
  warn_of_unknown_settings();
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  testing::internal::CaptureStdout();
  ::setenv("REJOIN_NCCL_DEVICE", "shm", 1);
  warn_of_unknown_settings();
  ::unsetenv("REJOIN_NCCL_DEVICE"), ::unsetenv("REJOIN_NCCL_DEVICES");
  const std::string log = testing::internal::GetCapturedStdout();
  EXPECT_NE(log.find("REJOIN_NCCL_DEVICE is none of Rejoin's, and is ignored: the NCCL plugin reads REJOIN_NCCL_DEVIC"),
            std::string::npos)
      << log;
}

TEST(NcclDevices, ThatBecomeOneKeepTheirSettings) {
  const auto joined = [](const std::string& devices) {
    return join_devices(find(devices).value(), {0, 1}).map([](const auto& device) { return device.transport; });
  };
  EXPECT_EQ(joined("ibverbs:fake0;depth=64 ibverbs:fake1"), "ibverbs:fake0;depth=64,fake1");
  EXPECT_EQ(joined("tcp:127.0.0.1;threads=1 tcp:127.0.0.2;threads=1"), "tcp:127.0.0.1,127.0.0.2;threads=1");
  EXPECT_FALSE(joined("tcp:127.0.0.1;threads=1 tcp:127.0.0.2"));
  EXPECT_FALSE(joined("tcp:127.0.0.1 tcp+aes:127.0.0.2"));
  EXPECT_FALSE(joined("tcp tcp;threads=1"));
}

TEST(NcclDevices, AreOfOneFamilyWhereTheyCanReachEachOther) {
  EXPECT_EQ(family_of("ibverbs:mlx5_0:1;depth=64"), family_of("ibverbs:mlx5_2"));
  EXPECT_EQ(family_of("ucx:tcp,self"), family_of("ucx:rc"));
  EXPECT_EQ(family_of("tcp:10.0.0.1"), family_of("tcp"));
  EXPECT_EQ(family_of("tcp:10.0.0.1;threads=1").text(), "tcp over several rails");
  EXPECT_EQ(family_of("ibverbs:mlx5_0;qps=1,mlx5_1").text(), "ibverbs over several rails");
  EXPECT_EQ(family_of("ibverbs:mlx5_0,mlx5_1,mlx5_2"), family_of("ibverbs:mlx5_0,mlx5_1"));
  EXPECT_EQ(family_of("tcp:10.0.0.1,10.0.0.2,10.0.0.3"), family_of("tcp:10.0.0.1,10.0.0.2"));
  EXPECT_NE(family_of("ibverbs:mlx5_0,mlx5_1"), family_of("ibverbs:mlx5_0"));
  EXPECT_NE(family_of("tcp"), family_of("tcp+aes"));
  EXPECT_FALSE(Family{}.told());
}

TEST(NcclDevices, AreTcpWithAWarningWhereNoRdmaPortIsActive) {
  EXPECT_EQ(find("")->at(0).transport, "ibverbs:fake0:1;depth=64");
  spdlog::set_level(spdlog::level::warn);
  testing::internal::CaptureStdout();
  for (const char* device : {"fake0", "fake1"}) fake_verbs_port(device, false);
  EXPECT_EQ(find("")->at(0).transport, "tcp");
  for (const char* device : {"fake0", "fake1"}) fake_verbs_port(device, true);
  const std::string log = testing::internal::GetCapturedStdout();
  EXPECT_NE(log.find("no RDMA port is active here, but there is fake0:1, which is not active"), std::string::npos)
      << log;
}

}  // namespace
}  // namespace rejoin::nccl
