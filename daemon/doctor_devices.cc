// What `rejoin doctor` makes of RDMA devices, memory that is to be locked for them, GPUs, and the coordinators' store.
#include <algorithm>
#include <numeric>

#include "base/bytes.h"
#include "base/fail.h"
#include "daemon/doctor.h"

namespace rejoin::daemon {

using Verdict = Finding::Verdict;

namespace {

constexpr const char* kRaise =
    "'ulimit -l unlimited'; systemd: LimitMEMLOCK=infinity; containerd: the same in a drop-in of its unit; Slurm: "
    "PropagateResourceLimitsExcept=MEMLOCK. CAP_IPC_LOCK helps root alone";

void examine_port(const PortFacts& port, Verdict bad, Findings& findings) {
  const auto say = [&](Verdict verdict, const char* check, std::string found, std::string remedy) {
    findings.push_back({verdict, check, std::move(found), std::move(remedy)});
  };
  if (!port.why.empty()) {
    auto finding =
        failed("rdma", {ErrorCode::unavailable, port.why}, "bring its link up, or leave it out of --transport");
    finding.verdict = bad;
    return findings.push_back(std::move(finding));
  }
  if (!port.unregistered.empty())
    say(bad, "memlock", fmt::format("64 MiB on {}: {}", port.name, port.unregistered), kRaise);
  else say(Verdict::ok, "memlock", fmt::format("64 MiB were registered on {}", port.name), "");
  if (port.ethernet && port.link_local)
    say(Verdict::warn, "rdma",
        fmt::format("{} would use GID {}, {} (link-local): no router passes it on", port.name, port.gid_index,
                    port.gid),
        "give its network interface an address that peers can route to, or name another: gid=N behind the device in "
        "--transport");
  if (port.ethernet && port.mtu < port.most_mtu)
    say(Verdict::warn, "rdma", fmt::format("{}: packets of {} bytes; it could {}", port.name, port.mtu, port.most_mtu),
        "raise the MTU of its network interface and of the switches, the same on all nodes: 4200 bytes or more for "
        "4096");
  say(Verdict::ok, "rdma",
      fmt::format("{} is up, with GID {}, {} and packets of {} bytes", port.name, port.gid_index, port.gid, port.mtu),
      "");
}

void examine_rdma(const DoctorSettings& s, const Probes& probes, Findings& findings) {
  const bool used = uses_rdma(s);
  const auto ports = probes.ports();
  if (!used && (!ports || ports->empty())) {
    findings.push_back({Verdict::skipped, "rdma", "there is no RDMA device", ""});
    findings.push_back({Verdict::skipped, "memlock", fmt::format("{} locks no memory", s.transport), ""});
    return;
  }
  for (const auto& port : ports.value_or(std::vector<PortFacts>{}))
    examine_port(port, used ? Verdict::fail : Verdict::warn, findings);
  if (ports && !ports->empty()) return;
  findings.push_back(
      ports ? Finding{Verdict::fail, "rdma", fmt::format("there is no RDMA device for --transport {}", s.transport),
                      "load its driver, mount /sys/class/infiniband and /dev/infiniband into the container; or "
                      "--transport tcp"}
            : failed("rdma", ports.error(), "install libibverbs1 and ibverbs-providers; or --transport tcp"));
  if (const auto locked = probes.lock_memory(kLocked); !locked)
    findings.push_back({Verdict::fail, "memlock",
                        fmt::format("the limit is {}, and 64 MiB can't be locked: {}",
                                    human_bytes(probes.limits().memlock), locked.error().message),
                        kRaise});
  else findings.push_back({Verdict::ok, "memlock", "64 MiB were locked", ""});
}

void examine_reach(const GpuFacts& gpus, Findings& findings) {
  std::vector<std::string> by_dma_buf, by_peer_memory;
  for (const auto& one : gpus.reach) {
    if (one.why.empty()) {
      (one.dma_buf ? by_dma_buf : by_peer_memory).push_back(one.port);
      continue;
    }
    findings.push_back({Verdict::warn, "gpu",
                        fmt::format("memory of {} can't be given to {}, so that RDMA goes through the host's: {}",
                                    gpus.names.front(), one.port, one.why),
                        gpus.peer_memory
                            ? "nvidia-peermem is loaded and does not help: it must have been built for this driver of "
                              "the NIC (MLNX_OFED or the kernel's); or NVIDIA's open kernel modules, for dma-bufs"
                            : "'modprobe nvidia-peermem'; or NVIDIA's open kernel modules and Linux 5.12 or later, for "
                              "dma-bufs"});
  }
  if (!by_dma_buf.empty())
    findings.push_back({Verdict::ok, "gpu",
                        fmt::format("memory of {} was registered on {}, as a dma-buf", gpus.names.front(),
                                    fmt::join(by_dma_buf, ", ")),
                        ""});
  if (!by_peer_memory.empty())
    findings.push_back({Verdict::ok, "gpu",
                        fmt::format("memory of {} was registered on {}, by nvidia-peermem", gpus.names.front(),
                                    fmt::join(by_peer_memory, ", ")),
                        ""});
}

void examine_gpus(const DoctorSettings& s, const Probes& probes, Findings& findings) {
  const auto gpus = probes.gpus();
  if (!gpus && gpus.error().code == ErrorCode::unavailable)
    return findings.push_back({Verdict::skipped, "gpu", "there is no CUDA driver", ""});
  if (!gpus)
    return findings.push_back(failed("gpu", gpus.error(),
                                     "look at nvidia-smi, and whether the container has the devices: nvidia-ctk, "
                                     "--gpus"));
  if (gpus->names.empty())
    return findings.push_back({Verdict::warn, "gpu", "the CUDA driver is there, and no GPU",
                               "look at CUDA_VISIBLE_DEVICES, nvidia-smi and the container's devices"});
  findings.push_back({Verdict::ok, "gpu", fmt::format("{}", fmt::join(gpus->names, ", ")), ""});
  if (s.cuda_connections == "1")
    findings.push_back({Verdict::warn, "gpu",
                        "CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share one queue of the hardware, so that state is "
                        "sent to who catches up between all-reduces only",
                        "leave it out, or set 2 or more, where the trainer does not rely on it"});
  if (!uses_rdma(s)) return;
  if (!gpus->reach.empty()) return examine_reach(*gpus, findings);
  if (!gpus->untried.empty())
    findings.push_back({Verdict::skipped, "gpu", "registration of its memory: " + gpus->untried, ""});
  if (!gpus->peer_memory && !gpus->dma_buf)
    findings.push_back({Verdict::warn, "gpu",
                        "neither nvidia-peermem is loaded, nor does the driver give dma-bufs: RDMA goes through the "
                        "host's memory",
                        "'modprobe nvidia-peermem', or NVIDIA's open kernel modules for dma-bufs"});
  else
    findings.push_back({Verdict::ok, "gpu",
                        gpus->dma_buf ? "the driver gives its memory to RDMA devices as dma-bufs"
                                      : "nvidia-peermem gives its memory to RDMA devices",
                        ""});
}

void examine_space(const StoreFacts& facts, Findings& findings) {
  constexpr std::uint64_t usual = 2 * GiB;  // of etcd, where nobody has said another one
  const char* make_room =
      "'etcdctl compact REVISION', 'etcdctl defrag --cluster' and then 'etcdctl alarm disarm'; run etcd with "
      "--auto-compaction-retention, and raise its --quota-backend-bytes";
  if (!facts.unknown.empty())
    return findings.push_back({Verdict::skipped, "store", "how full it is: " + facts.unknown, ""});
  if (!facts.alarms.empty())
    return findings.push_back({Verdict::fail, "store",
                               fmt::format("etcd has raised an alarm, and takes nothing more where it is NOSPACE: {}",
                                           fmt::join(facts.alarms, ", ")),
                               make_room});
  const auto quota = facts.quota != 0 ? facts.quota : usual;
  constexpr double nearly = 0.8;
  if (static_cast<double>(facts.bytes) > nearly * static_cast<double>(quota))
    findings.push_back({Verdict::warn, "store",
                        fmt::format("etcd holds {}, and may hold {}{}", human_bytes(facts.bytes), human_bytes(quota),
                                    facts.quota != 0 ? "" : " unless its --quota-backend-bytes says otherwise"),
                        make_room});
}

void examine_clusters(const StoreFacts& facts, Findings& findings) {
  const auto of_another = std::ranges::find_if(
      facts.clusters, [&](const auto& one) { return one.second != facts.clusters.front().second; });
  if (of_another == facts.clusters.end()) return;
  findings.push_back(
      {Verdict::fail, "store",
       fmt::format("etcd at {} is of another cluster ({:x}) than at {} ({:x}): each has its own data",
                   of_another->first, of_another->second, facts.clusters.front().first, facts.clusters.front().second),
       "give --store the addresses of one cluster's members; if they are to be that, start etcd's members "
       "with one --initial-cluster, or put the one that was made anew back into the cluster ('etcdctl "
       "member add')"});
}

void examine_store(const DoctorSettings& s, const Probes& probes, Findings& findings) {
  if (!s.store.shared()) return findings.push_back({Verdict::skipped, "store", "no --store etcd:…", ""});
  if (const auto together = check(s.store); !together)
    return findings.push_back(failed("store", together.error(), "give what rejoind is given"));
  const auto facts = probes.store();
  constexpr const char* reach =
      "start etcd, give --store its addresses and certificates, and see that most of its members answer";
  if (!facts && facts.error().code == ErrorCode::unavailable)  // in gRPC's words, whose semicolons are its own
    return findings.push_back({Verdict::fail, "store", facts.error().message, reach});
  if (!facts) return findings.push_back(failed("store", facts.error(), reach));
  examine_space(*facts, findings);
  examine_clusters(*facts, findings);
  if (facts->milliseconds.empty()) return;
  constexpr double slow = 50;  // ms; a step ends when it is kept
  const auto& all = facts->milliseconds;
  const double worst = *std::ranges::max_element(all);
  const std::string found =
      fmt::format("{}: {} writes, {:.1f} ms on average, {:.1f} ms at most", s.store.store, all.size(),
                  std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(all.size()), worst);
  if (worst > slow)
    return findings.push_back({Verdict::warn, "store", found,
                               "every step waits for one: give etcd a disk of its own that syncs in some ms (SSD), and "
                               "put its members near to one another"});
  findings.push_back({Verdict::ok, "store", found, ""});
}

}  // namespace

void examine_devices(const DoctorSettings& s, const Probes& probes, Findings& findings) {
  examine_rdma(s, probes, findings);
  examine_gpus(s, probes, findings);
  examine_buses(s, probes, findings);
  examine_store(s, probes, findings);
}

}  // namespace rejoin::daemon
