// rejoin_nccl_net_test: loads an NCCL net plugin and drives it as NCCL does, without NCCL and without a GPU: two
// processes, host memory, every version of the interface that the plugin exports, every byte checked.
#include <dlfcn.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>

#include "base/command_line.h"
#include "nccl/conformance/side.h"

namespace rejoin::nccl::conformance {
namespace {

struct Options {
  std::string plugin;
  std::vector<int> versions;
  int device = 0, stream_s = 0;
  bool bench = false, log = false;
};

bool log_all = false;
void log(abi::LogLevel level, unsigned long, const char*, int, const char* format, ...) {
  if (!log_all && level != abi::kLogWarn) return;
  va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "    plugin: ");
  std::vfprintf(stderr, format, arguments);
  std::fprintf(stderr, "\n");
  va_end(arguments);
}

// One process: what it says, if it is the one that speaks.
template <typename... Args>
void print(const Side& side, fmt::format_string<Args...> format, Args&&... args) {
  if (side.number != 0) return;
  fmt::print("{}\n", fmt::format(format, std::forward<Args>(args)...));
  std::fflush(stdout);
}

void run_version(Side& side, const Options& options) {
  side.call(side.net->init(log), "init");
  int count = 0;
  side.call(side.net->devices(&count), "devices");
  expect(count > 0, "the plugin has no devices");
  for (int device = 0; device < count; ++device) {
    Properties properties;
    side.call(side.net->properties(device, properties), "getProperties");
    print(side, "  device {}: {}, {} Mb/s, port {}, guid {:x}, {}, groups of {}{}{}", device, properties.name,
          properties.speed, properties.port, properties.guid,
          properties.pci_path.empty() ? "no PCI path" : properties.pci_path, properties.max_receives,
          (properties.pointers & abi::kCuda) != 0 ? ", GPU memory" : "",
          (properties.pointers & abi::kDmaBuf) != 0 ? ", dma-buf" : "");
    expect((properties.pointers & abi::kHost) != 0, "device {} does not take host memory", device);
    expect(
        properties.speed > 0 && properties.max_receives > 0 && properties.max_connections > 0 && properties.parts > 0,
        "device {}: speed, connections, receives and parts must be above 0", device);
    if (device == options.device) side.properties = properties;
  }
  expect(options.device < count, "no device {}: there are {}", options.device, count);
  Properties nothing;
  expect(side.net->properties(count + 100, nothing) != abi::kSuccess, "getProperties of a device that is not there");
  if (options.stream_s > 0) {
    print(side, "  streaming");
    const auto bytes = stream(side, std::chrono::seconds(options.stream_s));
    print(side, "  ok  streamed {} in {} s, all bytes right", human_bytes(bytes), options.stream_s);
  } else if (options.bench) {
    const auto measured = measure(side);
    print(side, "  1 MiB: {:.2f} GB/s one way; 8 bytes: {:.2f} µs", measured.gigabytes_per_second,
          measured.microseconds);
  } else {
    for (const auto& one : cases()) {
      try {
        one.run(side);
      } catch (const Failure& failure) {
        throw Failure(fmt::format("{}: {}", one.name, failure.what()));
      }
      print(side, "  ok  {}", one.name);
    }
  }
  side.call(side.net->finalize(), "finalize");
}

int run_side(int number, Fd line, const Options& options, int version) {
  try {
    void* library = ::dlopen(options.plugin.c_str(), RTLD_NOW | RTLD_LOCAL);
    expect(library != nullptr, "{}", ::dlerror());
    auto net = Net::find(library, version);
    if (net == nullptr) return 2;
    Side side(number, std::move(line), std::move(net), options.device);
    print(side, "{} (v{})", side.net->name, version);
    run_version(side, options);
    side.net.reset();
    ::dlclose(library);
    return 0;
  } catch (const Failure& failure) {
    std::fprintf(stderr, "  FAILED, side %d: %s\n", number, failure.what());
    return 1;
  }
}

// Both sides in processes of their own, so that each version finds the plugin freshly loaded.
int run(const Options& options, int version) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return 1;
  std::fflush(stdout);
  pid_t sides[2];
  for (int number = 0; number < 2; ++number) {
    sides[number] = ::fork();
    if (sides[number] != 0) continue;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    Fd mine(ends[number]);
    ::close(ends[1 - number]);
    std::exit(run_side(number, std::move(mine), options, version));
  }
  ::close(ends[0]), ::close(ends[1]);
  int first = 0, second = 0;
  ::waitpid(sides[0], &first, 0);
  ::waitpid(sides[1], &second, 0);
  // Side 1 is killed in the last case.
  const bool killed = WIFSIGNALED(second) && WTERMSIG(second) == SIGKILL;
  const bool fine = WIFEXITED(second) ? WEXITSTATUS(second) == WEXITSTATUS(first) : killed;
  return WIFEXITED(first) && fine ? WEXITSTATUS(first) : 1;
}

int main(int argc, char** argv) {
  Options options;
  CommandLine line(
      "Drives an NCCL net plugin as NCCL does, and checks every byte. The plugin's own settings are in the "
      "environment, as under NCCL.");
  line.add("plugin", options.plugin, "its library, e.g. libnccl-net-rejoin.so").required();
  line.add("--abi", options.versions, "versions of the interface; default all from 8 to 12 that it exports")
      .range(8, 12);
  line.add("--device", options.device, "the plugin's device").show_default();
  line.add("--stream", options.stream_s, "instead: checked messages both ways for so many seconds");
  line.flag("--bench", options.bench, "instead: bandwidth and latency");
  line.flag("--log", options.log, "all of the plugin's log, not only its warnings");
  if (const auto status = line.parse(argc, argv)) return *status;
  log_all = options.log;
  const bool all = options.versions.empty();
  if (all) options.versions = {12, 11, 10, 9, 8};
  if (options.plugin.find('/') == std::string::npos && ::access(options.plugin.c_str(), R_OK) == 0)
    options.plugin = "./" + options.plugin;
  int tested = 0;
  for (const int version : options.versions) {
    const int result = run(options, version);
    if (result == 1) return 1;
    if (result == 0) ++tested;
    if (result == 2 && !all) {
      std::fprintf(stderr, "%s does not export version %d\n", options.plugin.c_str(), version);
      return 1;
    }
  }
  if (tested == 0) {
    std::fprintf(stderr, "%s exports no net plugin of versions 8 to 12\n", options.plugin.c_str());
    return 1;
  }
  fmt::print("passed: {} of the interface's versions\n", tested);
  return 0;
}

}  // namespace
}  // namespace rejoin::nccl::conformance

int main(int argc, char** argv) { return rejoin::nccl::conformance::main(argc, argv); }
