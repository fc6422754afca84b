// Command lines of the tools in perftest's manner, with perftest's letters and meanings.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/result.h"

namespace rejoin::bench::perf {

enum class Test { write_bw, read_bw, write_lat, send_lat };

struct Options {
  Test test{};
  std::string host;                   // empty: the server
  std::string transport = "ibverbs";  // as in transport/factory.h, without its list of devices
  std::string device;                 // -d
  std::string rails;                  // several devices or addresses
  std::string local_address = "0.0.0.0";
  int port = 18515;
  int gid_index = -1;
  std::uint64_t size = 65536;
  bool all_sizes = false;
  std::uint64_t iterations = 0;  // 0: perftest's default of the test
  int duration_s = 0;
  int queue_pairs = 0;
  std::uint32_t depth = 128;
  bool rdma_cm = false;
  bool events = false;
  bool bidirectional = false, gbits = false, verify = false, histogram = false;
  std::optional<int> cuda;  // the memory is this GPU's
  std::string json_file;

  bool latency() const { return test == Test::write_lat || test == Test::send_lat; }
  bool server() const { return host.empty(); }
  std::vector<std::uint64_t> sizes() const;
  std::string engine() const;  // for make_engine()
  std::string title() const;
};

// Exits for --help and wrong flags, as CLI11 does; otherwise the options, or an error that says what does not fit.
Result<Options> parse(Test test, int argc, char** argv);

}  // namespace rejoin::bench::perf
