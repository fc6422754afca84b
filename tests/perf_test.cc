// The tools in perftest's manner, as a user runs them: a server, a client, and what they print.
#include <gtest/gtest.h>

#include <iterator>
#include <nlohmann/json.hpp>

#include "tests/process.h"

namespace rejoin::test {
namespace {

struct Pair {
  Scratch scratch;
  Ended client;
  int server = -1;
  std::string server_output;

  Pair(const std::string& tool, const std::vector<std::string>& options,
       const std::vector<std::string>& client_only = {}, const std::vector<std::string>& environment = {}) {
    std::vector<std::string> arguments{binaries() + "/" + tool, "-p", "0", "--bind_source_ip", "127.0.0.1"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    Process process(arguments, scratch.path + "/server", environment);
    std::string port;
    EXPECT_TRUE(eventually([&] {
      const std::string output = process.output(), mark = "listening on 127.0.0.1:";
      const auto at = output.find(mark), end = output.find('\n', at);
      if (at == std::string::npos || end == std::string::npos) return false;
      port = output.substr(at + mark.size(), end - at - mark.size());
      return true;
    })) << process.output();
    arguments = {binaries() + "/" + tool, "-p", port, "127.0.0.1"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    arguments.insert(arguments.end(), client_only.begin(), client_only.end());
    client = run(arguments, environment, std::chrono::seconds(30));
    server = process.wait(std::chrono::seconds(10));
    server_output = process.output();
  }
};

TEST(Perf, EachToolRunsOverEachTransportAndChecksWhatArrived) {
  for (const std::string transport : {"shm", "tcp"})
    for (const std::string tool : {"rejoin_write_bw", "rejoin_read_bw", "rejoin_write_lat", "rejoin_send_lat"}) {
      SCOPED_TRACE(tool + " over " + transport);
      const bool bandwidth = tool.ends_with("bw");
      std::vector<std::string> options{"--transport", transport, "-n", "200", "-s", "3000"};
      if (bandwidth) options.push_back("--verify");
      const Pair pair(tool, options);
      EXPECT_EQ(pair.client.status, 0) << pair.client.output;
      EXPECT_EQ(pair.server, 0) << pair.server_output;
      EXPECT_NE(pair.client.output.find(bandwidth ? "BW average[MB/sec]" : "t_typical[usec]"), std::string::npos);
      EXPECT_NE(pair.client.output.find("\n 3000 "), std::string::npos) << pair.client.output;
    }
}

TEST(Perf, AFileThatCannotBeWrittenIsFoundBeforeTheRun) {
  Scratch scratch;
  for (const auto& file : {scratch.path, scratch.path + "/none/out.json"})
    for (const std::vector<std::string>& tool :
         {std::vector<std::string>{"rejoin_write_bw", "-D", "100", "--out_json_file", file, "127.0.0.1"},
          {"rejoin_allreduce_perf", "-n", "100000", "--json", file},
          {"rejoin_step_perf", "--json", file},
          {"rejoin_recovery_perf", "--json", file}}) {
      std::vector<std::string> arguments = tool;
      arguments[0] = binaries() + "/" + tool[0];
      const Ended ended = run(arguments, {}, std::chrono::seconds(30));
      EXPECT_EQ(ended.status, 1) << tool[0];
      EXPECT_NE(ended.output.find("can't write " + file), std::string::npos) << ended.output;
    }
}

// Memory that ranks share among them is no part of what is limited here.
TEST(Perf, AnAllReduceNeedsNoMemoryBesideItsBuffers) {
  const std::string tool = "exec " + binaries() + "/rejoin_allreduce_perf -b 96M -e 96M -n 1 -w 0 --limits 0";
  const Ended ended = run({"/bin/sh", "-c", "ulimit -d 90000; " + tool}, {}, std::chrono::seconds(60));
  EXPECT_EQ(ended.status, 0) << ended.output;
  EXPECT_NE(ended.output.find(" 100663296 "), std::string::npos) << ended.output;
}

TEST(Perf, ARankOfAnAllReduceThatIsKilledIsNamed) {
  Scratch scratch;
  Process process({binaries() + "/rejoin_allreduce_perf", "-n", "1000000", "-e", "8", "--ranks", "4"},
                  scratch.path + "/out");
  const std::string mine = std::to_string(process.pid());
  std::vector<pid_t> ranks;
  EXPECT_TRUE(eventually([&] {
    std::ifstream children("/proc/" + mine + "/task/" + mine + "/children");
    ranks.assign(std::istream_iterator<pid_t>(children), {});
    return ranks.size() == 3;
  }));
  ASSERT_EQ(ranks.size(), 3u);
  ::kill(ranks[1], SIGKILL);
  EXPECT_EQ(process.wait(std::chrono::seconds(30)), 1);
  const std::string told = "rejoin_allreduce_perf: rank 2, process " + std::to_string(ranks[1]) +
                           ", was ended by SIGKILL, as where memory lacks (dmesg tells): each rank needs twice "
                           "--maxbytes\n";
  EXPECT_NE(process.output().find(told), std::string::npos) << process.output();
  EXPECT_EQ(process.output().find("another process failed"), std::string::npos) << process.output();
}

TEST(Perf, BothWaysOverRailsAndAllSizesWithJson) {
  Scratch scratch;
  const Pair pair("rejoin_write_bw",
                  {"--transport", "tcp", "--rails", "127.0.0.1,127.0.0.2", "-a", "-b", "-n", "20", "--verify"},
                  {"--out_json", "--out_json_file", scratch.path + "/out.json", "--report_gbits"});
  EXPECT_EQ(pair.client.status, 0) << pair.client.output;
  EXPECT_EQ(pair.server, 0) << pair.server_output;
  const auto json = nlohmann::json::parse(read_file(scratch.path + "/out.json"), nullptr, false);
  ASSERT_FALSE(json.is_discarded());
  ASSERT_EQ(json.at("results").size(), 23u);
  EXPECT_EQ(json.at("results")[22].at("MsgSize"), 8 * 1024 * 1024);
  EXPECT_GT(json.at("results")[22].at("BW_average").get<double>(), 0);
}

TEST(Perf, ForADurationAndWithAHistogram) {
  const Pair pair("rejoin_send_lat", {"--transport", "shm", "-n", "30"}, {"-H"});
  EXPECT_EQ(pair.client.status, 0) << pair.client.output;
  EXPECT_NE(pair.client.output.find("\n30, "), std::string::npos) << pair.client.output;
  const Pair timed("rejoin_write_bw", {"--transport", "shm", "-D", "1", "-s", "4096"});
  EXPECT_EQ(timed.client.status, 0) << timed.client.output;
  EXPECT_EQ(timed.server, 0) << timed.server_output;
}

// A GPU made of software, which the tools load as the machine's.
TEST(Perf, GpuMemoryIsStagedWhereTheTransportCantReachIt) {
  const std::vector<std::string> gpu{"LD_LIBRARY_PATH=" REJOIN_FAKE_CUDA};
  for (const std::string tool : {"rejoin_write_bw", "rejoin_read_bw"}) {
    const Pair pair(tool, {"--transport", "tcp", "--use_cuda", "0", "-n", "100", "-s", "2500000", "--verify"}, {}, gpu);
    EXPECT_EQ(pair.client.status, 0) << pair.client.output;
    EXPECT_EQ(pair.server, 0) << pair.server_output;
    EXPECT_NE(pair.client.output.find("GPU of software (CUDA device 0, 0000:00:00.0), staged"), std::string::npos)
        << pair.client.output;
  }
  const Ended third =
      run({binaries() + "/rejoin_write_bw", "--transport", "tcp", "--use_cuda", "3"}, gpu, std::chrono::seconds(20));
  EXPECT_NE(third.output.find("no CUDA device 3: there are 1"), std::string::npos) << third.output;
}

TEST(Perf, WrongUseIsNamed) {
  const auto expect = [](std::vector<std::string> arguments, const std::string& what) {
    const Ended ended = run(std::move(arguments), {}, std::chrono::seconds(20));
    EXPECT_NE(ended.status, 0) << what;
    EXPECT_NE(ended.output.find(what), std::string::npos) << ended.output;
  };
  const std::string tool = binaries() + "/rejoin_write_bw";
  expect({tool, "--transport", "shm", "-p", "1", "127.0.0.1"}, "start the same tool there without a host");
  expect({tool, "--transport", "tcp", "--use_cuda", "0"}, "no CUDA driver");
  expect({binaries() + "/rejoin_write_lat", "--transport", "tcp", "--use_cuda", "0"}, "rejoin_write_bw");
  expect({tool, "-d", "no_such_device"}, "no RDMA device");
  expect({tool, "--no-such-flag"}, "--no-such-flag");
  expect({binaries() + "/rejoin_send_lat", "-s", "1M"}, "at most 32 KiB");
  const Pair pair("rejoin_write_bw", {"--transport", "shm"}, {"-n", "7"});
  EXPECT_NE(pair.client.output.find("give both the same options"), std::string::npos) << pair.client.output;
}

}  // namespace
}  // namespace rejoin::test
