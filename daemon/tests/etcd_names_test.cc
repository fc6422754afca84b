// Hosts of etcd's members that the system knows, whatever a name server says: getaddrinfo() is this program's.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <netdb.h>

#include <asio/ip/tcp.hpp>
#include <condition_variable>
#include <map>
#include <mutex>

#include "daemon/etcd_address.h"
#include "daemon/etcd_client.h"
#include "daemon/tests/etcd_support.h"

namespace rejoin::daemon {
namespace {

using testing::HasSubstr;

// What the system says of names that end in ".example". A name without an address is asked in vain.
struct NameServer {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::vector<std::string>> names{{"known.example", {"127.0.0.1"}},
                                                        {"other.example", {"127.0.0.1"}}};
  std::map<std::string, int> asked;
  bool silent = false;  // about silent.example
  int waiting = 0;

  std::vector<std::string> addresses(const std::string& name) {
    std::unique_lock lock(mutex);
    ++asked[name];
    ++waiting;
    if (name == "silent.example") changed.wait(lock, [this] { return !silent; });
    --waiting;
    changed.notify_all();
    const auto found = names.find(name);
    return found == names.end() ? std::vector<std::string>{} : found->second;
  }
  void set(const std::string& name, std::vector<std::string> to) {
    const std::lock_guard lock(mutex);
    names[name] = std::move(to);
  }
  int of(const std::string& name) {
    const std::lock_guard lock(mutex);
    return asked[name];
  }
  void set_silent(bool to) {
    std::unique_lock lock(mutex);
    silent = to;
    changed.notify_all();
    if (!to) changed.wait(lock, [this] { return waiting == 0; });
  }
};
NameServer& server() {
  static auto& only = *new NameServer;
  return only;
}

// Nobody is left in it at the end.
struct Silence {
  Silence() { server().set_silent(true); }
  ~Silence() { server().set_silent(false); }
};

TEST(EtcdNames, AreFoundAsTheSystemFindsThem) {
  asio::io_context io{1};
  asio::ip::tcp::acceptor member(io, {asio::ip::address_v4::loopback(), 0});
  bool called = false;
  member.async_accept([&](asio::error_code error, const asio::ip::tcp::socket&) { called = !error; });
  const std::string known = "known.example:" + std::to_string(member.local_endpoint().port());
  const int before = server().of("known.example");
  auto client =
      EtcdClient::create(io, {.endpoints = {"nobody.example:1", known}, .deadline = std::chrono::seconds(10)});
  ASSERT_TRUE(client) << client.error().message;
  std::string error;
  (*client)->transact({}, [&](Result<etcd::TxnResponse> answer) { error = answer ? "none" : answer.error().message; });
  EXPECT_TRUE(until(io, [&] { return called && !error.empty(); })) << error;  // it is none of etcd's, and hangs up
  EXPECT_EQ(server().of("known.example"), before + 1);
  EXPECT_THAT(error, HasSubstr("etcd at nobody.example:1: its name is not resolved: Name or service not known; etcd at "
                               "known.example"));
}

TEST(EtcdNames, OneWithoutAnAnswerHoldsUpNoOther) {
  SKIP_WITHOUT_ETCD();
  test::EtcdCluster etcd({});
  const std::string port = etcd.endpoint(0).substr(etcd.endpoint(0).rfind(':'));
  const Silence silence;
  server().set("both.example", {"::1", "127.0.0.1"});  // at one of them nobody is
  Client a({.endpoints = {"silent.example:1", "both.example" + port}, .prefix = own_prefix()});
  EXPECT_EQ(a.insist({.kind = Kind::claim, .value = "a"}).outcome, Outcome::done);
  EXPECT_EQ(server().of("silent.example"), 1);

  const auto error = Client({.endpoints = {"silent.example:1"}, .prefix = own_prefix()}).read().error;
  EXPECT_THAT(error, HasSubstr("etcd at silent.example:1: its name is not resolved: no answer within 250 ms"));

  server().set("moves.example", {"127.0.0.2"});  // and nobody is there, either
  Client b({.endpoints = {"moves.example" + port}, .prefix = own_prefix()});
  EXPECT_EQ(b.read().outcome, Outcome::unknown);
  server().set("moves.example", {"127.0.0.1"});
  EXPECT_EQ(b.insist({.kind = Kind::claim, .value = "b"}).outcome, Outcome::done);
}

TEST(EtcdNames, ThatAreNotResolvedAnyMoreKeepTheirAddresses) {
  asio::io_context io{1};
  etcd_client::Address address(io, "comes.example:1");
  const auto ask = [&] {
    std::optional<Result<>> answer;
    address.ask([&](const Result<>& said) { answer = said; });
    EXPECT_TRUE(until(io, [&] { return answer.has_value(); }));
    return answer && *answer;
  };
  EXPECT_TRUE(address.has_name());
  EXPECT_FALSE(ask());
  EXPECT_EQ(address.target(), "");
  server().set("comes.example", {"127.0.0.1", "127.0.0.2"});
  EXPECT_TRUE(ask());
  EXPECT_EQ(address.target(), "ipv4:127.0.0.1:1,127.0.0.2:1");
  server().set("comes.example", {});
  EXPECT_FALSE(ask());
  EXPECT_EQ(address.target(), "ipv4:127.0.0.1:1,127.0.0.2:1");
  server().set("comes.example", {"::1", "127.0.0.2"});
  EXPECT_TRUE(ask());
  EXPECT_EQ(address.target(), "ipv6:%5B::1%5D:1,%5B::ffff:127.0.0.2%5D:1");
  EXPECT_EQ(address.count(), 2u);
}

TEST(EtcdNames, AreNoneWhereThereIsAnAddress) {
  asio::io_context io{1};
  for (const auto& [endpoint, target] : std::map<std::string, std::string>{
           {"127.0.0.1:1", "ipv4:127.0.0.1:1"},
           {"[::1]:1", "ipv6:%5B::1%5D:1"},
           {"[fe80::1%lo]:1", "ipv6:%5Bfe80::1%25lo%5D:1"},
       }) {
    const etcd_client::Address address(io, endpoint);
    EXPECT_FALSE(address.has_name());
    EXPECT_EQ(address.target(), target);
  }
}

}  // namespace
}  // namespace rejoin::daemon

extern "C" int getaddrinfo(const char* name, const char* service, const addrinfo* hints, addrinfo** found) {
  using Own = int(const char*, const char*, const addrinfo*, addrinfo**);
  static auto* own = reinterpret_cast<Own*>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  if (name == nullptr || !std::string_view(name).ends_with(".example")) return own(name, service, hints, found);
  *found = nullptr;
  for (const std::string& address : rejoin::daemon::server().addresses(name)) {
    while (*found != nullptr) found = &(*found)->ai_next;
    if (const int error = own(address.c_str(), service, hints, found); error != 0) return error;
  }
  return *found == nullptr ? EAI_NONAME : 0;
}
