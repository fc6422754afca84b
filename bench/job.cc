#include "bench/job.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/entropy.h"
#include "base/fail.h"
#include "base/log.h"
#include "bench/step_trainer.h"  // made of step_trainer.py
#include "device/device.h"
#include "rejoin/session.h"

namespace rejoin::bench {

namespace {

constexpr auto kStartLimit = std::chrono::seconds(30);

std::atomic<bool> interrupted = false;
void interrupt(int) { interrupted = true; }
constexpr int kInterrupts[] = {SIGINT, SIGTERM, SIGHUP};

std::string all_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

Result<std::unique_ptr<Job>> Job::start(const JobSettings& settings) {
  std::unique_ptr<Job> job(new Job(settings));
  if (auto started = job->start_all(); !started) return tl::unexpected(started.error());
  return job;
}

Job::~Job() {
  for (auto& child : trainers_) end(child);
  for (auto& child : daemons_) end(child);
  end(coordinator_);
  std::error_code ignored;  // nobody could do anything about it
  if (!directory_.empty()) std::filesystem::remove_all(directory_, ignored);
}

void Job::end(Child& child) {
  if (child.pid <= 0) return;
  ::kill(child.pid, SIGKILL);
  ::waitpid(child.pid, nullptr, 0);
  child = {};
}

Result<> Job::start_all() {
  for (const int signal : kInterrupts) ::signal(signal, interrupt);
  std::error_code error;
  binaries_ = std::filesystem::read_symlink("/proc/self/exe", error).parent_path().string();
  if (error) return fail(ErrorCode::io, "/proc/self/exe: {}", error.message());
  if (!std::filesystem::exists(binaries_ + "/rejoind"))
    return fail(ErrorCode::not_found, "there is no {}/rejoind: it belongs beside this program", binaries_);
  std::string name = std::filesystem::temp_directory_path(error).string() + "/rejoin-bench-XXXXXX";
  if (error) return fail(ErrorCode::io, "the directory for temporary files: {}; set TMPDIR to one", error.message());
  if (::mkdtemp(name.data()) == nullptr) return fail_errno(name);
  directory_ = name;
  {
    std::ofstream key(file("key"));
    for (int i = 0; i < 4; ++i) key << fmt::format("{:016x}", random_number());
    if (!key.flush() || ::chmod(file("key").c_str(), 0600) != 0) return fail_errno(file("key"));
  }
  const Fd page(::open(file("progress").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  const std::size_t size = s_.replicas * sizeof(Progress);
  if (!page || ::ftruncate(page.get(), static_cast<off_t>(size)) != 0) return fail_errno(file("progress"));
  auto mapped = Mapping::of(page, size);
  if (!mapped) return tl::unexpected(mapped.error());
  progress_ = std::move(*mapped);

  const std::string silence = std::to_string(s_.silence_ms);
  const auto daemon = [&](const std::string& who, std::vector<std::string> more) {
    std::vector<std::string> arguments{binaries_ + "/rejoind",
                                       "--name",
                                       who,
                                       "--silence-ms",
                                       silence,
                                       "--job-key-file",
                                       file("key"),
                                       "--address-file",
                                       file(who + ".json"),
                                       "--status",
                                       "127.0.0.1:0",
                                       "--flight-dir",
                                       file("flight"),
                                       "--log-level",
                                       "warn"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return spawn(who, arguments, {});
  };
  auto coordinator = daemon("coordinator", {"--coordinator", "--log-directory", file("log"), "--replicas",
                                            std::to_string(s_.replicas), "--ranks", "1"});
  if (!coordinator) return tl::unexpected(coordinator.error());
  coordinator_ = std::move(*coordinator);
  auto address = address_in("coordinator", "coordinator");
  if (!address) return tl::unexpected(address.error());
  trainers_.resize(s_.replicas);
  for (std::uint32_t replica = 0; replica < s_.replicas; ++replica) {
    const std::string who = fmt::format("node{}", replica);
    auto child = daemon(who, {"--socket", file(who + ".sock"), "--connect", *address, "--transport", s_.transport});
    if (!child) return tl::unexpected(child.error());
    daemons_.push_back(std::move(*child));
    if (auto up = address_in(who, "socket"); !up) return tl::unexpected(up.error());
    if (auto started = start_trainer(replica); !started) return started;
  }
  return {};
}

Result<std::string> Job::address_in(const std::string& who, const char* key) {
  std::string address;
  return wait_until(
             [&] {
               const auto json = nlohmann::json::parse(all_of(file(who + ".json")), nullptr, false);
               if (!json.is_discarded() && json.contains(key)) address = json.at(key).get<std::string>();
               return !address.empty();
             },
             kStartLimit, fmt::format("{} to listen", who))
      .map([&] { return address; });
}

Result<Job::Child> Job::spawn(const std::string& name, const std::vector<std::string>& arguments,
                              const std::vector<std::string>& environment, const std::function<int()>& instead) {
  std::fflush(nullptr);
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) return fail_errno("fork");
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // nothing outlives the bench
    if (::getppid() != parent) ::_exit(127);
    for (const int signal : kInterrupts) ::signal(signal, SIG_DFL);
    const int out = ::open(file(name + ".out").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    const int null = ::open("/dev/null", O_RDONLY);
    if (::dup2(null, 0) < 0 || ::dup2(out, 1) < 0 || ::dup2(out, 2) < 0) ::_exit(127);
    ::close_range(3, ~0U, 0);
    if (instead) ::_exit(instead());
    std::vector<char*> argv;
    for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    for (const auto& variable : environment) ::putenv(const_cast<char*>(variable.c_str()));
    ::execvp(argv[0], argv.data());
    std::fprintf(stderr, "%s: %s\n", argv[0], std::strerror(errno));
    ::_exit(127);
  }
  auto pidfd = make_pidfd(pid);
  Child child{.pid = pid, .pidfd = {}, .name = name};
  if (!pidfd) {
    end(child);
    return tl::unexpected(pidfd.error());
  }
  child.pidfd = std::move(*pidfd);
  return child;
}

Result<> Job::start_trainer(std::uint32_t replica) {
  progress(replica).contributors.store(0);
  const std::string name = fmt::format("trainer{}", replica);
  if (s_.python.empty()) {
    auto child = spawn(name, {}, {}, [this, replica] { return train(replica); });
    if (!child) return tl::unexpected(child.error());
    trainers_[replica] = std::move(*child);
    return {};
  }
  auto child = spawn(name, {s_.python, "-c", kStepTrainer, file("progress"), std::to_string(s_.bytes)},
                     {fmt::format("REJOIN_REPLICA={}", replica), "REJOIN_RANK=0",
                      fmt::format("REJOIN_SOCKET={}/node{}.sock", directory_, replica),
                      "REJOIN_TRANSPORT=" + s_.transport, "REJOIN_FLIGHT_DIR=" + file("flight"), "OMP_NUM_THREADS=1"});
  if (!child) return tl::unexpected(child.error());
  trainers_[replica] = std::move(*child);
  return {};
}

int Job::train(std::uint32_t replica) const {
  init_logging(fmt::format("trainer{}", replica), "warn");
  SessionConfig config;
  config.replica = replica;
  config.socket = fmt::format("{}/node{}.sock", directory_, replica);
  config.transport = s_.transport;
  config.flight = file("flight");
  if (s_.cuda) config.device = fmt::format("cuda:{}", *s_.cuda);
  const auto run = [&]() -> Result<> {
    auto session = Session::open(config);
    if (!session) return tl::unexpected(session.error());
    auto tensor = (*session)->add({.name = "w", .count = s_.bytes / 4});
    if (!tensor) return tl::unexpected(tensor.error());
    if (auto bucket = (*session)->bucket({*tensor}); !bucket) return tl::unexpected(bucket.error());
    if (auto allocated = (*session)->allocate(); !allocated) return allocated;
    if (auto joined = (*session)->join(); !joined) return joined;
    std::unique_ptr<device::Stream> stream;
    if (s_.cuda) {
      auto made = device::open_device(config.device).and_then([](const auto& opened) { return opened->make_stream(); });
      if (!made) return tl::unexpected(made.error());
      stream = std::move(*made);
    }
    for (;;) {
      auto step = (*session)->begin_step();
      if (!step) return tl::unexpected(step.error());
      if (!*step) return {};
      if ((*step)->contributes())
        if (auto reduced = stream ? (*session)->all_reduce(0, stream->handle()) : (*session)->all_reduce(0); !reduced)
          return reduced;
      std::uint32_t contributors = 0;
      const auto update = [&](const Update& of) { contributors = of.contributors; };
      auto committed = stream ? (*session)->commit(update, stream->handle()) : (*session)->commit(update);
      if (!committed) return committed;
      if (!(*step)->contributes()) continue;
      progress(replica).step.store((*step)->number());
      progress(replica).contributors.store(contributors);
    }
  };
  const auto ran = run();
  if (!ran) std::fprintf(stderr, "%s\n", ran.error().message.c_str());
  return ran ? 0 : 1;
}

void Job::kill_trainer(std::uint32_t replica) { end(trainers_[replica]); }

Job::Progress& Job::progress(std::uint32_t replica) const {
  return reinterpret_cast<Progress*>(progress_.data())[replica];
}
std::uint64_t Job::step(std::uint32_t replica) const { return progress(replica).step.load(); }
std::uint32_t Job::contributors(std::uint32_t replica) const {
  return static_cast<std::uint32_t>(progress(replica).contributors.load());
}

std::string Job::said(const std::string& name) const {
  constexpr std::size_t most = 2000;
  const std::string all = all_of(file(name + ".out"));
  return all.empty() ? "nothing" : all.substr(all.size() - std::min(all.size(), most));
}

Result<> Job::wait_until(const std::function<bool()>& condition, std::chrono::seconds limit, const std::string& what) {
  const SteadyClock clock;
  const TimePoint deadline = clock.now() + limit;
  while (!condition()) {
    std::vector<pollfd> ends;
    std::vector<const Child*> children{&coordinator_};
    for (const auto* some : {&daemons_, &trainers_})
      for (const auto& child : *some) children.push_back(&child);
    std::erase_if(children, [](const Child* child) { return child->pid == 0; });
    for (const auto* child : children) ends.push_back({child->pidfd.get(), POLLIN, 0});
    if (interrupted) return fail(ErrorCode::cancelled, "interrupted while waiting for {}", what);
    (void)::poll(ends.data(), ends.size(), 1);  // a process that ends; otherwise the condition is looked at again
    for (std::size_t i = 0; i < ends.size(); ++i)
      if (ends[i].revents != 0)
        return fail(ErrorCode::unavailable, "{} has ended while waiting for {}; it said: {}", children[i]->name, what,
                    said(children[i]->name));
    if (clock.now() > deadline) {
      std::string all;
      for (const auto* child : children) all += fmt::format("\n{} said: {}", child->name, said(child->name));
      return fail(ErrorCode::timeout, "{} s have not been enough for {}{}", limit.count(), what, all);
    }
  }
  return {};
}

Result<daemon::Recording> Job::recording_of(pid_t process) const {
  const std::string mark = fmt::format(".{}.", process);
  for (const auto& entry : std::filesystem::directory_iterator(file("flight"))) {
    const std::string name = entry.path().filename().string();
    if (name.find(mark) == std::string::npos) continue;
    const std::string bytes = all_of(entry.path().string());
    return daemon::parse_recording(as_bytes(bytes), name);
  }
  return fail(ErrorCode::not_found, "process {} has no flight recording in {}", process, file("flight"));
}

}  // namespace rejoin::bench
