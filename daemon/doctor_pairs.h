// Every node with every node: `rejoin doctor --pairs` runs on all of them at about the same time, listens where the
// daemon would, and tries each rail here with each rail there: a connection that proves the job key, 64 B there and
// back, 1 MiB there and back. Then each tells the other how it fared, over whichever connection there is: so both know
// of a way that is open in one direction alone. It ends when all have been tried and have said so, or are silent.
#pragma once

#include <deque>
#include <map>
#include <memory>

#include "base/bytes.h"
#include "base/clock.h"
#include "daemon/doctor.h"
#include "doctor.pb.h"
#include "transport/transport.h"

namespace rejoin::daemon {

struct PairsOptions {
  std::vector<std::string> nodes;  // HOST:PORT, this one among them; the same list everywhere
  std::string transport = "tcp";
  std::string listen = "127.0.0.1:0";  // --data-listen: its port, where it has one, tells which of them this one is
  transport::Secrets secrets;
  std::chrono::milliseconds patience{2000}, wait{10000};
  std::function<std::int64_t()> clock_us;  // since 1970; none: the system's
};

// Thread: one; it blocks. Errors: `invalid_argument`, a setting; otherwise what this node can't do.
Result<PairsFacts> try_pairs(const PairsOptions& options);

// Its parts.
class Pairs {
 public:
  static Result<PairsFacts> run(const PairsOptions& options);

 private:
  static constexpr std::uint64_t kBulk = 1 * MiB;
  using EndpointId = transport::EndpointId;
  enum class Stage { queued, connecting, greeting, echo, bulk, talking, over };
  struct Line {  // a connection, by its rail here
    std::size_t rail = 0;
    EndpointId endpoint;
    bool operator==(const Line&) const = default;
  };
  struct Peer {
    PairFacts facts;
    std::string host;                // as an address
    std::vector<std::string> rails;  // where they listen; the first one, until it has said more
    bool welcomed = false, here = false;
    bool refuses = false;               // this node, which it does not listen to
    std::optional<TimePoint> examined;  // all ways there have been tried
    TimePoint heard{};                  // last
    std::optional<Line> called;         // to say how it went
    std::vector<Line> visits;           // its connections with this node
    std::optional<Line> verdict_line;   // our verdict
    bool has_heard = false;             // … and it has heard that
  };
  struct Path {
    std::size_t peer = 0;
    bool for_words = false;  // it tries nothing
    PathFacts facts;
    Stage stage = Stage::queued;
    EndpointId endpoint;
    TimePoint since{};      // of this stage; of a queued one: not before
    bool was_here = false;  // the peer was known to run when this try began
    transport::RemoteRegion target;
  };
  struct Visit {
    std::size_t peer = 0;
    transport::RemoteRegion target;
  };
  struct Rail {
    std::string name, address;  // where it listens
    std::unique_ptr<transport::Engine> engine;
    transport::RegionId source, target;
    std::map<EndpointId, std::size_t> paths;
    std::map<EndpointId, Visit> visits;
  };

  explicit Pairs(const PairsOptions& options) : options_(options) {}
  // doctor_pairs.cc
  Result<> find_own();
  Result<> listen();
  void loop();
  void wait();
  void look_at(std::size_t peer);
  bool over(const Peer& peer) const;
  void hear_verdict(Peer& peer, Line line, const doctor::DoctorVerdict& verdict);
  std::int64_t clock_us() const;

  // doctor_paths.cc
  void queue_paths(std::size_t peer);
  void begin(Path& path);
  void advance(Path& path, Stage stage);
  void end(Path& path, const std::string& why);
  void lose(Path& path, const std::string& why);
  void call(std::size_t peer, const PathFacts& way);
  void check_paths();
  void on_event(std::size_t rail, const transport::Event& event);
  void on_visitor(std::size_t rail, const transport::Event& event);
  void on_message(std::size_t rail, const transport::Event& event);
  void on_welcome(Path& path, const doctor::DoctorWelcome& welcome);
  void on_echo(Path& path, const doctor::DoctorEcho& echo);
  void on_closed(std::size_t rail, const transport::Event& event);
  Result<> write_bulk(Line line, const transport::RemoteRegion& target);
  void send(Line line, const doctor::DoctorMessage& message);
  std::uint32_t mtu(const Rail& rail, const std::string& towards) const;

  const PairsOptions& options_;
  SteadyClock clock_;
  TimePoint now_{}, started_{};
  std::string own_, own_host_;
  std::uint16_t own_port_ = 0;
  Bytes memory_;  // from where 1 MiB goes, and to where it comes: nobody looks at the bytes
  std::vector<Rail> rails_;
  std::vector<Peer> peers_;
  std::deque<Path> paths_;  // which stay where they are as more come
};

}  // namespace rejoin::daemon
