// `rejoin doctor --pairs`: one way after the other, from a rail here to one of another node.
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/ioctl.h>

#include <algorithm>

#include "base/fail.h"
#include "base/fd.h"
#include "daemon/doctor_pairs.h"
#include "daemon/doctor_probes.h"
#include "transport/advertise.h"
#include "transport/ibverbs/port_health.h"
#include "transport/socket_address.h"

namespace rejoin::daemon {

using transport::Event, transport::EventKind;
using Reached = PathFacts::Reached;

namespace {

constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kSmall = 64;      // bytes, or some more
constexpr std::ptrdiff_t kAtOnce = 16;  // ways that are tried at a time: they share the network
constexpr Duration kAgain = std::chrono::milliseconds(100);

// 0: not known.
std::uint32_t interface_mtu(const std::string& host) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return 0;
  std::uint32_t mtu = 0;
  for (const auto* one = all; one != nullptr && mtu == 0; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_addr->sa_family != AF_INET && one->ifa_addr->sa_family != AF_INET6))
      continue;
    sockaddr_storage address{};
    std::copy_n(reinterpret_cast<const char*>(one->ifa_addr),
                one->ifa_addr->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6),
                reinterpret_cast<char*>(&address));
    const auto parts = transport::SocketAddress::split(transport::SocketAddress::format(address));
    if (!parts || parts->host != host) continue;
    const Fd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    ifreq request{};
    std::string_view(one->ifa_name).copy(request.ifr_name, IFNAMSIZ - 1);
    if (socket && ::ioctl(socket.get(), SIOCGIFMTU, &request) == 0) mtu = static_cast<std::uint32_t>(request.ifr_mtu);
  }
  ::freeifaddrs(all);
  return mtu;
}

doctor::DoctorTarget target_of(const transport::RemoteRegion& region) {
  doctor::DoctorTarget target;
  target.set_key(region.key);
  target.set_length(region.length);
  return target;
}

transport::RemoteRegion region_of(const doctor::DoctorTarget& target) { return {target.key(), target.length()}; }

}  // namespace

// Of packets on the way from this rail to that host: of an RDMA port as it is now, otherwise of the interface.
std::uint32_t Pairs::mtu(const Rail& rail, const std::string& towards) const {
  constexpr std::string_view verbs = "ibverbs:";
  if (rail.name.starts_with(verbs)) {
    const auto ports = transport::ibverbs::examine_ports({rail.name.substr(verbs.size())}, 4096);
    return ports && !ports->empty() ? ports->front().mtu : 0;
  }
  const std::string name = rail.name.substr(0, rail.name.find(';'));
  const auto local = name.find(':');
  if (local != std::string::npos) return interface_mtu(name.substr(local + 1));
  const auto host = transport::own_host_towards(transport::with_port(towards, own_port_));
  return interface_mtu(host.value_or(towards));  // of a way that does not leave the machine, its own end is the peer's
}

// With its first rail alone, before it has said where the others are.
void Pairs::queue_paths(std::size_t number) {
  const auto& peer = peers_[number];
  for (std::size_t theirs = peer.welcomed ? 1 : 0; theirs < peer.rails.size(); ++theirs)
    for (std::size_t own = 0; own < rails_.size(); ++own) {
      Path path{.peer = number};
      path.facts.own = own;
      path.facts.theirs = theirs;
      path.facts.here = rails_[own].name;
      path.since = now_;
      paths_.push_back(std::move(path));
    }
}

void Pairs::begin(Path& path) {
  auto& rail = rails_[path.facts.own];
  const auto& peer = peers_[path.peer];
  path.was_here = peer.here;
  path.facts.mtu = mtu(rail, peer.host);
  doctor::DoctorHello hello;
  hello.set_version(kVersion);
  hello.set_node(own_);
  hello.set_mtu(path.facts.mtu);
  *hello.mutable_target() = target_of(rail.engine->remote(rail.target));
  advance(path, Stage::connecting);
  const auto endpoint =
      rail.engine->connect({peer.rails[path.facts.theirs], options_.secrets.own}, as_bytes(hello.SerializeAsString()));
  if (!endpoint) return lose(path, endpoint.error().message);
  path.endpoint = *endpoint;
  rail.paths[*endpoint] = static_cast<std::size_t>(
      std::ranges::find_if(paths_, [&](const auto& one) { return &one == &path; }) - paths_.begin());
}

void Pairs::advance(Path& path, Stage stage) {
  path.stage = stage;
  path.since = now_;
}

void Pairs::end(Path& path, const std::string& why) {
  auto& rail = rails_[path.facts.own];
  path.facts.why = why;
  if (rail.paths.erase(path.endpoint) > 0) rail.engine->close(path.endpoint);
  advance(path, Stage::over);
}

