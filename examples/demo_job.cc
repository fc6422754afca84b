#include "examples/demo_job.h"

#include <fcntl.h>
#include <openssl/rand.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/fail.h"
#include "examples/interrupt.h"

namespace rejoin::demo {

namespace {

constexpr auto kRestartAfter = std::chrono::milliseconds(200);  // what a scheduler needs to start a process again

void end(pid_t pid) {
  if (pid <= 0) return;
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
}

// Each on a line of its own, under the message.
std::string joined(const std::vector<std::string>& lines) {
  std::string all;
  for (const auto& line : lines) all += "\n  " + line;
  return lines.empty() ? " (nothing)" : all;
}

}  // namespace

Job::~Job() {
  for (auto& [rank, pid] : trainers_) end(pid);
  for (auto& [replica, pid] : daemons_) end(pid);
  end(coordinator_);
}

Result<pid_t> Job::spawn(const std::string& name, std::vector<std::string> arguments) {
  const std::string output = fmt::format("{}/{}.out", directory_, name);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return fail_errno("fork");
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // nothing outlives the demo
    if (::getppid() != parent) ::_exit(127);
    const int out = ::open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    const int null = ::open("/dev/null", O_RDONLY);
    ::dup2(null, 0);
    ::dup2(out, 1);
    ::dup2(out, 2);
    std::vector<char*> argv;
    for (auto& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  return pid;
}

Result<std::string> Job::wait_for_address(pid_t& pid, const std::string& file, const char* key) {
  const auto outputs = [this] { return joined(output_tail()); };
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (std::chrono::steady_clock::now() < deadline) {
    if (auto on = unless_interrupted(); !on) return tl::unexpected(on.error());
    if (int status = 0; ::waitpid(pid, &status, WNOHANG) == pid) {
      pid = 0;
      return fail(ErrorCode::unavailable, "a daemon ended before it was up; its output:{}", outputs());
    }
    std::ifstream in(file);
    if (in) {
      const auto json = nlohmann::json::parse(in, nullptr, false);
      if (!json.is_discarded() && json.contains(key)) return json.at(key).get<std::string>();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return fail(ErrorCode::timeout, "a daemon did not come up within 10 s; its output:{}", outputs());
}

Result<> Job::start_coordinator(const std::string& listen) {
  const std::string address_file = directory_ + "/coordinator.json";
  std::filesystem::remove(address_file);
  auto pid =
      spawn("coordinator", {settings_.binaries + "/rejoind", "--coordinator", "--listen", listen, "--log-directory",
                            directory_ + "/log", "--replicas", std::to_string(settings_.replicas), "--ranks",
                            std::to_string(settings_.ranks), "--batch", std::to_string(settings_.batch), "--steps",
                            std::to_string(settings_.steps), "--silence-ms", std::to_string(settings_.silence_ms),
                            // Where everybody was killed the demo starts afresh; its proof counts the steps.
                            "--roll-back-to", "0", "--job-key-file", directory_ + "/key", "--address-file",
                            address_file, "--events", events_directory()});
  if (!pid) return tl::unexpected(pid.error());
  coordinator_ = *pid;
  auto address = wait_for_address(coordinator_, address_file, "coordinator");
  if (!address) return tl::unexpected(address.error());
  coordinator_address_ = *address;
  return {};
}

Result<> Job::start_daemon(std::uint32_t replica) {
  const std::string name = fmt::format("node{}", replica), address_file = fmt::format("{}/{}.json", directory_, name);
  std::filesystem::remove(address_file);
  auto pid =
      spawn(name, {settings_.binaries + "/rejoind", "--name", name, "--socket",
                   fmt::format("{}/{}.sock", directory_, name), "--connect", coordinator_address_, "--silence-ms",
                   std::to_string(settings_.silence_ms), "--transport", settings_.transport, "--job-key-file",
                   directory_ + "/key", "--address-file", address_file, "--events", events_directory()});
  if (!pid) return tl::unexpected(pid.error());
  daemons_[replica] = *pid;
  auto ready = wait_for_address(daemons_[replica], address_file, "socket");
  if (!ready) return tl::unexpected(ready.error());
  return {};
}

Result<> Job::start_trainer(RankName rank, const std::vector<std::string>& more) {
  std::vector<std::string> arguments{settings_.binaries + "/rejoin-demo-trainer",
                                     "--replica",
                                     std::to_string(rank.replica),
                                     "--rank",
                                     std::to_string(rank.rank),
                                     "--socket",
                                     fmt::format("{}/node{}.sock", directory_, rank.replica),
                                     "--transport",
                                     settings_.transport,
                                     "--device",
                                     settings_.device,
                                     "--state",
                                     settings_.state,
                                     "--data",
                                     settings_.data,
                                     "--params",
                                     std::to_string(settings_.parameters),
                                     "--seed",
                                     std::to_string(settings_.seed),
                                     "--events",
                                     events_directory(),
                                     "--log-level",
                                     settings_.log_level};
  arguments.insert(arguments.end(), more.begin(), more.end());
  auto pid = spawn(fmt::format("trainer{}.{}", rank.replica, rank.rank), std::move(arguments));
  if (!pid) return tl::unexpected(pid.error());
  trainers_[rank] = *pid;
  return {};
}

Result<> Job::start(const std::map<RankName, std::vector<std::string>>& more) {
  std::filesystem::create_directories(directory_ + "/events");
  {
    std::array<unsigned char, 32> key;
    REJOIN_CHECK(::RAND_bytes(key.data(), key.size()) == 1);
    std::string text;
    for (auto byte : key) text += fmt::format("{:02x}", byte);
    const int fd = ::open((directory_ + "/key").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    const bool written = fd >= 0 && ::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
    if (fd >= 0) ::close(fd);
    if (!written) return fail_errno(fmt::format("job key in {}", directory_));
  }
  if (auto started = start_coordinator("127.0.0.1:0"); !started) return started;
  for (std::uint32_t replica = 0; replica < settings_.replicas; ++replica)
    if (auto started = start_daemon(replica); !started) return started;
  for (std::uint32_t replica = 0; replica < settings_.replicas; ++replica)
    for (std::uint32_t rank = 0; rank < settings_.ranks; ++rank) {
      const auto found = more.find({replica, rank});
      auto started = start_trainer({replica, rank}, found == more.end() ? std::vector<std::string>{} : found->second);
      if (!started) return started;
    }
  return {};
}

void Job::signal_trainer(RankName rank, int signal) {
  auto found = trainers_.find(rank);
  if (found == trainers_.end()) return;
  ::kill(found->second, signal);
  if (signal == SIGSTOP) stopped_.insert(rank);
}

void Job::end_stopped(std::uint32_t replica) {
  for (auto rank : std::set(stopped_))
    if (rank.replica == replica) {
      signal_trainer(rank, SIGKILL);
      stopped_.erase(rank);
    }
}

void Job::signal_coordinator(int signal) {
  if (coordinator_ > 0) ::kill(coordinator_, signal);
}

void Job::signal_all(int signal) {
  signal_coordinator(signal);
  for (const auto& [replica, pid] : daemons_)
    if (pid > 0) ::kill(pid, signal);
  for (const auto& [rank, pid] : trainers_) ::kill(pid, signal);
}

Result<> Job::restart_coordinator() {
  end(std::exchange(coordinator_, 0));
  return start_coordinator(coordinator_address_);
}

Result<> Job::restart_daemon(std::uint32_t replica) {
  end(std::exchange(daemons_[replica], 0));
  return start_daemon(replica);
}

Result<> Job::on_ended(pid_t pid, int status, TimePoint now) {
  const auto name = [&]() -> std::string {
    if (pid == coordinator_) return "coordinator";
    for (const auto& [replica, daemon] : daemons_)
      if (daemon == pid) return fmt::format("node{}", replica);
    for (const auto& [rank, trainer] : trainers_)
      if (trainer == pid) return fmt::format("trainer{}.{}", rank.replica, rank.rank);
    return "";
  }();
  if (name.empty()) return {};
  // A trainer that leaves at a signal ends as a shell would say it.
  const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status) > 128 ? WEXITSTATUS(status) - 128 : 0;
  const std::set crashes{SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP, SIGSYS};
  if (crashes.contains(signal))
    return fail(ErrorCode::unavailable, "{} crashed with signal {}; its output ends with:{}", name, signal,
                joined(output_tail(name)));
  const bool to_be_started_again = signal != 0 || WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 3;
  if (!to_be_started_again)
    return fail(ErrorCode::unavailable, "{} ended with {}; its output ends with:{}", name, WEXITSTATUS(status),
                joined(output_tail(name)));
  if (pid == coordinator_) {
    coordinator_ = 0;
    return restart_coordinator();
  }
  for (auto& [replica, daemon] : daemons_)
    if (daemon == pid) {
      daemon = 0;
      return restart_daemon(replica);
    }
  const auto trainer = std::find_if(trainers_.begin(), trainers_.end(), [&](const auto& t) { return t.second == pid; });
  const RankName rank = trainer->first;
  trainers_.erase(trainer);
  if (signal == 0 && WEXITSTATUS(status) == 0) finished_.insert(rank);
  else lost_.try_emplace(rank.replica, now);
  return {};
}

Result<> Job::look_after(TimePoint now) {
  for (int status = 0;;) {
    const pid_t pid = ::waitpid(-1, &status, WNOHANG);
    if (pid <= 0) break;
    if (auto ended = on_ended(pid, status, now); !ended) return ended;
  }
  for (auto it = lost_.begin(); it != lost_.end();) {
    const auto [replica, since] = *it;
    bool ended = true;
    for (const auto& [rank, pid] : trainers_) ended = ended && rank.replica != replica;
    if (!ended || now - since < kRestartAfter) {
      if (now - since > std::chrono::milliseconds(settings_.silence_ms)) end_stopped(replica);
      ++it;
      continue;
    }
    it = lost_.erase(it);
    for (std::uint32_t rank = 0; rank < settings_.ranks; ++rank) {
      finished_.erase({replica, rank});
      if (auto started = start_trainer({replica, rank}, {}); !started) return started;
    }
  }
  return {};
}

std::vector<std::string> Job::output_tail(const std::string& name) const {
  std::vector<std::string> lines;
  for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
    if (entry.path().extension() != ".out" || (!name.empty() && entry.path().stem() != name)) continue;
    std::ifstream in(entry.path());
    std::vector<std::string> all;
    for (std::string line; std::getline(in, line);) all.push_back(entry.path().filename().string() + ": " + line);
    for (std::size_t i = all.size() > 5 ? all.size() - 5 : 0; i < all.size(); ++i) lines.push_back(all[i]);
  }
  return lines;
}

}  // namespace rejoin::demo
