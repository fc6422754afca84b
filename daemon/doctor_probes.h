// How `rejoin doctor` finds things out: by the code that daemons and trainers have for the same. Thread: one.
#pragma once

#include <filesystem>

#include "daemon/doctor.h"

namespace rejoin::daemon {

// `settings` outlive them.
Probes real_probes(const DoctorSettings& settings);

// doctor_probes.cc
SocketFacts probe_socket(const std::string& socket, std::chrono::milliseconds patience);
// Addresses of a host, as numbers. Errors: `unavailable`, why there are none; `timeout`.
Result<std::vector<std::string>> addresses_of(const std::string& host, std::chrono::milliseconds patience);
// "host:port" with the first of them. Errors: likewise, and `invalid_argument`.
Result<std::string> resolved(const std::string& address, std::chrono::milliseconds patience);
HostFacts probe_host(const std::string& host, std::chrono::milliseconds patience);
LimitFacts probe_limits();
Result<> probe_locking(std::uint64_t bytes);
// How far another clock is ahead that said `theirs_us` an unknown part of a round trip ago; `error_ms`: half of that.
double clock_ahead_ms(std::int64_t theirs_us, std::int64_t ours_us, double error_ms);

// doctor_calls.cc
std::vector<CoordinatorFacts> probe_coordinators(const std::string& addresses, const JobKeys& keys,
                                                 std::chrono::milliseconds patience);
Result<> probe_peer(const std::string& peer, const std::string& transport, const JobKeys& keys,
                    std::chrono::milliseconds patience);
Result<StoreFacts> probe_store(const StoreSettings& settings, std::chrono::milliseconds patience);

// doctor_hardware.cc
Result<std::vector<PortFacts>> probe_ports(const std::string& transport);
// `library`: the driver's.
Result<GpuFacts> probe_gpus(const std::string& transport, const std::string& library = "libcuda.so.1");

// doctor_bus_probes.cc; `sys`: where /sys is
std::vector<BusFacts> probe_buses(const std::filesystem::path& sys = "/sys");

}  // namespace rejoin::daemon
