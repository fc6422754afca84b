// rejoind: the node's daemon; with --coordinator also (or only) the job's coordinator.
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/bytes.h"
#include "base/command_line.h"
#include "base/event_file.h"
#include "base/fail.h"
#include "base/fd.h"
#include "base/flight.h"
#include "base/log.h"
#include "base/refusals.h"
#include "daemon/config.h"
#include "daemon/control_tls.h"
#include "daemon/coordinator_report.h"
#include "daemon/coordinator_server.h"
#include "daemon/listen.h"
#include "daemon/metrics.h"
#include "daemon/node_server.h"
#include "daemon/relay_server.h"
#include "daemon/replicated_server.h"
#include "daemon/service_manager.h"
#include "daemon/status_pages.h"
#include "daemon/status_server.h"
#include "daemon/store_factory.h"
#include "transport/advertise.h"
#include "transport/socket_address.h"

namespace rejoin::daemon {
namespace {

constexpr auto kCertificatesLookedAfter = std::chrono::minutes(1);

// A file of another kind would be lost, where a flag was mistaken for another.
Result<> check_address_file(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::symlink_status(path, error);
  if (path.empty() || status.type() == std::filesystem::file_type::not_found) return {};
  if (status.type() == std::filesystem::file_type::none)
    return fail(ErrorCode::io, "--address-file {}: {}", path, error.message());
  if (std::filesystem::is_regular_file(status)) {  // others may not be read: a pipe would wait for a writer
    std::ifstream in(path);
    const auto before = nlohmann::json::parse(in, nullptr, false);
    if ((before.is_object() && before.contains("status")) || std::filesystem::file_size(path, error) == 0) return {};
  }
  return fail(ErrorCode::invalid_argument,
              "--address-file {} exists and is no address file: it is left as it is; choose another path", path);
}

Result<> write_addresses(const std::string& path, const nlohmann::json& addresses) {
  if (path.empty()) return {};
  if (auto right = check_address_file(path); !right) return right;
  std::string temporary = path + ".XXXXXX";
  const Fd file(::mkostemp(temporary.data(), O_CLOEXEC));
  const std::string text = addresses.dump() + "\n";
  if (file && ::fchmod(file.get(), 0644) == 0 &&
      ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
      ::rename(temporary.c_str(), path.c_str()) == 0)
    return {};
  auto failed = fail_errno(fmt::format("address file {}", path));
  if (file) ::unlink(temporary.c_str());
  return failed;
}

// The address at which others find what listens here. No name server is asked: one that is silent would hold up all.
std::string advertised(const Config& c, const std::string& listening) {
  if (!transport::listens_everywhere({listening})) return listening;
  const std::string given = c.node.advertise.substr(0, c.node.advertise.find(','));
  if (!given.empty()) return transport::with_host_for_any({listening}, given).text;
  const auto others = split(c.node.coordinator, ',');
  const auto numeric =
      std::ranges::find_if(others, [](const auto& one) { return transport::SocketAddress::numeric(one).has_value(); });
  const auto hosts = transport::own_hosts_towards(numeric == others.end() ? "" : *numeric);
  return transport::with_own_host_for_any({listening}, transport::or_loopback(hosts)).text;
}

Result<std::unique_ptr<ReplicatedServer>> start_one_of_several(asio::io_context& io, const Config& c,
                                                               const JobKeys& keys) {
  auto store = open_store(io, c.store, std::chrono::milliseconds(c.silence_ms),
                          [](const std::string& why) { end_of_deciding(why); });
  if (!store) return tl::unexpected(store.error());
  ReplicatedServer::Options options;
  options.name = c.node.name;
  options.listen = c.listen;
  options.advertised = [c](const std::string& listening) { return advertised(c, listening); };
  options.job = job_of(c);
  options.log_directory = c.log_directory;
  options.log_compact = c.log_compact_kib * KiB;
  options.log_archives = c.log_archives;
  options.kind = c.store.store.substr(0, c.store.store.find(':'));
  options.endpoints = c.store.endpoints();
  return ReplicatedServer::start(io, std::move(options), std::move(*store), keys);
}

// The node and the relay of this process find it, too, where --connect has left it out.
void add_coordinator(Config& c, const std::string& own) {
  auto& all = c.node.coordinator;
  if (all.empty()) {
    all = own;
    return;
  }
  const auto each = split(all, ',');
  if (std::ranges::none_of(each, [&](const auto& one) { return leads_to(one, own); })) all += "," + own;
}

// At the address that was asked for; where none was, at the usual one, if that is free.
Result<std::unique_ptr<StatusServer>> start_status(asio::io_context& io, const Config& c,
                                                   const StatusServer::Source& source) {
  if (!c.status.empty()) return StatusServer::start(io, c.status, source);
  const std::string usual = fmt::format("127.0.0.1:{}", c.coordinator ? 7001 : !c.node.socket.empty() ? 7002 : 7003);
  auto started = StatusServer::start(io, usual, source);
  if (started) return started;
  auto other = StatusServer::start(io, "127.0.0.1:0", source);
  if (other) spdlog::info("{}. It is at {} instead", started.error().message, (*other)->address());
  return other;
}

Result<JobKeys> read_keys(const Config& c) {
  if (auto together = check(c); !together) return tl::unexpected(together.error());
  if (auto right = check_files(c.store); !right) return tl::unexpected(right.error());
  return JobKeys::read(c.key_file, c.other_key_file, c.certificates);
}

// Of a process, in its flight recording.
std::string name_of(const Config& c) {
  if (!c.node.socket.empty()) return c.node.name;
  if (!c.coordinator) return "relay " + c.node.name;
  return c.store.shared() ? "coordinator " + c.node.name : "coordinator";
}

// "Reload" of a service manager, or a rotation of logs: there is nothing to read anew, and to systemd this signal is an
// end in order, after which nobody would start the coordinator again. Who runs it in a terminal ends it with that.
void ignore_hang_up(asio::signal_set& signals) {
  struct sigaction before {};
  const bool nohup = ::sigaction(SIGHUP, nullptr, &before) == 0 && before.sa_handler == SIG_IGN;
  if (nohup || Fd(::open("/dev/tty", O_RDONLY | O_NOCTTY | O_CLOEXEC))) return;
  signals.add(SIGHUP);
}

Result<> run(Config& c, const JobKeys& keys) {
  const bool node = !c.node.socket.empty();
  if (auto right = check_address_file(c.address_file); !right) return right;
  if (!c.other_key_file.empty()) spdlog::info("who proves the key in {} is taken in, too", c.other_key_file);
  events::open_file(c.events, c.coordinator && !node ? "coordinator" : c.node.name);
  flight::open(c.flight, name_of(c),
               fmt::format("rejoind{}{}{}", c.coordinator ? ", coordinator" : "", c.relay.empty() ? "" : ", relay",
                           node ? ", node" : ""));

  asio::io_context io(1);
  asio::signal_set signals(io, SIGINT, SIGTERM);
  ignore_hang_up(signals);
  std::function<void(asio::error_code, int)> heard = [&](asio::error_code error, int number) {
    if (error) return;
    if (number == SIGHUP) {
      spdlog::warn("SIGHUP is ignored: what there is to read anew is read without it");
      return signals.async_wait(heard);
    }
    spdlog::info("signal {}: ending", number);
    events::record(events::Kind::ended, {}, fmt::format("signal {}", number));
    io.stop();
  };
  signals.async_wait(heard);
  std::unique_ptr<NodeServer> server;
  asio::posix::stream_descriptor other(io);
  asio::steady_timer others(io);
  if (c.end_with) {
    auto process = make_pidfd(static_cast<int>(*c.end_with));
    if (!process) return fail(ErrorCode::invalid_argument, "--end-with {}: {}", *c.end_with, process.error().message);
    other.assign(process->release());
    other.async_wait(asio::posix::stream_descriptor::wait_read, [&](asio::error_code error) {
      if (error) return;
      spdlog::info("process {} has ended: ending", *c.end_with);
      if (!server) return io.stop();
      server->retire([&io] { io.stop(); });  // other ranks of its replica may be about to leave
      others.expires_after(2 * std::chrono::milliseconds(c.silence_ms));
      others.async_wait([&io](asio::error_code cancelled) {
        if (!cancelled) io.stop();
      });
    });
  }
  nlohmann::json addresses;
  std::unique_ptr<CoordinatorServer> coordinator;
  std::unique_ptr<ReplicatedServer> one_of_several;
  if (c.coordinator && c.store.shared()) {
    auto started = start_one_of_several(io, c, keys);
    if (!started) return tl::unexpected(started.error());
    one_of_several = std::move(*started);
    addresses["coordinator"] = advertised(c, one_of_several->address());
    add_coordinator(c, one_of_several->address());
  } else if (c.coordinator) {
    auto started = CoordinatorServer::start(
        io, c.listen, {.directory = c.log_directory, .compact = c.log_compact_kib * KiB, .archives = c.log_archives},
        job_of(c), keys);
    if (!started) return tl::unexpected(started.error());
    coordinator = std::move(*started);
    addresses["coordinator"] = advertised(c, coordinator->address());
    if (c.node.coordinator.empty()) c.node.coordinator = coordinator->address();
  }
  c.node.silence = std::chrono::milliseconds(c.silence_ms);
  std::unique_ptr<RelayServer> relay;
  if (!c.relay.empty()) {
    auto started = RelayServer::start(io, c.node.name, c.relay, c.node.coordinator, c.node.silence, keys);
    if (!started) return tl::unexpected(started.error());
    relay = std::move(*started);
    addresses["relay"] = advertised(c, relay->address());
    c.node.coordinator = relay->address();
  }
  if (node) {
    auto started = NodeServer::start(io, c.node, keys);
    if (!started) return tl::unexpected(started.error());
    server = std::move(*started);
    addresses["socket"] = c.node.socket;
  }
  auto manager = ServiceManager::from_environment();
  if (!manager) return tl::unexpected(manager.error());
  const auto say = [&] {
    nlohmann::json json;
    if (coordinator) json["coordinator_role"] = coordinator->status();
    if (one_of_several) json["coordinator_role"] = one_of_several->status();
    if (relay) json["relay_role"] = relay->status();
    if (server) json["node_role"] = server->status();
    json["refused"] = refusals_json(refusals::counted());
    if (const auto* own = keys.control().own(); own != nullptr)
      json["certificate"] = {{"valid_from", own->from.time_since_epoch().count()},
                             {"valid_until", own->until.time_since_epoch().count()}};
    return json;
  };
  StatusPages pages({.status = say, .history = [&]() -> const JobHistory* {
                       if (coordinator) return &coordinator->history();
                       return one_of_several ? &one_of_several->history() : nullptr;
                     }});
  auto status = start_status(io, c, [&](const std::string& path) { return pages.answer(path); });
  if (!status) return tl::unexpected(status.error());
  const std::string page = advertised(c, (*status)->address());
  addresses["status"] = page;
  if (coordinator) coordinator->set_page(page);
  if (one_of_several) one_of_several->set_page(page);
  if (auto written = write_addresses(c.address_file, addresses); !written) return written;
  spdlog::info("ready: {}", addresses.dump());
  asio::steady_timer again(io);
  std::function<void(asio::error_code)> tell = [&](asio::error_code cancelled) {
    if (cancelled || !manager->listens()) return;
    manager->ready(line_of(say()));
    again.expires_after(c.node.silence);
    again.async_wait(tell);
  };
  tell({});
  // A certificate may be renewed, or end, while nobody connects.
  asio::steady_timer later(io);
  std::function<void(asio::error_code)> look_after = [&](asio::error_code cancelled) {
    if (cancelled || keys.control().own() == nullptr) return;
    keys.control().look_after();
    later.expires_after(kCertificatesLookedAfter);
    later.async_wait(look_after);
  };
  look_after({});
  io.run();
  manager->stopping();
  events::record(events::Kind::ended, {}, "in order");
  return {};
}

// A trainer's state in GPU memory comes in as many descriptors as it has allocations; few systems let a process have
// more than 1,024 unasked.
void raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) spdlog::warn("the limit of open files stays: {}", std::strerror(errno));
  constexpr rlim_t least = 64;  // of a daemon that has no trainers yet
  if (limit.rlim_cur < least)
    spdlog::warn("this process may have {} open files, and needs {} to begin with; raise the limit with 'ulimit -n'",
                 limit.rlim_cur, least);
}

}  // namespace
}  // namespace rejoin::daemon

