// A store in etcd over TLS, and one that asks for a user and a password; and options that can't be used.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include "daemon/tests/etcd_support.h"

namespace rejoin::daemon {
namespace {

using testing::AnyOf;
using testing::HasSubstr;
using namespace std::chrono_literals;

// A certificate authority, and what it has signed.
struct Authority {
  test::Scratch scratch;
  std::string file(const std::string& name) const { return scratch.path + "/" + name; }

  Authority() {
    openssl({"req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj",
             "/CN=authority", "-keyout", file("ca.key"), "-out", file("ca.pem")});
  }
  void sign(const std::string& name, const std::string& names = "IP:127.0.0.1") const {
    openssl({"req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=" + name, "-keyout",
             file(name + ".key"), "-out", file(name + ".csr")});
    scratch.write(name + ".ext", "subjectAltName=" + names + "\nextendedKeyUsage=serverAuth,clientAuth\n");
    openssl({"x509", "-req", "-days", "2", "-in", file(name + ".csr"), "-CA", file("ca.pem"), "-CAkey", file("ca.key"),
             "-CAcreateserial", "-extfile", file(name + ".ext"), "-out", file(name + ".pem")});
  }
  static void openssl(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), test::EtcdCluster::program("openssl"));
    const auto ended = test::run(std::move(arguments));
    EXPECT_EQ(ended.status, 0) << ended.output;
  }
};

TEST(EtcdStoreSecurity, BothSidesShowCertificates) {
  SKIP_WITHOUT_ETCD();
  if (test::EtcdCluster::program("openssl").empty()) GTEST_SKIP() << "it needs the package openssl";
  const Authority ours, other;
  ours.sign("etcd", "IP:127.0.0.1,DNS:known.example");
  ours.sign("rejoin");
  test::EtcdCluster etcd({.flags = {"--client-cert-auth", "--trusted-ca-file", ours.file("ca.pem"), "--cert-file",
                                    ours.file("etcd.pem"), "--key-file", ours.file("etcd.key")},
                          .tls = true});
  const EtcdOptions right{.endpoints = etcd.endpoints(),
                          .prefix = "/rejoin/job/",
                          .ca_file = ours.file("ca.pem"),
                          .cert_file = ours.file("rejoin.pem"),
                          .key_file = ours.file("rejoin.key"),
                          .deadline = 2s};
  Client a(right);
  const auto claimed = a.claim(0, "a");
  EXPECT_EQ(claimed.outcome, Outcome::done) << claimed.error;

  // Names that etcd_names_test.cc knows: of the certificate's, and of none of its.
  const std::string port = etcd.endpoint(0).substr(etcd.endpoint(0).rfind(':'));
  EtcdOptions by_name = right;
  by_name.endpoints = {"known.example" + port};
  const auto named = Client(by_name).read();
  EXPECT_EQ(named.outcome, Outcome::done) << named.error;
  by_name.endpoints = {"other.example" + port};
  const auto misnamed = Client(by_name).read();
  EXPECT_EQ(misnamed.outcome, Outcome::unknown);
  EXPECT_THAT(misnamed.error, HasSubstr("other.example is not in peer certificate"));

  EtcdOptions wrong = right;
  wrong.ca_file = other.file("ca.pem");
  const auto stranger = Client(wrong).read();
  EXPECT_EQ(stranger.outcome, Outcome::unknown);
  EXPECT_THAT(stranger.error, AnyOf(HasSubstr("certificate verify failed"), HasSubstr("CERTIFICATE_VERIFY_FAILED")));
  wrong = right;
  wrong.cert_file = wrong.key_file = "";
  EXPECT_EQ(Client(wrong).read().outcome, Outcome::unknown);
  wrong.ca_file = "";
  const auto plain = Client(wrong).read();
  EXPECT_EQ(plain.outcome, Outcome::unknown);
  std::printf("%s\n%s\n", stranger.error.c_str(), plain.error.c_str());
}

