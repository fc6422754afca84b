// `rejoin doctor --pairs`: who this node is, what it listens with, and what it and each other tell each other at the
// end.
#include "daemon/doctor_pairs.h"

#include <poll.h>

#include <algorithm>

#include "base/fail.h"
#include "daemon/clock_stamp.h"
#include "daemon/doctor_probes.h"
#include "transport/factory.h"
#include "transport/ibverbs/factory.h"
#include "transport/socket_address.h"

namespace rejoin::daemon {

using Reached = PathFacts::Reached;

namespace {

constexpr int kLookAround = 20;  // ms

// A rail for bulk is where the one before it is.
std::string without_threads(const std::string& transport) {
  auto parts = split(transport, ';');
  std::erase_if(parts, [](const std::string& part) { return part.starts_with("threads="); });
  return fmt::format("{}", fmt::join(parts, ";"));
}

// The transport of each rail by itself.
Result<std::vector<std::string>> rails_of(const std::string& given) {
  if (auto right = transport::check_name(given); !right) return tl::unexpected(right.error());
  const std::string transport = without_threads(given);
  const auto border = transport.find(':');
  const std::string kind = transport.substr(0, border);
  if (kind == "shm" || kind == "ucx")
    return fail(ErrorCode::invalid_argument,
                "{} has no addresses that are known before; give --transport tcp or ibverbs, whatever the job has",
                kind);
  if (border == std::string::npos && kind != "ibverbs") return std::vector{kind};
  const auto settings = std::min(transport.find(';'), transport.size());
  auto names = border == std::string::npos ? transport::ibverbs::active_ports()
                                           : split(transport.substr(border + 1, settings - border - 1), ',');
  if (names.empty())
    return fail(ErrorCode::unavailable, "no RDMA port is active here; look at 'ibv_devinfo', or --transport tcp");
  for (auto& name : names) name = kind + ":" + name + transport.substr(settings);
  return names;
}

bool farther(const PathFacts* a, const PathFacts& b) { return a == nullptr || b.reached > a->reached; }

}  // namespace

Result<PairsFacts> try_pairs(const PairsOptions& options) { return Pairs::run(options); }

Result<PairsFacts> Pairs::run(const PairsOptions& options) {
  Pairs pairs(options);
  if (auto found = pairs.find_own(); !found) return tl::unexpected(found.error());
  if (auto listening = pairs.listen(); !listening) return tl::unexpected(listening.error());
  pairs.loop();
  PairsFacts facts{.own = pairs.own_};
  for (const auto& path : pairs.paths_)
    if (!path.for_words) pairs.peers_[path.peer].facts.paths.push_back(path.facts);
  for (auto& peer : pairs.peers_) facts.others.push_back(std::move(peer.facts));
  return facts;
}

Result<> Pairs::find_own() {
  const auto listen = transport::SocketAddress::split(options_.listen);
  if (!listen) return tl::unexpected(listen.error());
  for (const auto& node : options_.nodes) {
    if (std::ranges::count(options_.nodes, node) > 1)
      return fail(ErrorCode::invalid_argument, "{} is there twice; name each node once", node);
    const auto parts = transport::SocketAddress::split(node);
    if (!parts) return tl::unexpected(parts.error());
    Peer peer;
    peer.facts.node = node;
    const auto addresses = addresses_of(parts->host, options_.patience);
    if (addresses) peer.host = addresses->front();
    if (addresses && transport::SocketAddress::check_own({peer.host, 0}) &&
        (listen->port == 0 || listen->port == parts->port)) {
      if (!own_.empty())
        return fail(ErrorCode::invalid_argument,
                    "{} and {} are both of this machine; tell by the port of --data-listen which of them is meant",
                    own_, node);
      own_ = node;
      own_host_ = peer.host;
      own_port_ = parts->port;
      continue;
    }
    if (addresses) peer.rails = {transport::with_port(peer.host, parts->port)};
    else peer.facts.paths.push_back({.why = addresses.error().message});
    peers_.push_back(std::move(peer));
  }
  if (own_.empty())
    return fail(ErrorCode::invalid_argument,
                "none of {} is this machine{}; give all nodes the same list, with this one in it",
                fmt::join(options_.nodes, ", "), listen->port == 0 ? "" : fmt::format(", port {}", listen->port));
  return {};
}

// Rails over TCP have addresses of their own; those of RDMA devices differ by their ports.
Result<> Pairs::listen() {
  const auto names = rails_of(options_.transport);
  if (!names) return tl::unexpected(names.error());
  const bool by_address = options_.transport.starts_with("tcp");
  const char* everywhere = own_host_.find(':') == std::string::npos ? "0.0.0.0" : "[::]";
  memory_.resize(2 * kBulk);
  for (const auto& name : *names) {
    const auto port = own_port_ + (by_address ? 0 : rails_.size());
    auto engine = transport::make_engine(name);
    if (!engine) return tl::unexpected(engine.error());
    (*engine)->set_secrets(options_.secrets);
    (*engine)->set_silence(options_.patience);
    const auto address = (*engine)->listen({fmt::format("{}:{}", everywhere, port)});
    if (!address)
      return fail(ErrorCode::unavailable,
                  "{}; if it is this node's rejoind that listens there, stop it, or give --pairs other ports that "
                  "firewalls pass as well",
                  address.error().message);
    const std::span all(memory_);
    const auto source =
        (*engine)->register_region(all.first(kBulk), transport::MemoryKind::host, transport::Access::local);
    if (!source) return tl::unexpected(source.error());
    const auto target =
        (*engine)->register_region(all.subspan(kBulk), transport::MemoryKind::host, transport::Access::remote_write);
    if (!target) return tl::unexpected(target.error());
    rails_.push_back(
        {.name = name, .address = address->text, .engine = std::move(*engine), .source = *source, .target = *target});
  }
  return {};
}

void Pairs::loop() {
  now_ = started_ = clock_.now();
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) queue_paths(peer);
  const auto done = [&](const Peer& peer) { return over(peer); };
  while (!std::ranges::all_of(peers_, done)) {
    now_ = clock_.now();
    bool quiet = true;
    for (std::size_t rail = 0; rail < rails_.size(); ++rail)
      for (const auto& event : rails_[rail].engine->poll()) {
        on_event(rail, event);
        quiet = false;
      }
    check_paths();
    for (std::size_t peer = 0; peer < peers_.size(); ++peer) look_at(peer);
    if (quiet) wait();
  }
}