// What was tried may have left a megabyte on its way that does not get through: another connection is for words alone.
void Pairs::call(std::size_t number, const PathFacts& way) {
  Path path{.peer = number, .for_words = true};
  path.facts.own = way.own;
  path.facts.theirs = way.theirs;
  paths_.push_back(std::move(path));
}

// It is not connected. Nodes start one after the other, and so that is no news before this one is known to run.
void Pairs::lose(Path& path, const std::string& why) {
  if (path.was_here || now_ >= started_ + options_.wait) return end(path, why);
  auto& rail = rails_[path.facts.own];
  if (rail.paths.erase(path.endpoint) > 0) rail.engine->close(path.endpoint);
  path.stage = Stage::queued;
  path.since = now_ + kAgain;
}

void Pairs::check_paths() {
  const auto active = [](const Path& one) {
    return one.stage != Stage::queued && one.stage != Stage::talking && one.stage != Stage::over;
  };
  for (auto& path : paths_) {
    if (!active(path) || now_ - path.since < options_.patience) continue;
    const std::string late = fmt::format("no answer in {} ms", options_.patience.count());
    if (path.stage == Stage::connecting) lose(path, late);
    else end(path, late);
  }
  for (auto under_way = std::ranges::count_if(paths_, active); under_way < kAtOnce; ++under_way) {
    Path* next = nullptr;  // who has waited longest
    for (auto& path : paths_)
      if (path.stage == Stage::queued && path.since <= now_ && (next == nullptr || path.since < next->since))
        next = &path;
    if (next == nullptr) return;
    begin(*next);
  }
}

void Pairs::on_event(std::size_t number, const Event& event) {
  auto& rail = rails_[number];
  if (event.kind == EventKind::accepted) return on_visitor(number, event);
  if (event.kind == EventKind::closed) return on_closed(number, event);
  const auto visit = rail.visits.find(event.endpoint);
  const auto found = rail.paths.find(event.endpoint);
  if (visit == rail.visits.end() && found == rail.paths.end()) return;  // it has been closed
  const bool caller = found != rail.paths.end();
  auto& peer = peers_[caller ? paths_[found->second].peer : visit->second.peer];
  peer.here = true;
  peer.heard = now_;
  if (event.kind == EventKind::message) return on_message(number, event);
  if (!caller) {
    // Where it can't be posted the connection is lost, which is an event of its own.
    if (event.kind == EventKind::written) (void)write_bulk({number, event.endpoint}, visit->second.target);
    return;
  }
  auto& path = paths_[found->second];
  if (event.kind == EventKind::connected && path.stage == Stage::connecting) {
    path.facts.reached = Reached::connected;
    advance(path, Stage::greeting);
  } else if (event.kind == EventKind::completed && path.stage == Stage::bulk && !event.error) {
    path.facts.reached = Reached::sent;
  } else if (event.kind == EventKind::written && path.stage == Stage::bulk) {
    path.facts.reached = Reached::all;
    path.facts.large_ms = milliseconds(clock_.now() - path.since);
    end(path, "");
  }
}

void Pairs::on_visitor(std::size_t number, const Event& event) {
  auto& rail = rails_[number];
  doctor::DoctorHello hello;
  doctor::DoctorMessage answer;
  auto& welcome = *answer.mutable_welcome();
  const bool read = hello.ParseFromArray(event.message.data(), static_cast<int>(event.message.size()));
  const auto known = std::ranges::find_if(peers_, [&](const auto& one) { return one.facts.node == hello.node(); });
  if (!read || hello.version() != kVersion) {
    welcome.set_refusal("it is 'rejoin doctor' of another version; use one version of Rejoin on all nodes");
  } else if (known == peers_.end()) {
    welcome.set_refusal(fmt::format("it has no '{}' among its --pairs; give all nodes the same list", hello.node()));
  } else {
    known->facts.came = known->here = true;
    known->heard = now_;
    known->visits.push_back({number, event.endpoint});
    rail.visits[event.endpoint] = {static_cast<std::size_t>(known - peers_.begin()), region_of(hello.target())};
    welcome.set_rail(rail.name);
    welcome.set_mtu(mtu(rail, known->host));
    *welcome.mutable_target() = target_of(rail.engine->remote(rail.target));
    for (const auto& one : rails_) welcome.add_rails(one.address);
  }
  send({number, event.endpoint}, answer);
}

