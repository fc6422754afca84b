// Event files of processes that worked, said nothing, and were killed in the middle of a line.
#include "daemon/trace.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace rejoin::daemon {
namespace {

struct Trace : testing::Test {
  std::filesystem::path directory =
      std::filesystem::temp_directory_path() / ("rejoin-trace-" + std::to_string(::getpid()));
  Trace() { std::filesystem::create_directory(directory); }
  ~Trace() override { std::filesystem::remove_all(directory); }
  void file(const std::string& name, const std::string& text) const { std::ofstream(directory / name) << text; }
  std::string text(const std::string& name) const {
    std::ifstream in(directory / name);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  Result<MergedTrace> merge() const { return merge_trace({directory}, directory / "trace.json"); }
  nlohmann::json events() const {
    std::ifstream in(directory / "trace.json");
    return nlohmann::json::parse(in).at("traceEvents");
  }
};

TEST_F(Trace, StepsHaveTheirPhasesAndWhoSaidNothingHasNoRow) {
  file("trainer.1.jsonl", R"({"t":1000,"who":"r0.0","kind":"entered","epoch":1})"
                          "\n"
                          R"({"t":2000,"who":"r0.0","kind":"step","step":7})"
                          "\n"
                          R"({"t":5000,"who":"r0.0","kind":"computed","step":7})"
                          "\n"
                          R"({"t":9000,"who":"r0.0","kind":"reduced","step":7,"epoch":1})"
                          "\n"
                          R"({"t":9500,"who":"r0.0","ki)");
  file("killed.2.jsonl", "");
  file("damaged.3.jsonl", "[1]\n{\"t\":\"soon\",\"kind\":\"step\"}\n{\"t\":5}\n");
  const auto rows = merge();
  ASSERT_TRUE(rows) << rows.error().message;
  EXPECT_EQ(rows->processes, 1);
  std::vector<std::string> spans, instants;
  for (const auto& event : events()) {
    if (event.at("ph") == "X")
      spans.push_back(event.at("name").get<std::string>() + " " + event.at("ts").dump() + "+" + event.at("dur").dump());
    if (event.at("ph") == "i") instants.push_back(event.at("name"));
  }
  EXPECT_EQ(spans, (std::vector<std::string>{"compute 7 2.0+3.0", "reduce 7 5.0+4.0"}));
  EXPECT_EQ(instants, std::vector<std::string>{"entered"});
}

TEST_F(Trace, WhatIsNestedWithoutEndIsLeftOut) {
  const std::size_t levels = 1'000'000;
  file("deep.1.jsonl", R"({"t":1000,"kind":"entered","epoch":1,"more":)" + std::string(levels, '[') +
                           std::string(levels, ']') + "}\n" + std::string(levels, '['));
  const auto rows = merge();
  ASSERT_TRUE(rows) << rows.error().message;
  EXPECT_EQ(rows->processes, 1);
  EXPECT_EQ(events().back().at("name"), "entered");
  EXPECT_EQ(events().back().at("args").at("epoch"), 1);
}

TEST_F(Trace, WithoutEventsThereIsAnErrorThatNamesTheDirectory) {
  file("killed.2.jsonl", "");
  const auto none = merge();
  ASSERT_FALSE(none);
  EXPECT_NE(none.error().message.find("no events in " + directory.string() + ": none is in killed.2.jsonl; give"),
            std::string::npos)
      << none.error().message;
  for (const char* name : {"a.jsonl", "notes.txt", "b.jsonl", "c.jsonl", "d.jsonl", "e.jsonl"}) file(name, "garbage\n");
  const auto garbage = merge();
  ASSERT_FALSE(garbage);
  EXPECT_NE(garbage.error().message.find(": none is in a.jsonl, b.jsonl, c.jsonl, d.jsonl, e.jsonl and 2 more; give"),
            std::string::npos)
      << garbage.error().message;
  EXPECT_FALSE(merge_trace({directory / "nowhere"}, directory / "trace.json"));
}

TEST_F(Trace, WithoutEventsWhatIsAtItsPathStays) {
  file("trace.json", "of the incident");
  ASSERT_FALSE(merge());
  EXPECT_EQ(text("trace.json"), "of the incident");
  ASSERT_EQ(::mkfifo((directory / "pipe").c_str(), 0600), 0);  // to open it would wait for a reader
  ASSERT_FALSE(merge_trace({directory}, directory / "pipe"));
  EXPECT_TRUE(std::filesystem::is_fifo(directory / "pipe"));
  ASSERT_FALSE(merge_trace({directory}, directory / "new.json"));
  EXPECT_FALSE(std::filesystem::exists(directory / "new.json"));
}

// As of a full disk.
TEST_F(Trace, ThatCantBeWrittenSaysWhy) {
  file("a.jsonl", R"({"t":1000,"who":"r0.0","kind":"entered","epoch":1})"
                  "\n");
  rlimit most{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &most), 0);
  const rlimit few{.rlim_cur = 100, .rlim_max = most.rlim_max};
  const auto before = ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &few), 0);
  const auto written = merge();
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &most), 0);
  ::signal(SIGXFSZ, before);
  ASSERT_FALSE(written);
  EXPECT_NE(written.error().message.find("trace.json: File too large"), std::string::npos) << written.error().message;
  const auto full = merge_trace({directory}, "/dev/full");
  ASSERT_FALSE(full);
  EXPECT_NE(full.error().message.find("/dev/full: No space left on device"), std::string::npos) << full.error().message;
}

TEST_F(Trace, AFileThatIsReadIsNotOverwritten) {
  const std::string event = R"({"t":1000,"who":"r0.0","kind":"entered","epoch":1})"
                            "\n";
  file("a.jsonl", event);
  file("b.flight", "garbage");
  std::filesystem::create_symlink(directory / "a.jsonl", directory / "link");
  for (const char* name : {"a.jsonl", "b.flight", "link"}) {
    const auto refused = merge_trace({directory}, directory / name);
    ASSERT_FALSE(refused) << name;
    EXPECT_EQ(refused.error().code, ErrorCode::invalid_argument) << name;
    EXPECT_NE(refused.error().message.find((directory / name).string()), std::string::npos) << refused.error().message;
  }
  EXPECT_EQ(text("a.jsonl"), event);
  EXPECT_EQ(text("b.flight"), "garbage");
  ASSERT_TRUE(merge());
  ASSERT_TRUE(merge()) << "the last one's trace is replaced";
}

// Nobody writes into it: to open it would be to wait for that.
TEST_F(Trace, APipeIsNoEventFile) {
  ASSERT_EQ(::mkfifo((directory / "pipe.1.jsonl").c_str(), 0600), 0);
  const auto none = merge();
  ASSERT_FALSE(none);
  EXPECT_NE(none.error().message.find("none is in pipe.1.jsonl"), std::string::npos) << none.error().message;
}

}  // namespace
}  // namespace rejoin::daemon