void Pairs::wait() {
  std::vector<pollfd> look;
  for (auto& rail : rails_) {
    if (!rail.engine->arm()) return;
    look.push_back({rail.engine->event_fd(), POLLIN, 0});
  }
  ::poll(look.data(), look.size(), kLookAround);
}

// When all ways there have been tried it is told how that went: by a connection of ours, or else by one of its own.
void Pairs::look_at(std::size_t number) {
  auto& peer = peers_[number];
  const PathFacts* best = nullptr;
  bool tried = true, calling = false;
  for (const auto& path : paths_) {
    if (path.peer != number) continue;
    if (path.for_words) {
      calling |= path.stage != Stage::over && path.stage != Stage::talking;
    } else {
      tried &= path.stage == Stage::over;
      if (farther(best, path.facts)) best = &path.facts;
    }
  }
  if (!tried) return;
  if (!peer.examined) {
    peer.examined = now_;
    if (best != nullptr && best->reached != Reached::nothing) return call(number, *best);
  }
  if (peer.verdict_line || peer.has_heard || calling) return;
  if (peer.called) peer.verdict_line = peer.called;
  else if (!peer.visits.empty()) peer.verdict_line = peer.visits.back();
  else return;
  doctor::DoctorMessage message;
  message.mutable_verdict()->set_reached(best != nullptr ? static_cast<std::uint32_t>(best->reached) : 0);
  message.mutable_verdict()->set_why(best != nullptr ? best->why : peer.facts.paths.front().why);
  send(*peer.verdict_line, message);
}

void Pairs::hear_verdict(Peer& peer, Line line, const doctor::DoctorVerdict& verdict) {
  const auto reached = std::min(verdict.reached(), static_cast<std::uint32_t>(Reached::all));
  peer.facts.verdict = PathFacts{.reached = static_cast<Reached>(reached), .why = printable(verdict.why(), 500)};
  doctor::DoctorMessage heard;
  heard.mutable_heard();
  send(line, heard);
}

// Who is known to run may be busy with others; but not for ever, whatever is heard of it.
bool Pairs::over(const Peer& peer) const {
  if (!peer.examined) return false;
  if (!peer.here || peer.refuses || (peer.has_heard && peer.facts.verdict)) return true;
  const auto longest = 2 * options_.wait + (8 + static_cast<std::int64_t>(paths_.size())) * options_.patience;
  return now_ > std::max(peer.heard, *peer.examined) + options_.wait + 3 * options_.patience ||
         now_ > started_ + longest;
}

std::int64_t Pairs::clock_us() const { return options_.clock_us ? options_.clock_us() : system_time(); }

}  // namespace rejoin::daemon