void Pairs::on_message(std::size_t number, const Event& event) {
  auto& rail = rails_[number];
  const Line line{number, event.endpoint};
  const auto found = rail.paths.find(event.endpoint);
  doctor::DoctorMessage message;
  const bool read = message.ParseFromArray(event.message.data(), static_cast<int>(event.message.size()));
  if (found == rail.paths.end()) {
    auto& peer = peers_[rail.visits.at(event.endpoint).peer];
    if (read && message.has_verdict()) return hear_verdict(peer, line, message.verdict());
    if (read && message.has_heard()) peer.has_heard = true;
    if (!read || !message.has_echo()) return;
    message.mutable_echo()->set_clock_us(clock_us());
    return send(line, message);
  }
  auto& path = paths_[found->second];
  auto& peer = peers_[path.peer];
  if (!read) return end(path, "it answers what no 'rejoin doctor' of this version does");
  if (message.has_verdict()) return hear_verdict(peer, line, message.verdict());
  if (message.has_heard()) peer.has_heard = true;
  if (message.has_welcome() && path.stage == Stage::greeting) on_welcome(path, message.welcome());
  if (message.has_echo() && path.stage == Stage::echo) on_echo(path, message.echo());
}

void Pairs::on_welcome(Path& path, const doctor::DoctorWelcome& welcome) {
  auto& peer = peers_[path.peer];
  if (!welcome.refusal().empty()) {
    peer.refuses = true;
    return end(path, printable(welcome.refusal(), 500));
  }
  if (path.for_words) {
    peer.called = Line{path.facts.own, path.endpoint};
    return advance(path, Stage::talking);
  }
  path.target = region_of(welcome.target());
  path.facts.there = welcome.rail();
  path.facts.mtu_there = welcome.mtu();
  constexpr int most_rails = 64;
  if (!peer.welcomed && welcome.rails_size() <= most_rails) {
    for (int i = 1; i < welcome.rails_size(); ++i)
      peer.rails.push_back(transport::with_host_for_any({welcome.rails(i)}, peer.host).text);
    peer.welcomed = true;
    queue_paths(path.peer);
  }
  doctor::DoctorMessage message;
  message.mutable_echo()->set_padding(std::string(kSmall, '\0'));
  advance(path, Stage::echo);
  path.since = clock_.now();
  send({path.facts.own, path.endpoint}, message);
}

// Of two clocks at most half of the time there and back is not known.
void Pairs::on_echo(Path& path, const doctor::DoctorEcho& echo) {
  auto& facts = peers_[path.peer].facts;
  path.facts.small_ms = milliseconds(clock_.now() - path.since);
  path.facts.reached = Reached::small;
  if (const double error = path.facts.small_ms / 2; !facts.clock_ahead_ms || error < facts.clock_error_ms) {
    facts.clock_ahead_ms = clock_ahead_ms(echo.clock_us(), clock_us(), error);
    facts.clock_error_ms = error;
  }
  advance(path, Stage::bulk);
  path.since = clock_.now();
  if (const auto posted = write_bulk({path.facts.own, path.endpoint}, path.target); !posted)
    end(path, posted.error().message);
}

void Pairs::on_closed(std::size_t number, const Event& event) {
  auto& rail = rails_[number];
  const Line line{number, event.endpoint};
  const auto forget = [&](Peer& peer) {
    std::erase(peer.visits, line);
    if (peer.called == line) peer.called.reset();
    if (peer.verdict_line != line) return;
    // Whoever has said all, and hangs up, has heard all.
    if (peer.facts.verdict) peer.has_heard = true;
    else peer.verdict_line.reset();
  };
  if (const auto visit = rail.visits.find(event.endpoint); visit != rail.visits.end()) {
    forget(peers_[visit->second.peer]);
    rail.visits.erase(visit);
  } else if (const auto found = rail.paths.find(event.endpoint); found != rail.paths.end()) {
    auto& path = paths_[found->second];
    forget(peers_[path.peer]);
    const std::string why = event.error ? event.error->message : "it closes the connection";
    return path.stage == Stage::connecting ? lose(path, why) : end(path, why);
  }
  rail.engine->close(event.endpoint);
}

Result<> Pairs::write_bulk(Line line, const transport::RemoteRegion& target) {
  auto& rail = rails_[line.rail];
  const transport::Write write{.context = 1,
                               .local = {rail.source, 0},
                               .remote = {target, 0},
                               .length = std::min(kBulk, target.length),
                               .notify = 1};
  return rail.engine->write(line.endpoint, {&write, 1});
}

void Pairs::send(Line line, const doctor::DoctorMessage& message) {
  // Where it can't be sent the connection is lost, which is an event of its own.
  (void)rails_[line.rail].engine->send(line.endpoint, as_bytes(message.SerializeAsString()));
}

}  // namespace rejoin::daemon