int main(int argc, char** argv) {
  using namespace rejoin;
  open_standard_descriptors();
  ::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error like a full disk
  ::signal(SIGPIPE, SIG_IGN);  // whoever read the log may have gone
  daemon::Config config;
  CommandLine line("The Rejoin daemon: one on each node, and one with --coordinator for the job.");
  daemon::bind(line, config);
  if (const auto status = line.parse(argc, argv)) return *status;
  init_logging(
      fmt::format("rejoind {}", config.coordinator && config.node.socket.empty() ? "coordinator" : config.node.name),
      config.log_level);
  std::string settings = line.settings();
  while (settings.ends_with('\n')) settings.pop_back();
  spdlog::info("settings, in the form of a --config file:\n{}", settings);
  daemon::raise_descriptor_limit();
  const auto keys = daemon::read_keys(config);
  if (!keys) {
    spdlog::error("{}", keys.error().message);
    return 2;  // as for a flag that is wrong
  }
  if (const auto doubt = daemon::doubt(config); !doubt.empty()) spdlog::warn("{}", doubt);
  try {
    if (auto done = daemon::run(config, *keys); !done) {
      spdlog::error("{}", done.error().message);
      return done.error().code == ErrorCode::mismatch ? 2 : 1;  // with these settings its log would not fit again
    }
  } catch (const std::system_error& error) {  // asio's, where it can have no descriptors at all
    const int code = error.code().value();
    const bool lacks = without_descriptors(code) || code == EAGAIN;  // the latter of threads
    spdlog::error("the system does not give what a daemon needs ({}){}", error.what(),
                  lacks            ? ": raise 'ulimit -n', and 'ulimit -u'"
                  : code == ENOSPC ? ": raise fs.epoll.max_user_watches, for which all processes of this user count"
                                   : "");
    return 1;
  }
  return 0;
}
