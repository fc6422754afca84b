// `rejoin doctor` as tests run it.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <sstream>

#include "tests/daemon_support.h"

namespace rejoin::test {

struct DoctorTest : testing::Test {
  Job job;
  Ended examine(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), {kCli, "doctor"});
    return run(std::move(arguments), {}, std::chrono::seconds(20));
  }
  // It ends with this status, and says all of these in one line.
  void expect(int status, std::vector<std::string> arguments, const std::vector<std::string>& says) const {
    const auto ended = examine(std::move(arguments));
    EXPECT_EQ(ended.status, status) << ended.output;
    std::istringstream lines(ended.output);
    for (std::string line; std::getline(lines, line);)
      if (std::ranges::all_of(says, [&](const auto& one) { return line.find(one) != std::string::npos; })) return;
    ADD_FAILURE() << "no line has " << testing::PrintToString(says) << ":\n" << ended.output;
  }
  // The same of a process that has done this to itself before, which is to succeed.
  Ended examine_after(const std::function<bool()>& before, std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), {kCli, "doctor"});
    const std::string output = job.file("out");
    std::filesystem::remove(output);
    const pid_t child = ::fork();
    if (child == 0) {
      constexpr int not_done = 90;
      const int out = ::open(output.c_str(), O_WRONLY | O_CREAT, 0600);
      ::dup2(out, 1);
      ::dup2(out, 2);
      if (!before()) ::_exit(not_done);
      std::vector<char*> argv;
      for (auto& argument : arguments) argv.push_back(argument.data());
      argv.push_back(nullptr);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status), read_file(output)};
  }
  std::vector<std::string> to_coordinator(const std::string& address) const {
    return {"--job-key-file", job.key, "--connect", address};
  }
};

}  // namespace rejoin::test
