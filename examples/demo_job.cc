#include "examples/demo_job.h"

#include <fcntl.h>
#include <openssl/rand.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/fail.h"
#include "examples/demo_process.h"
#include "examples/interrupt.h"

namespace rejoin::demo {

namespace {

constexpr auto kRestartAfter = std::chrono::milliseconds(200);  // what a scheduler needs to start a process again
constexpr auto kAsksEvery = std::chrono::milliseconds(200);

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
  for (auto& one : coordinators_) end(one.pid);
}

Job::Job(JobSettings settings, std::string directory)
    : settings_(std::move(settings)), directory_(std::move(directory)) {
  for (std::size_t i = 0; i < (settings_.several() ? kCoordinators : 1); ++i) {
    const std::string number = settings_.several() ? std::to_string(i) : "";
    Coordinator& one = coordinators_.emplace_back();
    one.name = "coordinator" + number;
    one.log_directory = directory_ + "/log" + number;
  }
}

std::map<std::string, std::string> Job::log_paths() const {
  std::map<std::string, std::string> paths;
  for (const auto& one : coordinators_) paths[one.name] = one.log_directory + "/decisions.log";
  return paths;
}

Result<nlohmann::json> Job::wait_for_addresses(pid_t& pid, const std::string& file, const char* key) {
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
      auto json = nlohmann::json::parse(in, nullptr, false);
      if (!json.is_discarded() && json.contains(key)) return json;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return fail(ErrorCode::timeout, "a daemon did not come up within 10 s; its output:{}", outputs());
}

Result<> Job::start_coordinator(Coordinator& one) {
  const std::string address_file = fmt::format("{}/{}.json", directory_, one.name);
  std::filesystem::remove(address_file);
  std::vector<std::string> arguments{settings_.binaries + "/rejoind",
                                     "--coordinator",
                                     "--listen",
                                     one.address,
                                     "--log-directory",
                                     one.log_directory,
                                     "--replicas",
                                     std::to_string(settings_.replicas),
                                     "--ranks",
                                     std::to_string(settings_.ranks),
                                     "--batch",
                                     std::to_string(settings_.batch),
                                     "--steps",
                                     std::to_string(settings_.steps),
                                     "--silence-ms",
                                     std::to_string(settings_.silence_ms),
                                     "--job-key-file",
                                     directory_ + "/key",
                                     "--address-file",
                                     address_file,
                                     "--events",
                                     events_directory()};
  if (!roll_back_word_.empty()) arguments.insert(arguments.end(), {"--roll-back-to", roll_back_word_});
  if (etcd_) {
    const std::string store = "etcd:" + etcd_->endpoints();
    arguments.insert(arguments.end(), {"--store", store, "--job", "demo", "--name", one.name});
  }
  auto pid = spawn(std::move(arguments), output(one.name));
  if (!pid) return tl::unexpected(pid.error());
  one.pid = *pid;
  coordinator_of_[*pid] = one.name;
  auto addresses = wait_for_addresses(one.pid, address_file, "coordinator");
  if (!addresses) return tl::unexpected(addresses.error());
  one.address = addresses->at("coordinator").get<std::string>();
  one.status = addresses->value("status", "");
  return {};
}

std::string Job::pages() const {
  std::string all;
  for (const auto& one : coordinators_) all += fmt::format("{}http://{}/", all.empty() ? "" : ", ", one.status);
  return all;
}

Result<> Job::start_daemon(std::uint32_t replica) {
  const std::string name = fmt::format("node{}", replica), address_file = fmt::format("{}/{}.json", directory_, name);
  std::filesystem::remove(address_file);
  std::string all;
  for (const auto& one : coordinators_) all += (all.empty() ? "" : ",") + one.address;
  auto pid =
      spawn({settings_.binaries + "/rejoind", "--name", name, "--socket", fmt::format("{}/{}.sock", directory_, name),
             "--connect", all, "--silence-ms", std::to_string(settings_.silence_ms), "--transport", settings_.transport,
             "--job-key-file", directory_ + "/key", "--address-file", address_file, "--events", events_directory()},
            output(name));
  if (!pid) return tl::unexpected(pid.error());
  daemons_[replica] = *pid;
  auto ready = wait_for_addresses(daemons_[replica], address_file, "socket");
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
  auto pid = spawn(std::move(arguments), output(fmt::format("trainer{}.{}", rank.replica, rank.rank)));
  if (!pid) return tl::unexpected(pid.error());
  trainers_[rank] = *pid;
  return {};
}

Result<> Job::start(const std::map<RankName, std::vector<std::string>>& more) {
  std::error_code error;
  std::filesystem::create_directories(events_directory(), error);
  if (error) return fail(ErrorCode::io, "{}: {}", events_directory(), error.message());
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
  if (settings_.several())
    if (auto started = etcd_.emplace(directory_).start(); !started) return started;
  for (auto& one : coordinators_)
    if (auto started = start_coordinator(one); !started) return started;
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

void Job::signal_coordinator(int signal, const std::string& name) {
  for (const auto& one : coordinators_)
    if (one.name == name && one.pid > 0) ::kill(one.pid, signal);
}

void Job::signal_all(int signal) {
  for (const auto& one : coordinators_) signal_coordinator(signal, one.name);
  for (std::size_t i = 0; etcd_ && i < Etcd::kMembers; ++i) etcd_->signal(i, signal);
  for (const auto& [replica, pid] : daemons_)
    if (pid > 0) ::kill(pid, signal);
  for (const auto& [rank, pid] : trainers_) ::kill(pid, signal);
}

Result<> Job::restart_coordinator() {
  end(std::exchange(coordinators_.front().pid, 0));
  return start_coordinator(coordinators_.front());
}

// The only one is missed at once.
Result<> Job::on_coordinator_ended(Coordinator& one, TimePoint now) {
  one.pid = 0;
  if (!settings_.several()) return start_coordinator(one);
  one.lost = now;
  return {};
}

Result<> Job::restart_daemon(std::uint32_t replica) {
  end(std::exchange(daemons_[replica], 0));
  return start_daemon(replica);
}

Result<> Job::on_ended(pid_t pid, int status, TimePoint now) {
  const auto name = [&]() -> std::string {
    for (const auto& one : coordinators_)
      if (one.pid == pid) return one.name;
    for (const auto& [replica, daemon] : daemons_)
      if (daemon == pid) return fmt::format("node{}", replica);
    for (const auto& [rank, trainer] : trainers_)
      if (trainer == pid) return fmt::format("trainer{}.{}", rank.replica, rank.rank);
    if (const auto member = etcd_ ? etcd_->find(pid) : std::nullopt) return Etcd::name(*member);
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
  for (auto& one : coordinators_)
    if (one.pid == pid) return on_coordinator_ended(one, now);
  if (const auto member = etcd_ ? etcd_->find(pid) : std::nullopt) return etcd_->restart(*member);
  for (auto& [replica, daemon] : daemons_)
    if (daemon == pid) {
      daemon = 0;
      return restart_daemon(replica);
    }
  const auto trainer = std::find_if(trainers_.begin(), trainers_.end(), [&](const auto& t) { return t.second == pid; });
  const RankName rank = trainer->first;
  trainers_.erase(trainer);
  if (signal == 0 && WEXITSTATUS(status) == 0) finished_.insert(rank);
  else lost_.try_emplace(rank.replica, now), died_.insert(rank.replica);
  return {};
}

// Where everybody was killed the demo, as the job's operator, has it start afresh; its proof counts the steps.
Result<> Job::answer_coordinators(TimePoint now) {
  if (died_.size() < settings_.replicas || now - asked_ < kAsksEvery) return {};
  asked_ = now;
  std::string wanted;
  for (const auto& one : coordinators_) {
    const auto status = nlohmann::json::parse(get(one.status, "/status"), nullptr, false);
    if (one.pid > 0 && status.contains("coordinator_role"))
      if (auto word = status.at("coordinator_role").value("roll_back_word", ""); !word.empty()) wanted = word;
  }
  if (wanted.empty()) return {};
  died_.clear();
  roll_back_word_ = wanted;
  for (auto& one : coordinators_) {
    if (one.pid > 0) end(std::exchange(one.pid, 0));
    one.lost.reset();
    if (auto started = start_coordinator(one); !started) return started;
  }
  roll_back_word_.clear();
  return {};
}

Result<> Job::look_after(TimePoint now) {
  for (int status = 0;;) {
    const pid_t pid = ::waitpid(-1, &status, WNOHANG);
    if (pid <= 0) break;
    if (auto ended = on_ended(pid, status, now); !ended) return ended;
  }
  if (auto answered = answer_coordinators(now); !answered) return answered;
  for (auto& one : coordinators_)
    if (one.lost && now - *one.lost >= kRestartAfter) {
      one.lost.reset();
      if (auto started = start_coordinator(one); !started) return started;
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

Result<nlohmann::json> Job::settle() {
  nlohmann::json said = nlohmann::json::object();
  if (!settings_.several()) return said;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(15);
  for (const auto& one : coordinators_)
    for (;;) {
      if (auto on = unless_interrupted(); !on) return tl::unexpected(on.error());
      if (auto looked = look_after(SteadyClock().now()); !looked) return tl::unexpected(looked.error());
      auto status = nlohmann::json::parse(get(one.status, "/status"), nullptr, false);
      if (one.pid > 0 && status.contains("coordinator_role")) {
        said[one.name] = std::move(status.at("coordinator_role"));
        if (said[one.name].at("committed") == settings_.steps) break;
      }
      if (std::chrono::steady_clock::now() > deadline)
        return fail(ErrorCode::timeout, "{} has not read all that was decided within 15 s; it says: {}", one.name,
                    said.value(one.name, nlohmann::json()).dump());
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  for (auto& one : coordinators_) {
    ::kill(one.pid, SIGTERM);
    ::waitpid(std::exchange(one.pid, 0), nullptr, 0);
  }
  return said;
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
