// What settings may be: each wrong one is refused with its flag, its value and what is allowed.
#include "daemon/config.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/command_line.h"
#include "daemon/listen.h"

namespace rejoin::daemon {
namespace {

Result<> parse(const std::vector<std::string>& arguments, Config& config) {
  CommandLine line("");
  bind(line, config);
  std::vector<std::string> whole{"--job-key-file", "key"};
  whole.insert(whole.end(), arguments.begin(), arguments.end());
  return line.parse(whole);
}

// Why these settings are refused; nothing where they are taken.
std::string refusal(const std::vector<std::string>& arguments) {
  Config config;
  const auto parsed = parse(arguments, config);
  return parsed ? "" : parsed.error().message;
}

struct Refused {
  std::string flag, value, allowed;
};

TEST(Settings, AWrongOneIsRefusedWithItsFlagItsValueAndWhatIsAllowed) {
  for (const auto& [flag, value, allowed] : std::vector<Refused>{
           {"--listen", "127.0.0.1:99999", "0 to 65535"},
           {"--listen", "127.0.0.1:-1", "0 to 65535"},
           {"--listen", "127.0.0.1:", "host:port"},
           {"--listen", "", "host:port"},
           {"--listen", "*:7000", "to listen on all addresses write 0.0.0.0 or [::]"},
           {"--listen", "[::1]", "not of the form host:port"},
           {"--status", "*:7001", "0.0.0.0 or [::]"},
           {"--data-listen", "10.0.0.1:0|*:0", "0.0.0.0 or [::]"},
           {"--status", "127.0.0.1:65536", "0 to 65535"},
           {"--status", "127.0.0.1:http", "0 to 65535"},
           {"--data-listen", "[::1]:70000", "0 to 65535"},
           {"--advertise", "10.0.0.1:7000", "a host without a port"},
           {"--advertise", "0.0.0.0", "nobody can be reached at 0.0.0.0"},
           {"--relay", "127.0.0.1:99999", "0 to 65535"},
           {"--connect", "127.0.0.1:99999", "0 to 65535"},
           {"--connect", "127.0.0.1:0", "1 to 65535"},
           {"--connect", "127.0.0.1:7000,", "host:port"},
           {"--connect", "http://127.0.0.1:7000", "has a '/' in it; write HOST:PORT alone, without http://"},
           {"--connect", "a:7000, b:7000", "address ' b:7000': its host ' b' has a blank in it"},
           {"--connect", "etcd:127.0.0.1:1", "its host 'etcd:127.0.0.1' has a ':' in it"},
           {"--store", "etcd:http://10.0.0.1:2379", "without http://"},
           {"--connect", "a:7000,b:7000,a:7000", "the address a:7000 twice"},
           {"--store", "files", "file, or etcd:HOST:PORT"},
           {"--store", "etcd:", "host:port"},
           {"--store", "etcd:a:2379,b:0", "1 to 65535"},
           {"--store", "etcd:a:2379,::1:2379", "write e.g. [::1]:2379"},
           {"--job", "my job", "letters, digits"},
           {"--log-level", "loud", "trace, debug, info, warn, error, off"},
           {"--steps", "-1", "from 0 to"},
           {"--start-patience-ms", "-1", "from 0 to"},
           {"--start-patience-ms", "18446744073709551615", "from 0 to 1099511627776"},
           {"--start-patience-ms", "10000000000000", "from 0 to 1099511627776"},
           {"--roll-back-to", "-1", "from 0 to"},
           {"--roll-back-to", "7@", "STEP@STEPS, as the job's status says it"},
           {"--roll-back-to", "@7", "STEP@STEPS, as the job's status says it"},
           {"--roll-back-to", "5@3", "the number behind @ counts all steps ever, and is the larger one"},
           {"--stream-limit", "nan", "from 0 to 1000000000"},
           {"--stream-limit", "inf", "from 0 to 1000000000"},
           {"--stream-limit", "1e300", "from 0 to 1000000000"},
           {"--stream-limit", "-1", "from 0 to 1000000000"},
           {"--transport", "tcp:", "tcp:ADDRESS,ADDRESS…"},
           {"--transport", "tcp:127.0.0.1,", "tcp:ADDRESS,ADDRESS…"},
           {"--transport", "pigeon", "use shm, tcp"},
           {"--location", "dc//host", "a name in it is empty"},
           {"--location", "dc/room 1", "other characters than letters, digits"},
           {"--location", "a/b/c/d/e/f/g/h/i", "8 at most"},
           {"--socket", "@", "'@name'"},
           {"--socket", std::string(200, 's'), "1 to 107 characters"},
       }) {
    const std::string why = refusal({flag, value});
    EXPECT_NE(why.find(flag), std::string::npos) << flag << " " << value << ": " << why;
    EXPECT_NE(why.find("'" + value + "'"), std::string::npos) << flag << " " << value << ": " << why;
    EXPECT_NE(why.find(allowed), std::string::npos) << flag << " " << value << ": " << why;
  }
}

TEST(Settings, AWrongOneOfARailIsRefusedBeforeItsDeviceIsOpened) {
  EXPECT_NE(refusal({"--transport", "ibverbs:mlx5_0;gid=3,mlx5_1;qps=9"})
                .find("--transport: 'qps=9' of rail 'mlx5_1;qps=9': settings are gid"),
            std::string::npos);
  for (const char* name : {"ibverbs", "ibverbs:near", "ibverbs:mlx5_0:2;gid=3;cm=auto,mlx5_1;tc=106"})
    EXPECT_EQ(refusal({"--transport", name}), "");
}

// No message would take them, and no address file the socket's.
TEST(Settings, ANameHostOrSocketThatIsNotUtf8IsRefused) {
  EXPECT_EQ(refusal({"--name", "caf\xe9"}), "--name: 'caf?' is not text in UTF-8");
  EXPECT_NE(refusal({"--advertise", "caf\xe9"}).find("--advertise: 'caf?' is not the name"), std::string::npos);
  EXPECT_EQ(refusal({"--socket", "/tmp/caf\xe9"}), "--socket: '/tmp/caf?' is not text in UTF-8");
  EXPECT_EQ(refusal({"--name", "café", "--advertise", "café", "--socket", "/tmp/café"}), "");
}

TEST(Settings, ANameWithACharacterThatDoesNotPrintIsRefused) {
  for (const char letter : {'\n', '\t', '\x1b', '\x7f'})
    EXPECT_EQ(refusal({"--name", std::string("a") + letter + "b"}),
              "--name: 'a?b' has a character that does not print, such as the end of a line: give a name that is one "
              "line without any");
}

TEST(Settings, ANameThatIsTooLongIsRefused) {
  EXPECT_EQ(refusal({"--name", std::string(256, 'x')}),
            "--name: '" + std::string(40, 'x') + "…' has 256 bytes, and 255 are the most");
  EXPECT_EQ(refusal({"--coordinator", "--name", std::string(255, 'x')}), "");
}

TEST(Settings, WhatIsRightIsTaken) {
  EXPECT_EQ(refusal({"--coordinator", "--listen", "[::1]:0", "--status", "localhost:65535", "--steps", "0",
                     "--start-patience-ms", "0", "--roll-back-to", "0", "--round-trips", "off", "--log-level", "off"}),
            "");
  EXPECT_EQ(refusal({"--socket", "@name", "--connect", "[::1]:7000", "--transport", "tcp:127.0.0.1,127.0.0.2",
                     "--stream-limit", "0.5", "--location", "dc1/room-2/rack_3/host.4", "--data-listen", "0.0.0.0:0",
                     "--relay", "127.0.0.1:0"}),
            "");
}

TEST(Settings, WhatDoesNotGoTogetherIsRefusedWithWhatToDo) {
  const auto together = [](const std::vector<std::string>& arguments) {
    Config config;
    const auto parsed = parse(arguments, config);
    EXPECT_TRUE(parsed) << parsed.error().message;
    const auto checked = check(config);
    return checked ? "" : checked.error().message;
  };
  const auto expect = [&](const std::vector<std::string>& arguments, const std::string& what) {
    const std::string why = together(arguments);
    EXPECT_NE(why.find(what), std::string::npos) << why;
  };
  const std::string etcd = "etcd:a:2379,[::1]:2379";
  EXPECT_EQ(together({"--coordinator", "--store", etcd, "--job", "a.b_c-1", "--etcd-ca", "ca", "--etcd-cert", "c",
                      "--etcd-key", "k", "--etcd-user", "u", "--etcd-password-file", "p"}),
            "");
  EXPECT_EQ(together({"--socket", "@s", "--connect", "a:7000,b:7000"}), "");
  expect({}, "nothing to do");
  expect({"--socket", "@s"}, "--connect HOST:PORT");
  expect({"--socket", "@s", "--connect", "a:1", "--store", etcd}, "for coordinators alone: add --coordinator");
  expect({"--coordinator", "--etcd-user", "u", "--etcd-password-file", "p"}, "add --store etcd:HOST:PORT");
  expect({"--coordinator", "--store", etcd, "--etcd-ca", "ca", "--etcd-cert", "c"}, "--etcd-cert and --etcd-key");
  expect({"--coordinator", "--store", etcd, "--etcd-cert", "c", "--etcd-key", "k"}, "needs --etcd-ca");
  expect({"--coordinator", "--store", etcd, "--etcd-user", "u"}, "--etcd-password-file");
  expect({"--coordinator", "--constant-batch", "--replicas", "1024", "--batch", "4194304"}, "1024 × 4194304 samples");
}

TEST(Settings, AnAddressOfIpv6IsInDoubtWhereItIsNotListenedOn) {
  const auto doubt_of = [](const std::vector<std::string>& arguments) {
    Config config;
    EXPECT_TRUE(parse(arguments, config));
    return doubt(config);
  };
  const std::vector<std::string> node{"--socket",      "@s",        "--connect",  "a:1",
                                      "--data-listen", "0.0.0.0:0", "--advertise"};
  const auto with = [&](const char* last) {
    auto all = node;
    all.emplace_back(last);
    return all;
  };
  EXPECT_NE(doubt_of(with("fd00::1")).find("--data-listen 0.0.0.0:0 is there over IPv4 alone"), std::string::npos);
  EXPECT_EQ(doubt_of(with("10.0.0.1")), "");
  EXPECT_EQ(doubt_of(with("n1.example")), "");
  EXPECT_NE(
      doubt_of({"--coordinator", "--listen", "0.0.0.0:7000", "--advertise", "fd00::1"}).find("--listen 0.0.0.0:7000"),
      std::string::npos);
  EXPECT_EQ(doubt_of({"--coordinator", "--listen", "[::]:7000", "--advertise", "fd00::1"}), "");
}

// Places and nodes are often numbered with zeros in front.
TEST(Settings, NumbersAreDecimalWithZerosInFrontToo) {
  Config config;
  ASSERT_TRUE(
      parse({"--batch", "010", "--silence-ms", "02000", "--steps", "0100", "--full-mesh-members", "00"}, config));
  EXPECT_EQ(config.batch, 10u);
  EXPECT_EQ(config.silence_ms, 2000u);
  EXPECT_EQ(config.steps, 100u);
  EXPECT_EQ(config.full_mesh_members, 0u);
  std::uint64_t bytes = 0;
  std::optional<std::uint32_t> maybe;
  std::vector<int> several;
  std::chrono::milliseconds wait{};
  CommandLine line("");
  line.add("--bytes", bytes, "").sized();
  line.add("--maybe", maybe, "");
  line.add("--several", several, "").separated_by(',');
  line.add("--wait-ms", wait, "");
  ASSERT_TRUE(line.parse({"--bytes", "010K", "--maybe", "08", "--several", "09,-011", "--wait-ms", "0123"}));
  EXPECT_EQ(bytes, 10u << 10);
  EXPECT_EQ(maybe, 8u);
  EXPECT_EQ(several, (std::vector<int>{9, -11}));
  EXPECT_EQ(wait.count(), 123);
  for (const auto& wrong : std::vector<std::vector<std::string>>{{"--bytes", "0x10"},
                                                                 {"--bytes", "0x10K"},
                                                                 {"--maybe", "0x10"},
                                                                 {"--several", "1,0b1"},
                                                                 {"--wait-ms", "0x10"},
                                                                 {"--maybe", "1.0"},
                                                                 {"--bytes", "99999999999999999999"}}) {
    const auto refused = line.parse(wrong);
    ASSERT_FALSE(refused) << wrong[0] << " " << wrong[1];
    EXPECT_NE(refused.error().message.find(wrong[0]), std::string::npos) << refused.error().message;
  }
}

TEST(Settings, DurationsAreWholeMilliseconds) {
  std::chrono::milliseconds wait{7};
  CommandLine line("");
  line.add("--wait-ms", wait, "for an answer");
  ASSERT_TRUE(line.parse(std::vector<std::string>{}));
  EXPECT_EQ(wait.count(), 7);
  ASSERT_TRUE(line.parse({"--wait-ms", "250"}));
  EXPECT_EQ(wait.count(), 250);
  for (const char* wrong : {"-1", "1s", "2000000000000"}) {
    const auto refused = line.parse({"--wait-ms", wrong});
    ASSERT_FALSE(refused) << wrong;
    EXPECT_NE(refused.error().message.find("--wait-ms"), std::string::npos) << refused.error().message;
  }
}

TEST(Settings, AFlagThatIsUnknownIsToldBeforeOneThatIsMissing) {
  Config config;
  CommandLine line("");
  bind(line, config);
  const auto parsed = line.parse({"--job-key-fil", "key"});
  ASSERT_FALSE(parsed);
  EXPECT_NE(parsed.error().message.find("not expected: --job-key-fil key"), std::string::npos)
      << parsed.error().message;
}

TEST(Settings, AMisspeltVariableIsNamedOnce) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process that has parsed nothing yet
  const auto said = [] {
    ::setenv("REJOIN_PATIENCE", "5", 1);
    for (int i = 0; i < 2; ++i)
      if (!CommandLine("").parse({})) std::abort();
    std::exit(0);
  };
  EXPECT_EXIT(said(), testing::ExitedWithCode(0),
              "^rejoin: the variable REJOIN_PATIENCE is none of Rejoin's, and is ignored; the nearest is "
              "REJOIN_PATIENCE_MS\n$");
}

// Nobody gave the flag.
TEST(Settings, AWrongVariableIsNamedByItsNameAndNotItsFlags) {
  ::setenv("REJOIN_STEPS", "soon", 1);
  const std::string why = refusal({});
  const std::string of_the_flag = refusal({"--steps", "late"});
  ::unsetenv("REJOIN_STEPS");
  EXPECT_EQ(why.find("REJOIN_STEPS: 'soon'"), 0u) << why;
  EXPECT_EQ(of_the_flag.find("--steps: 'late'"), 0u) << of_the_flag;
}

TEST(Settings, AFileThatIsNoneIsNamed) {
  for (const auto& [path, says] : std::vector<std::pair<std::string, std::string>>{
           {"/nowhere/settings", "--config: File does not exist: /nowhere/settings"},
           {"/tmp", "--config: File is actually a directory: /tmp"}}) {
    const std::string why = refusal({"--config", path});
    EXPECT_EQ(why, says);
  }
}

TEST(Settings, AFlagIsPrintedAsTrueOrFalseHoweverItWasGiven) {
  for (const auto& [given, printed] : std::vector<std::pair<const char*, const char*>>{
           {"yes", "true"}, {"1", "true"}, {"true", "true"}, {"0", "false"}, {"no", "false"}}) {
    ::setenv("REJOIN_COORDINATOR_ROLE", given, 1);
    Config config;
    CommandLine line("");
    bind(line, config);
    const auto parsed = line.parse({"--job-key-file", "key"});
    ::unsetenv("REJOIN_COORDINATOR_ROLE");
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(config.coordinator, std::string(printed) == "true") << given;
    EXPECT_NE(("\n" + line.settings()).find(std::string("\ncoordinator=") + printed + "\n"), std::string::npos)
        << line.settings();
  }
}

TEST(Settings, WrongArgumentsEndAProgramWithStatusTwo) {
  const char* arguments[] = {"program", "--no-such-flag"};
  testing::internal::CaptureStderr();
  EXPECT_EQ(CommandLine("").parse(2, arguments), 2);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("not expected: --no-such-flag"), std::string::npos);
}

