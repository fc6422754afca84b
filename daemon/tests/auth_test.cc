// Who may be able to read the job's key.
#include "daemon/auth.h"

#include <grp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace rejoin::daemon {
namespace {

struct KeyFile : testing::Test {
  const std::string directory = [] {
    char name[] = "/tmp/rejoin-key-XXXXXX";
    return std::string(::mkdtemp(name));
  }();
  const std::string path = directory + "/key";
  KeyFile() { std::ofstream(path) << "0123456789abcdef0123456789abcdef"; }
  ~KeyFile() override { std::filesystem::remove_all(directory); }

  void is(mode_t mode, uid_t owner, gid_t group) const {
    ASSERT_EQ(::chown(path.c_str(), owner, group), 0);
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
  }
  std::string refusal() const {
    const auto key = JobKey::read(path);
    return key ? "" : key.error().message;
  }
};

TEST_F(KeyFile, OfItsOwnerAloneIsTaken) {
  for (const mode_t mode : {0600, 0400}) {
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    EXPECT_EQ(refusal(), "");
  }
}

TEST_F(KeyFile, ThatOthersMayUseIsRefusedWithItsModeAndTheRemedy) {
  for (const auto& [mode, says] : {std::pair{0644, "0644"}, {0444, "0444"}, {0602, "0602"}}) {
    ASSERT_EQ(::chmod(path.c_str(), static_cast<mode_t>(mode)), 0);
    const std::string why = refusal();
    EXPECT_NE(why.find(path + " has mode " + says), std::string::npos) << why;
    EXPECT_NE(why.find("chmod 600"), std::string::npos) << why;
    EXPECT_NE(why.find("defaultMode"), std::string::npos) << why;
  }
}

TEST_F(KeyFile, ThatIsNoRegularFileIsRefusedAtOnce) {
  std::filesystem::remove(path);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_NE(refusal().find("is no regular file"), std::string::npos) << refusal();
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  EXPECT_NE(refusal().find("is no regular file"), std::string::npos) << refusal();
}

// As Kubernetes mounts secrets for a pod with an fsGroup.
TEST_F(KeyFile, ThatRootGivesToAGroupOfOursIsTaken) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  const gid_t group = 4321;
  for (const mode_t mode : {0440, 0640}) {
    is(mode, 0, group);
    EXPECT_NE(refusal().find("owner 0 and group 4321: its group may read it"), std::string::npos) << refusal();
    is(mode, 0, ::getegid());
    EXPECT_EQ(refusal(), "");
    is(mode, 1234, ::getegid());
    EXPECT_NE(refusal().find("only where the owner is root"), std::string::npos) << refusal();
  }
  std::vector<gid_t> before(static_cast<std::size_t>(::getgroups(0, nullptr)));
  ASSERT_GE(::getgroups(static_cast<int>(before.size()), before.data()), 0);
  ASSERT_EQ(::setgroups(1, &group), 0);
  is(0440, 0, group);
  EXPECT_EQ(refusal(), "") << "a supplementary group";
  is(0460, 0, group);
  EXPECT_NE(refusal().find("mode 0460: its group may change it; chmod 600"), std::string::npos) << refusal();
  ASSERT_EQ(::setgroups(before.size(), before.data()), 0);
}

// As systemd hands credentials over, with an access list beside.
TEST_F(KeyFile, OfRootAndItsGroupIsTakenByWhoeverCanReadIt) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  std::vector<gid_t> before(static_cast<std::size_t>(::getgroups(0, nullptr)));
  ASSERT_GE(::getgroups(static_cast<int>(before.size()), before.data()), 0);
  const gid_t own = ::getegid(), other = 4321;
  ASSERT_EQ(::setgroups(1, &other), 0);
  ASSERT_EQ(::setegid(other), 0);
  is(0440, 0, 0);
  EXPECT_EQ(refusal(), "");
  is(0460, 0, 0);
  EXPECT_NE(refusal().find("its group may change it"), std::string::npos) << refusal();
  is(0440, 1234, 0);
  EXPECT_NE(refusal().find("only where the owner is root"), std::string::npos) << refusal();
  ASSERT_EQ(::setegid(own), 0);
  ASSERT_EQ(::setgroups(before.size(), before.data()), 0);
}

}  // namespace
}  // namespace rejoin::daemon
