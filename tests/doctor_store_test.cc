// `rejoin doctor` and the coordinators' store.
#include "daemon/tests/etcd_process.h"
#include "tests/doctor_support.h"

namespace rejoin::test {
namespace {

using Doctor = DoctorTest;

TEST_F(Doctor, TriesTheCoordinatorsStoreAndWritesNothingThere) {
  if (EtcdCluster::program().empty()) GTEST_SKIP() << "no etcd on this machine";
  EtcdCluster etcd({.members = 1, .flags = {}});
  const std::vector<std::string> store{"--store", "etcd:" + etcd.endpoint(0), "--job", "train"};
  expect(0, store, {"ok", "store:", "5 writes"});

  auto more = store;
  more.insert(more.end(), {"--replicas", "1", "--ranks", "1"});
  const auto leads = job.start_coordinator(more);
  ASSERT_TRUE(eventually([&] { return !job.status().is_null() && job.status().at("store").at("leads") == true; }))
      << leads->output();
  auto both = store;
  const auto address = to_coordinator(job.coordinator);
  both.insert(both.end(), address.begin(), address.end());
  expect(0, both, {"ok", "coordinator:", "leads in term 1"});
  expect(0, both, {"ok", "clock:", job.coordinator, "give or take"});
  expect(0, both, {"ok", "store:", "5 writes"});
  EXPECT_EQ(job.status().at("store").at("leads"), true) << "its place was not taken";
  EXPECT_EQ(job.status().at("store").at("term"), 1);

  etcd.kill(0);
  expect(2, store, {"FAIL", "store:", "-> start etcd"});
}

TEST_F(Doctor, FindsThatEtcdIsFull) {
  if (EtcdCluster::program().empty()) GTEST_SKIP() << "no etcd on this machine";
  EtcdCluster etcd({.members = 1, .flags = {"--quota-backend-bytes=1"}});
  const Ended put =
      run({EtcdCluster::program("etcdctl"), "--endpoints", etcd.endpoint(0), "put", "key", "value"}, {"ETCDCTL_API=3"});
  EXPECT_NE(put.output.find("database space exceeded"), std::string::npos) << put.output;
  expect(2, {"--store", "etcd:" + etcd.endpoint(0), "--job", "train"},
         {"FAIL", "store:", "NOSPACE", "-> 'etcdctl compact REVISION'"});
}

}  // namespace
}  // namespace rejoin::test
