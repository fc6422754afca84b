#include "daemon/doctor_command.h"

#include <iostream>

#include "base/bytes.h"
#include "base/command_line.h"
#include "base/log.h"
#include "daemon/doctor_probes.h"
#include "daemon/flags.h"

namespace rejoin::daemon {

void DoctorCommand::bind(CommandLine& line) {
  auto& s = settings;
  line.setting("--job-key-file", s.key_file, "REJOIN_JOB_KEY_FILE", "file with the job key");
  line.setting("--other-job-key-file", s.other_key_file, "REJOIN_OTHER_JOB_KEY_FILE",
               "file with a second key, if the daemon has one");
  daemon::bind(line, s.certificates);
  line.setting("--socket", s.socket, "REJOIN_SOCKET", "the socket of this node's daemon, which runs")
      .check(or_none(socket_name()));
  line.setting("--connect", s.coordinators, "REJOIN_COORDINATOR", "the coordinators, or a relay")
      .check(or_none(peer_addresses()));
  line.setting("--transport", s.transport, "REJOIN_TRANSPORT", "of the catch-up stream, as rejoind has it")
      .check(transport_name());
  line.setting("--data-listen", s.data_listen, "REJOIN_DATA_LISTEN",
               "where the daemon listens for catch-up connections")
      .check(listen_address());
  line.setting("--advertise", s.advertise, "REJOIN_ADVERTISE", "what others are told instead")
      .check(or_none(advertised_host()));
  line.add("--peer", s.peers,
           "the catch-up address of another node's daemon, as its log has it; may be given more than once")
      .check(peer_address());
  line.add("--pairs", pairs,
           "HOST:PORT of every node of the job, this one among them: each is tried with each, while the same command "
           "runs on all; the port is the one that the daemon will have")
      .check(peer_addresses());
  line.add("--wait-s", wait_s, "pairs: how long other nodes may take to start it").range(0, 3600).show_default();
  daemon::bind(line, s.store);
  line.setting("--replicas", s.replicas, "REJOIN_REPLICAS", "of the job").range(1, 1024);
  line.setting("--full-mesh-members", s.full_mesh_members, "REJOIN_FULL_MESH_MEMBERS", "as the coordinator's")
      .range(0, 1024);
  line.add("--ranks-here", s.ranks, "ranks of the job on this node").range(1, 65536).show_default();
  line.add("--cuda-connections", s.cuda_connections, "as trainers are given it")
      .environment("CUDA_DEVICE_MAX_CONNECTIONS")
      .check(or_none(whole_number()));
  line.add("--patience-ms", patience_ms, "how long each answer may take").range(100, 60000).show_default();
  line.flag("--json", json, "as JSON, with what was skipped");
  line.flag("--strict", strict, "warnings fail, too: exit status 1");
  line.flag("--verbose", verbose, "say what was skipped, and why");
}

int DoctorCommand::run() const {
  spdlog::set_level(spdlog::level::off);  // what its own connections have to say is in the findings
  DoctorSettings s = settings;
  s.patience = std::chrono::milliseconds(patience_ms);
  s.wait = std::chrono::seconds(wait_s);
  if (s.transport == "ibverbs:near") s.transport = "ibverbs";  // which ports these are is each trainer's matter
  if (!pairs.empty()) s.pairs = split(pairs, ',');
  const auto findings = examine(s, real_probes(s));
  if (json) std::cout << json_of(findings) << "\n";
  for (const auto& one : findings)
    if (!json && (verbose || one.verdict != Finding::Verdict::skipped)) std::cout << line_of(one) << "\n";
  std::cout << std::flush;
  return exit_status(findings, strict);
}

}  // namespace rejoin::daemon
