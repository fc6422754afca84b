// The transports that a test program meets: those that every machine has, and where REJOIN_RDMA names RDMA devices (as
// the VM rig does), those as well: the first alone, and all as rails.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "transport/tcp/kernel_tls.h"

namespace rejoin::transport {

#ifdef REJOIN_FAKE_VERBS
// This program brings its own devices (fake_verbs.cc) and looks at nothing else.
inline std::vector<std::string> with_rdma(const std::vector<std::string>&) {
  return {"ibverbs:fake0", "ibverbs:fake0;qps=5;depth=16", "ibverbs:fake0;qps=3;ooo=1", "ibverbs:fake0,fake1"};
}
inline std::vector<std::string> with_kernel(std::vector<std::string> names) { return names; }
#else
inline bool has_rdma() { return std::getenv("REJOIN_RDMA") != nullptr; }

inline std::vector<std::string> with_rdma(std::vector<std::string> names) {
  if (!has_rdma()) return names;
  const std::string devices = std::getenv("REJOIN_RDMA");
  names.push_back("ibverbs:" + devices.substr(0, devices.find(',')));
  names.push_back(names.back() + ";cm=auto");
  if (devices.find(',') != std::string::npos) names.push_back("ibverbs:" + devices);
  return names;
}

// … and TCP that the kernel encrypts, where it can.
inline std::vector<std::string> with_kernel(std::vector<std::string> names) {
  if (tcp::kernel_tls::available()) names.push_back("tcp+aes;ktls=1");
  return names;
}
#endif

// A test's name of it: "tcp", "tcp_rails", "ucx".
inline std::string name_of(const std::string& transport) {
  const bool rails = transport.find(',') != std::string::npos && !transport.starts_with("ucx");
  const bool threads = transport.find("threads=") != std::string::npos;
  const bool settings = transport.find(';') != std::string::npos, manager = transport.find("cm=") != std::string::npos;
  const bool kernel = transport.find("ktls=1") != std::string::npos;
  const bool out_of_order = transport.find("ooo=1") != std::string::npos;
  std::string kind = transport.substr(0, transport.find_first_of(":;"));
  std::replace(kind.begin(), kind.end(), '+', '_');
  return kind + (rails ? "_rails" : "") +
         (manager        ? "_rdma_cm"
          : kernel       ? "_by_the_kernel"
          : out_of_order ? "_out_of_order"
          : threads      ? "_threads"
          : settings     ? "_settings"
                         : "");
}

}  // namespace rejoin::transport