TEST(Settings, AProgramHasAVersion) {
  const char* arguments[] = {"program", "--version"};
  testing::internal::CaptureStdout();
  EXPECT_EQ(CommandLine("").parse(2, arguments), 0);
  EXPECT_EQ(testing::internal::GetCapturedStdout().find("rejoin "), 0u);
}

TEST(Listen, TellsAnAddressThatCanBeConnectedTo) {
  asio::io_context io;
  for (const std::string host : {"127.0.0.1", "[::1]"}) {
    asio::ip::tcp::acceptor acceptor(io);
    const auto address = listen_on(acceptor, host + ":0");
    if (!address && host == "[::1]") GTEST_SKIP() << "no IPv6 here: " << address.error().message;
    ASSERT_TRUE(address) << address.error().message;
    EXPECT_EQ(*address, host + ":" + std::to_string(acceptor.local_endpoint().port()));
    const auto endpoint = endpoint_of(*address);
    ASSERT_TRUE(endpoint) << endpoint.error().message;
    EXPECT_EQ(*endpoint, acceptor.local_endpoint());
  }
}

TEST(Listen, WaitsWhereverTheSystemLacksWhatAConnectionTakes) {
  for (const int lacks : {EMFILE, ENFILE, ENOBUFS, ENOMEM})
    EXPECT_TRUE(without_descriptors({lacks, asio::error::get_system_category()})) << std::strerror(lacks);
  for (const int other : {0, EAGAIN, ECONNABORTED, EINTR})
    EXPECT_FALSE(without_descriptors({other, asio::error::get_system_category()})) << std::strerror(other);
}

TEST(Listen, KnowsWhichAddressesLeadToItself) {
  EXPECT_TRUE(leads_to("127.0.0.1:7000", "127.0.0.1:7000"));
  EXPECT_TRUE(leads_to("127.0.0.1:7000", "0.0.0.0:7000"));
  EXPECT_TRUE(leads_to("0.0.0.0:7000", "127.0.0.1:7000"));
  EXPECT_FALSE(leads_to("127.0.0.1:7001", "127.0.0.1:7000"));
  EXPECT_FALSE(leads_to("127.0.0.2:7000", "127.0.0.1:7000")) << "another may listen there";
  EXPECT_FALSE(leads_to("192.0.2.1:7000", "0.0.0.0:7000")) << "an address of no machine";
  EXPECT_FALSE(leads_to("nowhere", "0.0.0.0:7000"));
}

}  // namespace
}  // namespace rejoin::daemon