TEST(EtcdStoreSecurity, AUserShowsThePassword) {
  SKIP_WITHOUT_ETCD();
  test::EtcdCluster etcd({});
  const EtcdOptions right{.endpoints = etcd.endpoints(),
                          .prefix = "/rejoin/job/",
                          .user = "coordinator",
                          .password = "secret",
                          .deadline = 2s};
  Client a(right);
  const auto token = a.claim(0, "a").leader_revision;
  EXPECT_GT(token, 0u) << "while etcd asks nobody for a password, none is needed";

  const auto etcdctl = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {test::EtcdCluster::program("etcdctl"), "--endpoints", etcd.endpoint(0)});
    const auto ended = test::run(std::move(arguments), {"ETCDCTL_API=3"});
    EXPECT_EQ(ended.status, 0) << ended.output;
  };
  etcdctl({"user", "add", "root:root"});
  etcdctl({"user", "add", "coordinator:secret"});
  etcdctl({"user", "add", "other:secret"});
  etcdctl({"role", "add", "job"});
  etcdctl({"role", "grant-permission", "job", "--prefix=true", "readwrite", "/rejoin/job/"});
  etcdctl({"user", "grant-role", "coordinator", "job"});
  etcdctl({"auth", "enable"});

  EXPECT_EQ(a.append(token, 0, "x").outcome, Outcome::done) << "it shows the password when it is asked for";
  EXPECT_EQ(a.append(token, 1, "y").outcome, Outcome::done);
  const auto ask = [&](const std::string& user, const std::string& password) {
    EtcdOptions options = right;
    options.user = user;
    options.password = password;
    const auto answer = Client(options).read();
    if (answer.outcome == Outcome::unknown) std::printf("%s\n", answer.error.c_str());
    return answer;
  };
  EXPECT_EQ(ask("coordinator", "secret").entries.size(), 2u);
  EXPECT_THAT(ask("coordinator", "wrong").error, HasSubstr("check the user's name and its password"));
  EXPECT_THAT(ask("", "").error, HasSubstr("give one, with its password"));
  EXPECT_THAT(ask("other", "secret").error, HasSubstr("readwrite /rejoin/JOB/"));

  // A member that starts anew knows none of the tokens that it gave out.
  etcd.restart(0);
  etcd.wait_until_healthy();
  EXPECT_EQ(a.insist({.kind = Kind::append, .token = token, .position = 2, .value = "z"}).outcome, Outcome::done);
}

// etcd needs much longer to refuse a password than to answer. What is in its file is tried by and by.
TEST(EtcdStoreSecurity, APasswordThatIsRefusedIsShownEverMoreSeldomAndReadAgain) {
  SKIP_WITHOUT_ETCD();
  test::EtcdCluster etcd({});
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"user", "add", "root:secret"}, {"user", "grant-role", "root", "root"}, {"auth", "enable"}}) {
    std::vector<std::string> all{test::EtcdCluster::program("etcdctl"), "--endpoints", etcd.endpoint(0)};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const auto ended = test::run(std::move(all), {"ETCDCTL_API=3"});
    EXPECT_EQ(ended.status, 0) << ended.output;
  }
  Result<std::string> in_file = fail(ErrorCode::io, "the file is away");
  int read = 0;
  Client a({.endpoints = etcd.endpoints(),
            .prefix = "/rejoin/job/",
            .user = "root",
            .password = "old",
            .read_password = [&] { return ++read, in_file; },
            .deadline = 2s});
  const TimePoint begun = SteadyClock().now();
  int asked = 0;
  StoreAnswer answer;
  EXPECT_TRUE(test::eventually([&] {
    ++asked;
    answer = a.read();
    EXPECT_THAT(answer.error, HasSubstr("check the user's name and its password"));
    return read == 3;
  }));
  EXPECT_GE(SteadyClock().now() - begun, 700ms) << "pauses of 100, 200 and 400 ms";
  EXPECT_GT(asked, 4) << "it is answered at once meanwhile";
  EXPECT_THAT(answer.error, HasSubstr("it can't be read again: the file is away"));
  in_file = "secret";
  EXPECT_EQ(a.insist({.kind = Kind::read}).outcome, Outcome::done);
  EXPECT_EQ(read, 4);
}

TEST(EtcdStoreSecurity, OptionsThatCannotBeUsedAreNamed) {
  asio::io_context io;
  const auto error = [&](EtcdOptions options) {
    const auto made = EtcdStore::create(io, std::move(options));
    return made ? "" : made.error().message;
  };
  EXPECT_EQ(error({.endpoints = {"localhost:2379", "[::1]:2379"}}), "");
  EXPECT_THAT(error({}), HasSubstr("no etcd endpoint"));
  for (const char* wrong : {"http://localhost:2379", "localhost", ":2379", "localhost:0", "localhost:99999", "a:b"})
    EXPECT_THAT(error({.endpoints = {wrong}}), HasSubstr(fmt::format("etcd endpoint {} is not HOST:PORT", wrong)));
  const test::Scratch scratch;
  const std::string text = scratch.write("text", "hello"), missing = scratch.path + "/missing";
  EXPECT_THAT(error({.endpoints = {"a:1"}, .ca_file = missing}), HasSubstr(missing));
  EXPECT_THAT(error({.endpoints = {"a:1"}, .ca_file = scratch.path}), HasSubstr(scratch.path));
  EXPECT_THAT(error({.endpoints = {"a:1"}, .ca_file = text}), HasSubstr("not in PEM form"));
  EXPECT_THAT(error({.endpoints = {"a:1"}, .cert_file = text}), HasSubstr("give the key's file, too"));
}

}  // namespace
}  // namespace rejoin::daemon
