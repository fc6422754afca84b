// rejoind: the node's daemon; with --coordinator also (or only) the job's coordinator.
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/events.h"
#include "base/log.h"
#include "daemon/coordinator_server.h"
#include "daemon/node_server.h"
#include "daemon/relay_server.h"
#include "daemon/status_server.h"

namespace rejoin::daemon {
namespace {

// Everything that can be set, from a file (--config), REJOIN_* variables and flags, the later ones winning.
struct Config {
  bool coordinator = false;
  std::string listen = "127.0.0.1:0", log_directory = "rejoin-log";
  std::uint32_t replicas = 3, ranks = 2;
  std::uint64_t batch = 1, steps = 0, silence_ms = 2000;
  std::string relay, key_file, status = "127.0.0.1:0", address_file, log_level = "info", events;
  NodeOptions node;
};

void bind(CLI::App& app, Config& c) {
  app.set_config("--config", "", "file with settings, one 'name = value' a line");
  const auto option = [&](const char* flags, auto& value, const char* env, const char* help) {
    return app.add_option(flags, value, help)->envname(env)->capture_default_str();
  };
  app.add_flag("--coordinator", c.coordinator, "be the job's coordinator")->envname("REJOIN_COORDINATOR_ROLE");
  option("--listen", c.listen, "REJOIN_LISTEN", "coordinator: address for daemons; port 0 lets the system choose");
  option("--log-directory", c.log_directory, "REJOIN_LOG_DIRECTORY", "coordinator: where its decisions are kept");
  option("--replicas", c.replicas, "REJOIN_REPLICAS", "coordinator: replicas of the job")->check(CLI::Range(1, 1024));
  option("--ranks", c.ranks, "REJOIN_RANKS", "coordinator: ranks of a replica")->check(CLI::Range(1, 65536));
  option("--batch", c.batch, "REJOIN_BATCH", "coordinator: samples a contributor trains in a step")
      ->check(CLI::Range(1, 1 << 30));
  option("--steps", c.steps, "REJOIN_STEPS", "coordinator: steps of the job; 0: no end");
  option("--silence-ms", c.silence_ms, "REJOIN_SILENCE_MS",
         "how long a peer may be silent; all other deadlines follow from it")
      ->check(CLI::Range(100, 3600000));
  option("--job-key-file", c.key_file, "REJOIN_JOB_KEY_FILE", "file with the job key (at least 16 bytes, mode 600)")
      ->required();
  option("--status", c.status, "REJOIN_STATUS", "address for /status and /metrics");
  option("--address-file", c.address_file, "REJOIN_ADDRESS_FILE", "write the addresses in use to this file, as JSON");
  option("--log-level", c.log_level, "REJOIN_LOG_LEVEL", "trace, debug, info, warn, error or off");
  option("--events", c.events, "REJOIN_EVENTS", "directory for event files (see rejoin trace)");
  option("--name", c.node.name, "REJOIN_NODE", "this node's name in logs");
  option("--socket", c.node.socket, "REJOIN_SOCKET", "node: unix socket for trainers ('@name': abstract)");
  option("--connect", c.node.coordinator, "REJOIN_COORDINATOR",
         "node, relay: the coordinator's address, or for a node its relay's");
  option("--relay", c.relay, "REJOIN_RELAY",
         "be a relay at this address: the daemons of a large replica --connect to it, and it to the coordinator; the "
         "node of this process, if it has one, goes through it");
  option("--transport", c.node.transport, "REJOIN_TRANSPORT",
         "node: transport of the catch-up stream: shm, tcp, tcp:ADDRESS,ADDRESS… (rails), ibverbs[:DEVICE,DEVICE…] or "
         "ucx:LIST");
  option("--compression", c.node.compression, "REJOIN_COMPRESSION",
         "node: catch-up stream: off, auto (zstd while it is measured to pay) or always")
      ->check(CLI::IsMember({"off", "auto", "always"}));
  option("--stream-limit", c.node.stream_limit, "REJOIN_STREAM_LIMIT", "node: MB/s that catch-up may send; 0: no limit")
      ->check(CLI::NonNegativeNumber);
  option("--data-listen", c.node.data_listen, "REJOIN_DATA_LISTEN", "node: address for catch-up connections");
}

Result<> write_addresses(const std::string& path, const nlohmann::json& addresses) {
  if (path.empty()) return {};
  const std::string temporary = path + ".new";
  std::ofstream out(temporary);
  out << addresses.dump() << "\n";
  out.close();
  if (!out || ::rename(temporary.c_str(), path.c_str()) != 0) return fail_errno(fmt::format("address file {}", path));
  return {};
}

Result<> run(Config& c) {
  const bool node = !c.node.socket.empty();
  if (!node && !c.coordinator && c.relay.empty())
    return fail(ErrorCode::invalid_argument,
                "nothing to do: give --coordinator, or --socket and --connect for a node, or --relay and --connect for "
                "a relay, or all of them");
  if ((node || !c.relay.empty()) && c.node.coordinator.empty() && !c.coordinator)
    return fail(ErrorCode::invalid_argument, "a node or relay needs the coordinator's address: --connect HOST:PORT");
  auto key = JobKey::read(c.key_file);
  if (!key) return tl::unexpected(key.error());
  if (auto opened = events::open(c.events, c.coordinator && !node ? "coordinator" : c.node.name); !opened)
    return opened;

  asio::io_context io(1);
  asio::signal_set signals(io, SIGINT, SIGTERM);
  signals.async_wait([&](asio::error_code error, int number) {
    if (error) return;
    spdlog::info("signal {}: ending", number);
    io.stop();
  });
  nlohmann::json addresses;
  std::unique_ptr<CoordinatorServer> coordinator;
  if (c.coordinator) {
    const membership::JobConfig job{.replicas = c.replicas,
                                    .ranks = c.ranks,
                                    .batch = c.batch,
                                    .steps = c.steps,
                                    .silence = std::chrono::milliseconds(c.silence_ms)};
    auto started = CoordinatorServer::start(io, c.listen, c.log_directory, job, *key);
    if (!started) return tl::unexpected(started.error());
    coordinator = std::move(*started);
    addresses["coordinator"] = coordinator->address();
    if (c.node.coordinator.empty()) c.node.coordinator = coordinator->address();
  }
  c.node.silence = std::chrono::milliseconds(c.silence_ms);
  std::unique_ptr<RelayServer> relay;
  if (!c.relay.empty()) {
    auto started = RelayServer::start(io, c.node.name, c.relay, c.node.coordinator, c.node.silence, *key);
    if (!started) return tl::unexpected(started.error());
    relay = std::move(*started);
    addresses["relay"] = c.node.coordinator = relay->address();
  }
  std::unique_ptr<NodeServer> server;
  if (node) {
    auto started = NodeServer::start(io, c.node, *key);
    if (!started) return tl::unexpected(started.error());
    server = std::move(*started);
    addresses["socket"] = c.node.socket;
  }
  auto status = StatusServer::start(io, c.status, [&] {
    nlohmann::json json;
    if (coordinator) json["coordinator_role"] = coordinator->status();
    if (relay) json["relay_role"] = relay->status();
    if (server) json["node_role"] = server->status();
    return json;
  });
  if (!status) return tl::unexpected(status.error());
  addresses["status"] = (*status)->address();
  if (auto written = write_addresses(c.address_file, addresses); !written) return written;
  spdlog::info("ready: {}", addresses.dump());
  io.run();
  return {};
}

}  // namespace
}  // namespace rejoin::daemon

int main(int argc, char** argv) {
  using namespace rejoin;
  daemon::Config config;
  CLI::App app{"The Rejoin daemon: one on each node, and one with --coordinator for the job."};
  daemon::bind(app, config);
  CLI11_PARSE(app, argc, argv);
  init_logging(
      fmt::format("rejoind {}", config.coordinator && config.node.socket.empty() ? "coordinator" : config.node.name),
      config.log_level);
  // In full, and in the form of a --config file.
  std::string settings = app.config_to_str(true, false);
  std::replace(settings.begin(), settings.end(), '\n', ' ');
  spdlog::info("settings: {}", settings);
  if (auto done = daemon::run(config); !done) {
    spdlog::error("{}", done.error().message);
    return 1;
  }
  return 0;
}
