// Real processes for the end-to-end tests: started, killed, their output kept.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace rejoin::test {

inline std::string binaries() {
  const char* given = ::getenv("REJOIN_BIN");
  return given != nullptr ? given : std::filesystem::read_symlink("/proc/self/exe").parent_path().string();
}

// Another one for each run; a run that failed is repeated with REJOIN_TEST_SEED=….
inline std::uint64_t seed_of_this_run() {
  const char* given = ::getenv("REJOIN_TEST_SEED");
  const std::uint64_t seed = given != nullptr ? std::stoull(given) : std::random_device{}();
  std::printf("REJOIN_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

// A directory that is gone at the end.
struct Scratch {
  std::string path = [] {
    char name[] = "/tmp/rejoin-test-XXXXXX";
    return std::string(::mkdtemp(name));
  }();
  ~Scratch() { std::filesystem::remove_all(path); }
  std::string write(const std::string& name, const std::string& text, int mode = 0600) const {
    const std::string file = path + "/" + name;
    std::ofstream(file) << text;
    ::chmod(file.c_str(), static_cast<mode_t>(mode));
    return file;
  }
  std::string key() const { return write("key", "0123456789abcdef0123456789abcdef"); }
};

inline std::string read_file(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

class Process {
 public:
  Process(std::vector<std::string> arguments, std::string output, std::vector<std::string> environment = {})
      : output_(std::move(output)) {
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int out = ::open(output_.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    ::dup2(out, 1);
    ::dup2(out, 2);
    ::close_range(3, ~0U, 0);  // nor has it what this process was started with
    for (auto& variable : environment) ::putenv(variable.data());
    std::vector<char*> argv;
    for (auto& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  Process(const Process&) = delete;
  ~Process() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }
  pid_t pid() const { return pid_; }
  std::string output() const { return read_file(output_); }
  // Its exit status, or -1 where it has not ended by then, or 1000 + signal.
  int wait(std::chrono::seconds limit) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    for (int status = 0; std::chrono::steady_clock::now() < deadline;
         std::this_thread::sleep_for(std::chrono::milliseconds(2))) {
      if (::waitpid(pid_, &status, WNOHANG) != pid_) continue;
      pid_ = -1;
      return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    }
    return -1;
  }

 private:
  pid_t pid_ = -1;
  std::string output_;
};

// Polls for what another process does; there is no event to wait for across an arbitrary process.
inline bool eventually(const std::function<bool()>& condition, std::chrono::seconds limit = std::chrono::seconds(15)) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + limit;
  for (;;) {
    const auto asked = Clock::now();
    if (condition()) return true;
    const auto answered = Clock::now();
    if (answered > deadline) return false;
    // Where it starts a program to ask, it leaves the processors to those who are waited for.
    std::this_thread::sleep_for(std::clamp<Clock::duration>(3 * (answered - asked), std::chrono::milliseconds(5),
                                                            std::chrono::milliseconds(250)));
  }
}

struct Ended {
  int status = -1;
  std::string output;
};
inline Ended run(std::vector<std::string> arguments, std::vector<std::string> environment = {},
                 std::chrono::seconds limit = std::chrono::seconds(60)) {
  Scratch scratch;
  Process process(std::move(arguments), scratch.path + "/out", std::move(environment));
  const int status = process.wait(limit);
  return {status, process.output()};
}

}  // namespace rejoin::test
