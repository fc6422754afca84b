#include "daemon/config.h"

#include <cmath>

#include "base/command_line.h"
#include "base/fail.h"
#include "base/longest_time.h"
#include "base/number.h"
#include "daemon/flags.h"

namespace rejoin::daemon {

void bind(CommandLine& line, Config& c) {
  line.allow_settings_file();
  line.flag("--coordinator", c.coordinator, "be the job's coordinator").environment("REJOIN_COORDINATOR_ROLE");
  line.setting("--listen", c.listen, "REJOIN_LISTEN", "coordinator: address for daemons; port 0 lets the system choose")
      .check(listen_address());
  line.setting("--log-directory", c.log_directory, "REJOIN_LOG_DIRECTORY", "coordinator: where its decisions are kept");
  bind(line, c.store);
  line.setting("--log-compact-kib", c.log_compact_kib, "REJOIN_LOG_COMPACT_KIB",
               "coordinator: a log of so many KiB, or the copy of a shared one, is compacted: what was in it goes on "
               "beside it as decisions.1.log …, "
               "for the audit alone")
      .range(1, 1 << 30);
  line.setting("--log-archives", c.log_archives, "REJOIN_LOG_ARCHIVES",
               "coordinator: so many of these files are kept, the newest; 0 keeps all")
      .range(0, 1 << 20);
  line.setting("--replicas", c.replicas, "REJOIN_REPLICAS", "coordinator: replicas of the job").range(1, 1024);
  line.setting("--ranks", c.ranks, "REJOIN_RANKS", "coordinator: ranks of a replica").range(1, 65536);
  line.setting("--full-mesh-members", c.full_mesh_members, "REJOIN_FULL_MESH_MEMBERS",
               "coordinator: up to so many members, and two more, are all connected with each other; of a larger job "
               "each with those that it needs, and with spares")
      .range(0, 1024);
  line.setting("--batch", c.batch, "REJOIN_BATCH", "coordinator: samples a contributor trains in a step")
      .range(1, 1 << 30);
  line.flag("--constant-batch", c.constant_batch,
            "coordinator: contributors train --replicas × --batch samples together in each step, however few they are; "
            "each one's gradient counts by its samples")
      .environment("REJOIN_CONSTANT_BATCH");
  line.flag("--balance-batches", c.balance_batches,
            "coordinator: a contributor that is slower than others gets fewer of the step's samples, and they get "
            "more; each one's gradient counts by its samples")
      .environment("REJOIN_BALANCE_BATCHES");
  line.setting("--balance-at-least", c.balance_at_least, "REJOIN_BALANCE_AT_LEAST",
               "coordinator: with --balance-batches, the least that a contributor gets, as a fraction of an equal "
               "share")
      .real_range(0, 1);
  line.setting("--balance-at-most", c.balance_at_most, "REJOIN_BALANCE_AT_MOST",
               "coordinator: with --balance-batches, the most that a contributor gets, as a multiple of an equal "
               "share: what its memory has to hold")
      .real_range(1, 16);
  line.setting("--steps", c.steps, "REJOIN_STEPS", "coordinator: steps of the job; 0: no end").check(whole_number());
  line.setting("--roll-back-to", c.roll_back_to, "REJOIN_ROLL_BACK_TO",
               "coordinator: where nobody is left with the state of the last committed step, go on from a checkpoint "
               "as old as this step; what was trained since is given up, and trained again: STEP@STEPS, as the status "
               "says, or STEP where the job goes back for the first time")
      .check(or_none(roll_back_word()));
  line.setting("--start-patience-ms", c.start_patience_ms, "REJOIN_START_PATIENCE_MS",
               "coordinator: a job that has lost everybody starts again without the replicas that have not come for so "
               "long; 0: 15 times the silence")
      .check(whole_number(kLongestTimeMs));
  line.setting(
          "--audit", c.audit, "REJOIN_AUDIT",
          "coordinator: replicas' results are compared in every step, and all of their states once in so many steps; "
          "auto: so many that it takes 0.5 % of the time; off")
      .check(audit_period());
  line.setting("--drop-replica", c.drop_replica, "REJOIN_DROP_REPLICA",
               "coordinator: the job has stopped because replicas differ; go on without this one: REPLICA@STEP, as "
               "the status says")
      .check(or_none(replica_at_step()));
  line.setting("--round-trips", c.round_trips, "REJOIN_ROUND_TRIPS",
               "coordinator: auto: where no locations tell it, members stand in the ring by who is near whom as round "
               "trips are measured; off: they stand by locations alone, or else in the order in which they have come")
      .one_of({"auto", "off"});
  line.setting("--silence-ms", c.silence_ms, "REJOIN_SILENCE_MS",
               "how long a peer may be silent; all other deadlines follow from it")
      .range(100, deadlines::kLongestSilence.count());
  line.setting("--other-job-key-file", c.other_key_file, "REJOIN_OTHER_JOB_KEY_FILE",
               "file with a second key that others may prove: while the job's key is changed")
      .check(file_name());
  line.setting("--job-key-file", c.key_file, "REJOIN_JOB_KEY_FILE",
               "file with the job key (at least 16 bytes, mode 600)")
      .required()
      .check(file_name());
  bind(line, c.certificates);
  line.setting("--status", c.status, "REJOIN_STATUS",
               "address of the page, /status and /metrics; none: port 7001 of 127.0.0.1 with --coordinator, 7002 of a "
               "node, 7003 of a relay, or any other where that is in use")
      .check(or_none(listen_address()));
  line.setting("--address-file", c.address_file, "REJOIN_ADDRESS_FILE",
               "write the addresses in use to this file, as JSON");
  line.setting("--log-level", c.log_level, "REJOIN_LOG_LEVEL", "trace, debug, info, warn, error or off")
      .check(log_level());
  line.setting("--events", c.events, "REJOIN_EVENTS", "directory for event files (see rejoin trace)");
  line.setting("--flight-dir", c.flight, "REJOIN_FLIGHT_DIR",
               "directory for the flight recording (see rejoin explain); none: /dev/shm/rejoin-UID; off")
      .check(flight_directory());
  line.setting("--name", c.node.name, "REJOIN_NODE", "this node's name in logs, of 255 bytes at most")
      .check(node_name());
  line.setting(
          "--location", c.node.location, "REJOIN_LOCATION",
          "node: where it stands, from the widest to the narrowest: DC/ROOM/RACK/HOST, say; the rings cross what is "
          "between them as rarely as they can, and who catches up fetches from near by")
      .check(or_none(location()));
  line.setting("--socket", c.node.socket, "REJOIN_SOCKET", "node: unix socket for trainers ('@name': abstract)")
      .check(or_none(socket_name()));
  line.add("--end-with", c.end_with, "end when the process of this number has ended").check(or_none(whole_number()));
  line.setting("--connect", c.node.coordinator, "REJOIN_COORDINATOR",
               "node, relay: the coordinator's address, or those of all coordinators; or for a node its relay's")
      .check(or_none(peer_addresses()));
  line.setting(
          "--relay", c.relay, "REJOIN_RELAY",
          "be a relay at this address: the daemons of a large replica --connect to it, and it to the coordinator; the "
          "node of this process, if it has one, goes through it")
      .check(or_none(listen_address()));
  line.setting("--transport", c.node.transport, "REJOIN_TRANSPORT",
               "node: transport of the catch-up stream: shm, tcp, tcp:ADDRESS,ADDRESS… (rails), tcp+aes (encrypted; "
               "likewise; ;ktls=1 behind it: by the kernel); ;threads=N behind either: N threads more move bulk; "
               "ibverbs[:DEVICE,DEVICE…], ibverbs:near (the ports near the GPU) or ucx:LIST")
      .check(transport_name());
  line.setting("--compression", c.node.compression, "REJOIN_COMPRESSION",
               "node: catch-up stream: off, auto (zstd while it is measured to pay) or always")
      .one_of({"off", "auto", "always"});
  line.setting("--stream-limit", c.node.stream_limit, "REJOIN_STREAM_LIMIT",
               "node: MB/s that catch-up may send; 0: no limit")
      .check(number_from_0());
  line.setting("--numa", c.node.numa, "REJOIN_NUMA",
               "node: auto: threads of the catch-up stream run on the NUMA node of the GPU, or of the NICs; off: "
               "anywhere")
      .one_of({"auto", "off"});
  line.setting("--data-listen", c.node.data_listen, "REJOIN_DATA_LISTEN", "node: address for catch-up connections")
      .check(listen_address());
  line.setting(
          "--advertise", c.node.advertise, "REJOIN_ADVERTISE",
          "the host that others connect to instead of the one listened on, without a port; for a node HOST,HOST… with "
          "one for each rail. None, and listening on 0.0.0.0 or [::]: this machine's address on the way to the "
          "coordinator")
      .check(or_none(advertised_host()));
}

Result<> check(const Config& c) {
  const bool node = !c.node.socket.empty();
  if (!node && !c.coordinator && c.relay.empty())
    return fail(ErrorCode::invalid_argument,
                "nothing to do: give --coordinator, or --socket and --connect for a node, or --relay and --connect for "
                "a relay, or all of them");
  if ((node || !c.relay.empty()) && c.node.coordinator.empty() && !c.coordinator)
    return fail(ErrorCode::invalid_argument, "a node or relay needs the coordinator's address: --connect HOST:PORT");
  if (!c.coordinator && c.store.store != "file")
    return fail(ErrorCode::invalid_argument, "--store {} is for coordinators alone: add --coordinator, or leave it out",
                c.store.store);
  if ((c.constant_batch || c.balance_batches) && c.batch * c.replicas >= std::uint64_t{1} << 31)
    return fail(ErrorCode::invalid_argument, "--{}-batch{} of {} × {} samples in a step: it must be less than {}",
                c.constant_batch ? "constant" : "balance", c.constant_batch ? "" : "es", c.replicas, c.batch,
                std::uint64_t{1} << 31);
  if (auto together = check(c.certificates); !together) return together;
  return check(c.store);
}

std::string doubt(const Config& c) {
  if (c.node.advertise.find(':') == std::string::npos) return {};
  const std::pair<const char*, std::string> listening[] = {
      {"--listen", c.coordinator ? c.listen : ""},
      {"--relay", c.relay},
      {"--data-listen", c.node.socket.empty() ? "" : c.node.data_listen}};
  for (const auto& [flag, address] : listening)
    if (address.starts_with("0.0.0.0:"))
      return fmt::format(
          "--advertise {} has an IPv6 address, and {} {} is there over IPv4 alone: listen on [::], which "
          "is there over both, or give an IPv4 address",
          c.node.advertise, flag, address);
  return {};
}

membership::JobConfig job_of(const Config& c) {
  membership::JobConfig job{.replicas = c.replicas,
                            .ranks = c.ranks,
                            .batch = c.batch,
                            .constant_batch = c.constant_batch,
                            .balance = {.on = c.balance_batches,
                                        .at_least = static_cast<std::uint32_t>(std::lround(c.balance_at_least * 1000)),
                                        .at_most = static_cast<std::uint32_t>(std::lround(c.balance_at_most * 1000))},
                            .steps = c.steps,
                            .silence = std::chrono::milliseconds(c.silence_ms),
                            .roll_back_to = parse_roll_back(c.roll_back_to),
                            .start_patience = std::chrono::milliseconds(c.start_patience_ms)};
  job.links.full_mesh_members = c.full_mesh_members;
  job.round_trips = c.round_trips != "off";
  job.audit.on = c.audit != "off";
  if (job.audit.on && c.audit != "auto") parse_number(c.audit, job.audit.period);
  if (const auto drop = parse_replica_at_step(c.drop_replica)) job.drop = {.replica = drop->first, .at = drop->second};
  return job;
}

}  // namespace rejoin::daemon
