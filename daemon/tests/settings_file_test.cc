// What a settings file may say, and what is made of it.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/command_line.h"
#include "daemon/config.h"

namespace rejoin::daemon {
namespace {

// Reads a settings file with this text. Errors: with what begins them, the file's name, taken off.
Result<> read_file(CommandLine& line, const std::string& text) {
  const std::string path = fmt::format("{}settings.{}", testing::TempDir(), ::getpid());
  std::ofstream(path, std::ios::binary) << text;
  auto read = line.parse(std::vector<std::string>{"--config", path});
  std::filesystem::remove(path);
  if (!read && read.error().message.starts_with(path + " ")) read.error().message.erase(0, path.size() + 1);
  return read;
}

// What is printed at the start is a settings file.
TEST(SettingsFile, TheDefaultsCanBeReadBack) {
  Config config, again;
  CommandLine line(""), other("");
  bind(line, config);
  bind(other, again);
  ASSERT_TRUE(line.parse({"--job-key-file", "key", "--coordinator", "--listen", "[::1]:0"}));
  const auto read = read_file(other, line.settings());
  ASSERT_TRUE(read) << read.error().message << "\n" << line.settings();
  EXPECT_EQ(again.listen, "[::1]:0");
}

TEST(SettingsFile, WhateverAValueHasInItIsReadBackFromWhatIsPrinted) {
  for (const std::string value : {"a#b", "a # b", "# a", "a\"b", "it's", "'a'", "\"", "'", "a,b", "[a,b]", "a = b",
                                  "a;b", "0x10", "0o7", " a ", "true", "1e3", "#"}) {
    Config config, again;
    CommandLine line(""), other("");
    bind(line, config);
    bind(other, again);
    ASSERT_TRUE(line.parse({"--job-key-file", "key", "--coordinator", "--name", value, "--log-directory", value}));
    const auto read = read_file(other, line.settings());
    ASSERT_TRUE(read) << value << ": " << read.error().message << "\n" << line.settings();
    EXPECT_EQ(again.node.name, value);
    EXPECT_EQ(again.log_directory, value);
  }
}

TEST(SettingsFile, AFileHasListsQuotesAndCommentsAsPeopleWriteThem) {
  Config config;
  CommandLine line("");
  bind(line, config);
  const auto read = read_file(line,
                              "\xef\xbb\xbf# of an editor that marks the order of bytes\r\n"
                              "job-key-file = key # a comment\r\n"
                              "connect = 127.0.0.1:7000,127.0.0.1:7001\n"
                              "transport=tcp:10.0.0.1,10.0.0.2\n"
                              "\tlisten = [::1]:7000\n"
                              "; another comment\n"
                              "name = 'a # b' # c\n"
                              "log-directory = \"run#3/it's\"\n"
                              "advertise =\n"
                              "constant-batch # a flag\n");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(config.key_file, "key");
  EXPECT_EQ(config.node.coordinator, "127.0.0.1:7000,127.0.0.1:7001");
  EXPECT_EQ(config.node.transport, "tcp:10.0.0.1,10.0.0.2");
  EXPECT_EQ(config.listen, "[::1]:7000");
  EXPECT_EQ(config.node.name, "a # b");
  EXPECT_EQ(config.log_directory, "run#3/it's");
  EXPECT_TRUE(config.constant_batch);
}

// Why this settings file is refused.
std::string refusal_of_file(const std::string& text) {
  Config config;
  CommandLine line("");
  bind(line, config);
  const auto parsed = read_file(line, "job-key-file = key\n" + text);
  return parsed ? "" : parsed.error().message;
}

TEST(SettingsFile, AWrongLineOfAFileIsNamed) {
  for (const auto& [text, says] : std::vector<std::pair<std::string, std::string>>{
           {"\nreplicas = four\n", "line 3: replicas: "},
           {"replica = 4\n", "line 2: no setting is called 'replica'; the nearest is 'replicas'"},
           {"REPLICAS = 4\n", "line 2: no setting is called 'REPLICAS'; the nearest is 'replicas'"},
           {"version = 4\n", "line 2: no setting is called 'version'; --help names all"},
           {"name = a\nreplicas 3\n", "line 3: 'replicas 3' is not of the form name = value: it has no '='"},
           {"=3\n", "line 2: '=3' is not of the form name = value"},
           {"name = \"a\nb\"\n", "line 2: 'name = \"a' is not of the form name = value: its quotes do"},
           {"name = a\nreplicas = 2\n\nname = b\n", "line 2: 'name' is set once more in line 5: take one of them out"},
           {{"b\0\x01x\n", 5}, "line 2: 'b??x' is not of the form name = value"},
           {"name = a\nb\"\n", "line 3: 'b\"' is not of the form name = value"},
           {"audit = maybe\n", "line 2: audit: 'maybe' is not auto, off, or a number of steps"},
           {"drop-replica = 1\n", "line 2: drop-replica: '1' is not REPLICA@STEP"},
           {"log-directory = here ; mine\n", "line 2: 'log-directory' has 3 values"},
           {"name = a#b\n", "line 2: 'name = a#b' is not clear: a value with # or quotes in it stands in quotes"},
           {"name = a\"b\n", "line 2: 'name = a\"b' is not clear: a value with # or quotes"},
           {"name = 'a#b\n", "line 2: 'name = 'a#b' is not of the form name = value: its quotes do not close"},
           {"[here]\n", "line 2: '[here]' begins a section, and settings stand in none: take it out"},
           {"help = true\n", "line 2: no setting is called 'help'; --help names all"},
           {"batch = 0x10\n", "line 2: batch: '0x10' is not a whole number in decimal digits"},
       }) {
    const std::string why = refusal_of_file(text);
    EXPECT_EQ(why.find(says), 0u) << text << why;
  }
}

TEST(SettingsFile, AVariableWinsOverTheFileAndAFlagOverBoth) {
  ::setenv("REJOIN_REPLICAS", "5", 1);
  const std::string path = fmt::format("{}settings.{}", testing::TempDir(), ::getpid());
  std::ofstream(path) << "job-key-file = key\nreplicas = 4\nranks = 7\n";
  const auto replicas = [&](std::vector<std::string> arguments) {
    Config config;
    CommandLine line("");
    bind(line, config);
    arguments.insert(arguments.end(), {"--config", path});
    const auto parsed = line.parse(arguments);
    EXPECT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(config.ranks, 7u);
    return config.replicas;
  };
  EXPECT_EQ(replicas({}), 5u);
  EXPECT_EQ(replicas({"--replicas", "6"}), 6u);
  ::unsetenv("REJOIN_REPLICAS");
  EXPECT_EQ(replicas({}), 4u);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace rejoin::daemon
