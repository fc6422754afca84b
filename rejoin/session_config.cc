// A trainer's settings as flags and REJOIN_* variables.
#include "base/bytes.h"
#include "base/command_line.h"
#include "base/fail.h"
#include "base/flight_setting.h"
#include "base/longest_time.h"
#include "base/unix_socket.h"
#include "ftar/communicator.h"
#include "rejoin/session.h"
#include "transport/advertise.h"
#include "transport/factory.h"
#include "transport/socket_address.h"

namespace rejoin {

namespace {

// Of several rails each may have its own. Only TCP listens on the host that is named here.
Result<> check_listening(const std::string& name, const std::string& all) {
  const std::string transport = name.substr(0, name.find(';'));
  for (const auto& one : split(all, '|')) {
    const auto formed = transport::SocketAddress::split(one);
    if (!formed) return tl::unexpected(formed.error());
    if (transport != "tcp" && transport != "tcp+aes") continue;
    if (auto ours = transport::SocketAddress::check_own(*formed); !ours) return ours;
  }
  return {};
}

}  // namespace

void SessionConfig::bind(CommandLine& line) {
  line.setting("--replica", replica, "REJOIN_REPLICA", "this process's replica, from 0");
  line.setting("--rank", rank, "REJOIN_RANK", "its rank in the replica, from 0");
  line.setting("--socket", socket, "REJOIN_SOCKET", "unix socket of the node's daemon");
  line.setting("--device", device, "REJOIN_DEVICE",
               "where state and gradients are: host, cuda:NUMBER or cuda:PCI-ADDRESS");
  line.setting("--transport", transport, "REJOIN_TRANSPORT",
               "transport of the all-reduce: shm, tcp, tcp:ADDRESS,ADDRESS… (rails), tcp+aes (encrypted; likewise; "
               ";ktls=1 behind it: by the kernel); ;threads=N behind either: N threads more move bulk; "
               "ibverbs[:DEVICE,DEVICE…], ibverbs:near (the ports near the GPU) or ucx:LIST");
  line.setting("--data-listen", data_listen, "REJOIN_DATA_LISTEN", "address for data connections");
  line.setting("--advertise", advertise, "REJOIN_ADVERTISE",
               "the host that other ranks are told instead of the one listened on, without a port; HOST,HOST… with one "
               "for each rail");
  line.setting("--chunk-bytes", chunk_bytes, "REJOIN_CHUNK_BYTES", "all-reduce: largest chunk");
  line.setting("--chunks-in-flight", chunks_in_flight, "REJOIN_CHUNKS_IN_FLIGHT",
               "all-reduce: chunks in flight per neighbour");
  line.setting("--coding", coding, "REJOIN_CODING",
               "gradients travel with a bounded error: auto (over links slower than the coder), 8 "
               "or 4 (always, in so many bits); off: as they are");
  line.setting("--coding-error", coding_error, "REJOIN_CODING_ERROR",
               "--coding auto: 4 bits where a hop loses at most this (root mean square, in relation to the values), "
               "otherwise 8");
  line.setting(
      "--reduce-blocks", reduce_blocks, "REJOIN_REDUCE_BLOCKS",
      "all-reduce on a GPU: blocks of its kernel, at most half of the multiprocessors; 0: 8, or a quarter of them");
  line.setting("--reduce-threads", reduce_threads, "REJOIN_REDUCE_THREADS", "… and threads of each");
  line.setting("--numa", numa, "REJOIN_NUMA",
               "auto: the progress thread runs on the NUMA node of the GPU, or of the NICs; off: anywhere");
  line.setting("--events", events, "REJOIN_EVENTS", "directory for this process's event file (see rejoin trace)");
  line.setting("--flight-dir", flight, "REJOIN_FLIGHT_DIR",
               "directory for this process's flight recording (see rejoin explain); none: /dev/shm/rejoin-UID; off");
  line.setting(
      "--flip-bit-at", flip_bit_at, "REJOIN_FLIP_BIT_AT",
      "a drill: in this step one bit of what the all-reduce brings here is flipped, as if on its way; 0: never");
  line.setting("--gradient-log-budget", gradient_log_budget, "REJOIN_GRADIENT_LOG_BUDGET",
               "bytes of gradients kept while catching up");
  line.add("--patience-ms", patience, "how long a daemon that is not there, or does not answer, is waited for")
      .environment("REJOIN_PATIENCE_MS");
  line.add("--between-steps-ms", between_steps,
           "how long the trainer may take between two steps, to evaluate or to save")
      .environment("REJOIN_BETWEEN_STEPS_MS");
}

Result<SessionConfig> SessionConfig::from_environment() {
  SessionConfig config;
  CommandLine line("");
  config.bind(line);
  if (auto parsed = line.parse({}); !parsed)
    return fail(ErrorCode::invalid_argument, "REJOIN_* settings: {}", parsed.error().message);
  return config;
}

Result<> SessionConfig::check() const {
  if (socket.empty())
    return fail(ErrorCode::invalid_argument, "no daemon socket: set SessionConfig::socket, --socket or REJOIN_SOCKET");
  for (const auto& [flag, time] : {std::pair("--patience-ms (REJOIN_PATIENCE_MS)", patience),
                                   std::pair("--between-steps-ms (REJOIN_BETWEEN_STEPS_MS)", between_steps)})
    if (time < std::chrono::milliseconds(0) || time > kLongestTime)
      return fail(ErrorCode::invalid_argument, "{} {} is not from 0 to {}", flag, time.count(), kLongestTimeMs);
  if (auto named = check_unix_name(socket); !named) return named;
  if (auto known = transport::check_name(transport); !known) return known;
  if (numa != "auto" && numa != "off")
    return fail(ErrorCode::invalid_argument, "--numa (REJOIN_NUMA) '{}' is neither auto nor off", numa);
  if (auto right = flight::check_setting(flight); !right)
    return fail(ErrorCode::invalid_argument, "--flight-dir (REJOIN_FLIGHT_DIR) {}", right.error().message);
  if (auto right = check_listening(transport, data_listen); !right)
    return fail(ErrorCode::invalid_argument, "--data-listen (REJOIN_DATA_LISTEN): {}", right.error().message);
  if (auto right = advertise.empty() ? Result<>() : transport::check_advertised(advertise); !right)
    return fail(ErrorCode::invalid_argument, "--advertise {}", right.error().message);
  if (auto known = ftar::coding_named(coding); !known)
    return fail(ErrorCode::invalid_argument, "--coding (REJOIN_CODING): {}", known.error().message);
  const ftar::Options options{
      .chunk_bytes = chunk_bytes, .chunks_in_flight = chunks_in_flight, .coding_error = coding_error};
  if (auto right = ftar::check(options); !right)
    return fail(ErrorCode::invalid_argument,
                "{} (--chunk-bytes, --chunks-in-flight and --coding-error, or REJOIN_CHUNK_BYTES, "
                "REJOIN_CHUNKS_IN_FLIGHT and REJOIN_CODING_ERROR)",
                right.error().message);
  return {};
}

}  // namespace rejoin
