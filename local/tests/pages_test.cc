// Memory whose pages can't be had: an error of who asks for it, and no bus error of who touches it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <functional>

#include "base/bytes.h"
#include "base/populate.h"
#include "base/tests/said_by_child.h"
#include "local/owner.h"
#include "local/view.h"

namespace {

std::atomic<int> populating_fails = 0;  // with this errno

}  // namespace

extern "C" int madvise(void* memory, std::size_t size, int advice) noexcept {
  if (advice == MADV_POPULATE_WRITE && populating_fails != 0) return errno = populating_fails, -1;
  return static_cast<int>(::syscall(SYS_madvise, memory, size, advice));
}

namespace rejoin::local {
namespace {

using testing::HasSubstr;

struct Pages : testing::Test {
  ~Pages() override { populating_fails = 0; }
};

Manifest small() { return *Manifest::make({{.name = "w", .count = 100'000, .columns = 3, .elementwise = true}}); }

TEST_F(Pages, OfTheStateThatCannotBeHadAreAnErrorThatNamesTheLimit) {
  for (const int error : {EFAULT, ENOMEM, EHWPOISON}) {
    populating_fails = error;
    const auto owner = Owner::make(small());
    ASSERT_FALSE(owner) << error;
    EXPECT_EQ(owner.error().code, ErrorCode::exhausted);
    EXPECT_THAT(owner.error().message, HasSubstr("1.1 MiB of shared memory can't be had"));
    EXPECT_THAT(owner.error().message, HasSubstr("CommitLimit in /proc/meminfo"));
  }
}

TEST_F(Pages, ThatAProcessMayNotLockNameThatLimit) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become a user whose locked memory is limited";
  const auto said = test::said_by_child([]() -> std::string {
    const rlimit locked{4 << 20, 4 << 20};
    if (::setrlimit(RLIMIT_MEMLOCK, &locked) != 0 || ::setresuid(65534, 65534, 65534) != 0) return "can't be had here";
    if (::syscall(SYS_mlockall, MCL_FUTURE) != 0) return "mlockall failed";  // the sanitizers' own does nothing
    const auto mapped = Mapping::anonymous(128 * MiB);
    return mapped ? "it was mapped" : mapped.error().message;
  });
  EXPECT_THAT(said, testing::AllOf(HasSubstr("mapping 128.0 MiB: this process locks all of its memory"),
                                   HasSubstr("'ulimit -l'")));
}

TEST_F(Pages, ComeAsTheyAreTouchedWhereTheKernelCannotGiveThemAtOnce) {
  for (const int error : {EINVAL, ENOSYS, EPERM}) {
    populating_fails = error;
    auto owner = Owner::make(small());
    ASSERT_TRUE(owner) << error;
    auto view = *View::of(*owner);
    while (view.populate_some()) {
    }
    EXPECT_FALSE(view.failure());
  }
}

// It loses this rank, and serves the others.
TEST_F(Pages, ThatTheDaemonCannotHaveAreTheRanksFailure) {
  auto owner = *Owner::make(small());
  auto view = *View::of(owner);
  populating_fails = EFAULT;
  while (view.populate_some()) {
  }
  ASSERT_TRUE(view.failure());
  EXPECT_THAT(view.failure()->message, HasSubstr("touching it is a bus error"));
}

// What a process says in which overcommit_memory reads so, and /mnt is a file system of 64 KiB.
std::string where_it_reads(const std::string& overcommit, const std::function<std::string()>& says) {
  return test::said_by_child([&]() -> std::string {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", "/mnt", "tmpfs", 0, "size=64k") != 0)
      return "nobody may mount here";
    std::ofstream("/mnt/overcommit") << overcommit << "\n";
    return ::mount("/mnt/overcommit", "/proc/sys/vm/overcommit_memory", nullptr, MS_BIND, nullptr) == 0
               ? says()
               : "nothing may be mounted there";
  });
}

#define SKIP_IF_NOT_MOUNTED(said) \
  if (said.ends_with("may mount here") || said.ends_with("be mounted there")) GTEST_SKIP() << said

// A page of a file counts when it is touched first, and a process that is refused one then is ended.
TEST_F(Pages, OfSharedMemoryAreThereWhenItIsMadeWhereTheSystemDoesNotOvercommit) {
  const auto made = [] {
    const auto file = make_sealed_memfd("test", 5 * MiB + 1);
    struct stat status {};
    if (!file || ::fstat(file->get(), &status) != 0) return std::string("none");
    return status.st_blocks * 512 >= static_cast<blkcnt_t>(5 * MiB) ? std::string("all") : std::string("as touched");
  };
  const std::string never = where_it_reads("2", made);
  SKIP_IF_NOT_MOUNTED(never);
  EXPECT_EQ(never, "all");
  EXPECT_EQ(where_it_reads("0", made), "as touched");
  EXPECT_EQ(where_it_reads("1", made), "as touched");
}

// A file system that is full gives no page either.
TEST_F(Pages, ThatCannotBeHadAreNotReserved) {
  const auto reserved = [] {
    const Fd file(::open("/mnt/file", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (::ftruncate(file.get(), 1 * MiB) != 0) return std::string("ftruncate");
    const auto done = reserve(file, 1 * MiB);
    return done ? std::string("done") : done.error().message;
  };
  const std::string never = where_it_reads("2", reserved);
  SKIP_IF_NOT_MOUNTED(never);
  EXPECT_THAT(never, testing::StartsWith("1.0 MiB of shared memory can't be had (No space left on device): "));
  EXPECT_EQ(where_it_reads("0", reserved), "done");
}

TEST_F(Pages, ThatWouldBeABusErrorAreNotPopulated) {
  const auto populated = [] {
    const Fd file(::open("/mnt/file", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (::ftruncate(file.get(), 1 * MiB) != 0) return std::string("ftruncate");
    auto memory = *Mapping::of(file, 1 * MiB);
    if (!populate(memory.span().first(16 * KiB))) return std::string("those that are there");
    const auto done = populate(memory.span());
    return done ? std::string("done") : done.error().message;
  };
  const std::string full = where_it_reads("0", populated);
  SKIP_IF_NOT_MOUNTED(full);
  EXPECT_THAT(full, HasSubstr("1.0 MiB of shared memory can't be had (touching it is a bus error)"));
}

}  // namespace
}  // namespace rejoin::local
