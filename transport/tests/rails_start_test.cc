// Rails over TCP that are down when their process starts, and peers that have another number of rails.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>

#include "base/fd.h"
#include "base/log.h"
#include "base/refusals.h"
#include "transport/factory.h"
#include "transport/tests/any_access.h"
#include "transport/tests/calling_pair.h"
#include "transport/tests/same_bytes.h"

namespace rejoin::transport {
namespace {

// An address for examples: it is of no machine.
constexpr const char* kOneThere = "tcp:127.0.0.1,198.51.100.1";

struct Starting : CallingPair {
  Starting(const std::string& calls, const std::string& listens) {
    a = *make_engine(calls);
    b = *make_engine(listens);
  }
  void connect() { of_a = *a->connect(*b->listen({"127.0.0.1:0"}), {}); }
};

TEST(RailsAtTheStart, OneWhoseAddressIsNotThereIsDownAndTheOthersCarryOn) {
  std::unique_ptr<Starting> both;
  const std::string logged = logged_by([&] { both = std::make_unique<Starting>(kOneThere, kOneThere); });
  const auto line =
      logged.find("rail 1 of this process is down: rail 198.51.100.1: this machine can't listen on 198.51.100.1");
  ASSERT_NE(line, std::string::npos) << logged;
  EXPECT_NE(logged.find("is the interface up that has this address?", line), std::string::npos) << logged;
  const auto told = both->b->listen({"127.0.0.1:0"});
  ASSERT_TRUE(told) << told.error().message;
  EXPECT_NE(told->text.find("|198.51.100.1:"), std::string::npos) << told->text << ": where it will be";
  both->connect();
  ASSERT_TRUE(both->until([&] { return both->up_a && both->up_b; }));
  std::vector<std::byte> from(4 * MiB, std::byte{1}), to(4 * MiB);
  const RegionId source = *both->a->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId target = *both->b->register_region(to, MemoryKind::host, kAnyAccess);
  const Write write{.context = 1,
                    .local = {source, 0},
                    .remote = {both->b->remote(target), 0},
                    .length = from.size(),
                    .notify = std::nullopt};
  ASSERT_TRUE(both->a->write(both->of_a, {&write, 1}));
  ASSERT_TRUE(both->until([&] { return both->completed == 1; }));
  EXPECT_TRUE(same_bytes(from, to));
}

bool give_to_loopback(const char* address) {
  const Fd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq lo{}, alias{};
  std::strcpy(lo.ifr_name, "lo");
  lo.ifr_flags = IFF_UP | IFF_LOOPBACK | IFF_RUNNING;
  std::strcpy(alias.ifr_name, "lo:1");
  auto* in = reinterpret_cast<sockaddr_in*>(&alias.ifr_addr);
  in->sin_family = AF_INET;
  return ::inet_pton(AF_INET, address, &in->sin_addr) == 1 && ::ioctl(socket.get(), SIOCSIFFLAGS, &lo) == 0 &&
         (std::string_view(address) == "127.0.0.1" || ::ioctl(socket.get(), SIOCSIFADDR, &alias) == 0);
}

// In a network of its own, where a process may make one.
TEST(RailsAtTheStart, OneWhoseAddressComesLaterComesUpWithIt) {
  constexpr int kNoNetwork = 77;
  const auto rails_up = [](const Engine& engine) { return engine.rails().at(0).up + engine.rails().at(1).up; };
  const pid_t child = ::fork();
  if (child == 0) {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0 || !give_to_loopback("127.0.0.1")) ::_exit(kNoNetwork);
    Starting both(kOneThere, kOneThere);
    both.connect();
    if (!both.until([&] { return both.up_a && both.up_b; }) || rails_up(*both.a) != 1) ::_exit(1);
    if (!give_to_loopback("198.51.100.1")) ::_exit(2);
    ::_exit(both.until([&] { return rails_up(*both.a) == 2 && rails_up(*both.b) == 2; }) ? 0 : 3);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kNoNetwork) GTEST_SKIP() << "this process may make no network of its own";
  EXPECT_EQ(WEXITSTATUS(status), 0) << "1: not connected, 2: no address, 3: the rail does not come up";
}

// `rejoin doctor --peer` knows one address of a daemon with `;threads=N`.
TEST(RailsAtTheStart, OneOfWhichNoAddressIsKnownIsNotCalledAndTheOthersAre) {
  Starting both("tcp;threads=1", "tcp;threads=1");
  const std::string told = both.b->listen({"127.0.0.1:0"})->text;
  both.of_a = *both.a->connect({told.substr(0, told.find('|') + 1)}, {});
  EXPECT_TRUE(both.until([&] { return both.up_a && both.up_b; }));
}

TEST(RailsAtTheStart, WithoutAnyNothingStarts) {
  const auto none = make_engine("tcp:198.51.100.1,198.51.100.2");
  ASSERT_FALSE(none);
  EXPECT_NE(none.error().message.find("rail 198.51.100.1: this machine can't listen on 198.51.100.1"),
            std::string::npos)
      << none.error().message;
  EXPECT_FALSE((*make_engine("tcp:198.51.100.1"))->listen({"127.0.0.1:0"})) << "a lone one has no others";
}

std::uint64_t refused() { return refusals::counted()[static_cast<std::size_t>(refusals::Why::protocol)]; }

TEST(RailsAtTheStart, ALoneOneAndSeveralAreRefusedAndNamedOnBothSides) {
  const std::string one = "tcp:127.0.0.1", two = "tcp:127.0.0.1,127.0.0.2";
  struct Case {
    std::string calls, listens, here, there;
  };
  for (const auto& [calls, listens, here, there] :
       {Case{one, two, "the peer has 2 rails, and this process 1:", "the peer has 1 rail, and this process 2:"},
        Case{two, one, "the peer has 1 rail, and this process 2:", "the peer has 2 rails, and this process 1:"}}) {
    SCOPED_TRACE(calls + " calls " + listens);
    Starting both(calls, listens);
    const std::string logged = logged_by([&] {
      const auto before = refused();
      both.connect();
      EXPECT_TRUE(both.until([&] { return both.end.has_value() && refused() > before; }));
    });
    EXPECT_FALSE(both.up_a || both.up_b);
    ASSERT_TRUE(both.end);
    EXPECT_TRUE(both.end->message.starts_with(here)) << both.end->message;
    EXPECT_NE(logged.find("refused: " + there), std::string::npos) << logged;
  }
}

}  // namespace
}  // namespace rejoin::transport
