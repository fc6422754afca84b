// `rejoin doctor`: what a node needs before a job starts on it is tried, and each finding comes with its remedy. Here
// is what is made of what was found out: nothing is opened, asked or waited for but by the Probes, and tests give it
// others (doctor_probes.h has the real ones).
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "daemon/auth.h"
#include "daemon/certificates.h"
#include "daemon/store_settings.h"
#include "transport/advertise.h"
#include "transport/ibverbs/port_health.h"

namespace rejoin::daemon {

struct Finding {
  enum class Verdict : std::uint8_t { ok, warn, fail, skipped };
  Verdict verdict{};
  std::string check;   // "key", "socket", …
  std::string found;   // for people
  std::string remedy;  // empty: there is nothing to be done
};
using Findings = std::vector<Finding>;

std::string_view to_string(Finding::Verdict verdict);
// "FAIL  key: what was found -> remedy"
std::string line_of(const Finding& finding);
std::string json_of(const Findings& findings);
// 2 where something fails, 1 where there are warnings and it is `strict`, otherwise 0.
int exit_status(const Findings& findings, bool strict);

// The daemon's settings of the same names, which it is to be started with, and what the job is like.
struct DoctorSettings {
  std::string key_file, other_key_file, socket, coordinators, advertise;
  std::string data_listen = "127.0.0.1:0", transport = "shm";
  CertificateFiles certificates;  // for control connections, beside the key
  StoreSettings store;
  std::vector<std::string> peers;         // catch-up addresses of other nodes' daemons
  std::vector<std::string> pairs;         // HOST:PORT of each node, where `rejoin doctor` runs with the same
  std::uint32_t replicas = 3, ranks = 1;  // of the job; of them on this node
  std::uint32_t full_mesh_members = 64;
  std::string cuda_connections;                           // CUDA_DEVICE_MAX_CONNECTIONS
  std::chrono::milliseconds patience{2000}, wait{10000};  // for an answer; for others of `pairs` to start
};

// ---- what probes find out

struct SocketFacts {
  int error = 0;  // errno of connecting; the rest is known where it is 0
  uid_t own_user = 0, user = 0;
  bool user_known = true;             // no other user can have its number here
  pid_t process = 0;                  // 0: of a PID namespace that is not seen from here
  bool same_processes = true;         // it is of this PID namespace
  std::optional<std::string> answer;  // empty: it speaks this version; otherwise why it refuses. None: nothing in time
  std::string no_pidfd, no_reading;   // why not; empty: allowed
};

struct CoordinatorFacts {
  std::string address;
  bool proven = false, answered = false;  // the job key; to what a node says first
  bool refused = false;                   // it, or this process, has not taken the other's key
  std::string why;                        // it has not answered; empty: nothing came in time
  double milliseconds = 0;                // until the answer
  std::uint32_t protocol = 0;             // that the two speak
  bool remote = false;                    // it is on another machine
  bool one_of_several = false, leads = false, stalled = false;
  std::uint64_t term = 0;
  std::string leader;                    // as it knows
  std::optional<double> clock_ahead_ms;  // its system's clock, of this one's; none: it does not say
  double clock_error_ms = 0;             // that this may be wrong by
};

struct HostFacts {
  std::string unresolved;                                  // why; the rest is known where it is empty
  bool loopback = false, own = false, link_local = false;  // the first of its addresses
  bool v4 = true, v6 = false;                              // it has addresses of these
};

struct LimitFacts {
  std::uint64_t memlock = 0, descriptors = 0, descriptors_at_most = 0;
};

using PortFacts = transport::ibverbs::PortHealth;

// An RDMA device or GPU on its bus, as the kernel tells of it in /sys.
struct BusFacts {
  std::string name;  // "mlx5_0", "GPU 0000:3b:00.0"
  bool gpu = false;
  std::uint32_t lanes = 0, most_lanes = 0;      // of PCIe; 0: not known
  double speed = 0, most_speed = 0;             // GT/s of each; 0: not known
  std::optional<int> numa_node;                 // none: the machine has one, or does not tell
  bool own_cpus = true;                         // this process may run on some of that node
  std::map<std::uint32_t, double> port_speeds;  // Gb/s, of those that are active
};

// Whether an RDMA port can be given memory of the first GPU, tried.
struct ReachFacts {
  std::string port, why;  // why not; empty: it can
  bool dma_buf = false;   // by a dma-buf; otherwise by nvidia-peermem
};

struct GpuFacts {
  std::vector<std::string> names;
  bool peer_memory = false, dma_buf = false;  // nvidia-peermem is loaded; the driver gives dma-bufs
  std::vector<ReachFacts> reach;              // of the ports that are used
  std::string untried;                        // why there are none
};

// One rail of this node and one of another's, tried from here.
struct PathFacts {
  // Nothing; a connection; 64 B went there and back; 1 MiB went there; and back.
  enum class Reached : std::uint8_t { nothing, connected, small, sent, all };
  std::size_t own = 0, theirs = 0;  // the rails' numbers
  std::string here, there;          // … and names
  Reached reached{};
  std::string why;                       // no farther
  double small_ms = 0, large_ms = 0;     // there and back
  std::uint32_t mtu = 0, mtu_there = 0;  // bytes; 0: not known
};

struct PairFacts {
  std::string node;  // the other one
  std::vector<PathFacts> paths;
  bool came = false;                     // it has connected with this node
  std::optional<PathFacts> verdict;      // what it says of its best way here; none: it has said nothing
  std::optional<double> clock_ahead_ms;  // its clock, of this node's
  double clock_error_ms = 0;             // that this may be wrong by
};

struct PairsFacts {
  std::string own;  // this node, as the others call it
  std::vector<PairFacts> others;
};

struct StoreFacts {
  std::vector<double> milliseconds;    // that each write took; none: it takes none, for an alarm
  std::uint64_t bytes = 0, quota = 0;  // that one of its members has, and may have; 0: it does not say
  std::vector<std::string> alarms;
  std::string unknown;                                          // why nothing is known of the three
  std::vector<std::pair<std::string, std::uint64_t>> clusters;  // of each endpoint that answers
};

struct Probes {
  std::function<Result<JobKeys>(const std::string& own, const std::string& other)> keys;
  std::function<SocketFacts(const std::string& socket)> socket;
  std::function<std::vector<CoordinatorFacts>(const std::string& addresses, const JobKeys& keys)> coordinators;
  std::function<HostFacts(const std::string& host)> host;
  std::function<transport::OwnHosts(const std::string& peer)> own_hosts_towards;
  // Connects with another daemon's catch-up stream, which proves the key, and says no more. Errors:
  // `invalid_argument` where it is a setting of this side.
  std::function<Result<>(const std::string& peer, const JobKeys& keys)> peer;
  std::function<Result<PairsFacts>(const JobKeys& keys)> pairs;
  std::function<LimitFacts()> limits;
  std::function<Result<>(std::uint64_t bytes)> lock_memory;
  std::function<Result<std::vector<PortFacts>>()> ports;  // `unavailable`: there is no libibverbs
  std::function<Result<GpuFacts>()> gpus;                 // `unavailable`: there is no driver
  std::function<std::vector<BusFacts>()> buses;
  std::function<Result<StoreFacts>()> store;
  std::function<Result<>()> kernel_tls;  // whether the kernel can encrypt for tcp+aes
};

constexpr std::uint64_t kLocked = 64 * 1024 * 1024;  // bytes that are registered, or locked, for a try

// How many descriptors each has at most, as far as it is known before it starts: state on a GPU comes in one more for
// each of its allocations.
struct DescriptorsNeeded {
  std::uint64_t trainer = 0, daemon = 0;
};
DescriptorsNeeded descriptors_needed(const DoctorSettings& settings);

// Every check that applies; others are `skipped`, with why.
Findings examine(const DoctorSettings& settings, const Probes& probes);

// ---- its parts, each in a file of its own

// What an error says up to its remedy, and that; `remedy`: where it has none.
Finding failed(std::string check, const Error& error, const std::string& remedy);
// What a refusal of another version says (membership/versions.h), and its remedy.
std::pair<std::string, std::string> split_at_upgrade(const std::string& refusal);
bool uses_rdma(const DoctorSettings& settings);
void examine_socket(const DoctorSettings& settings, const Probes& probes, Findings& findings);  // doctor_socket.cc
void examine_network(const DoctorSettings& settings, const Probes& probes, const std::optional<JobKeys>& keys,
                     Findings& findings);  // doctor_network.cc
void examine_pairs(const DoctorSettings& settings, const Probes& probes, const std::optional<JobKeys>& keys,
                   Findings& findings);  // doctor_pair_findings.cc
// A warning where this clock is further off than a second, for sure; nothing where it is not known.
void examine_clock(const std::string& whose, std::optional<double> ahead_ms, double error_ms, Findings& findings);
void examine_buses(const DoctorSettings& settings, const Probes& probes, Findings& findings);    // doctor_buses.cc
void examine_devices(const DoctorSettings& settings, const Probes& probes, Findings& findings);  // doctor_devices.cc

}  // namespace rejoin::daemon
