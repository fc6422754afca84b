// The service does all catch-up of one node: it serves joiners of other nodes out of local trainers' states, and
// fetches states for local joiners. It owns no thread; the thread that owns the engine makes every call.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "base/deadlines.h"
#include "base/seldom.h"
#include "catchup/joiner.h"
#include "catchup/pacer.h"
#include "catchup/source.h"

namespace rejoin::catchup {

struct RankKey {
  ReplicaId replica;
  RankId rank;
  auto operator<=>(const RankKey&) const = default;
};

struct SourceAddress {
  ReplicaId replica;
  Incarnation incarnation;
  transport::Address address;
  std::uint64_t job = 0;
  std::size_t distance = 0;  // of its node: base/location.h
  auto operator<=>(const SourceAddress& other) const {
    return std::tie(replica, incarnation) <=> std::tie(other.replica, other.incarnation);
  }
  bool operator==(const SourceAddress& other) const { return (*this <=> other) == 0; }
};

// Other joiners of the same ring, which pass on what they have proven; and which of all of them this one is, itself
// among them.
struct Chain {
  std::set<SourceAddress> fellows;
  std::uint32_t own = 0, of = 1;
};

// The first bytes of a connection, from the joiner's daemon to the source's.
struct Hello {
  std::uint64_t job;
  std::uint32_t replica, rank;  // whose state is wanted
  std::uint64_t incarnation;
  std::uint64_t manifest;
};

class Service {
 public:
  struct Options {
    Compression compression = Compression::when_it_pays;
    double limit_bytes_per_second = 0;       // of what is sent to all joiners together; 0: none
    Duration silence = deadlines::kSilence;  // the job's: a source that does not answer for so long is asked anew
  };
  // `clock` times the coder; both outlive the service.
  Service(transport::Engine& engine, const transport::Secret& secret, const Options& options, const Clock& clock)
      : engine_(engine),
        secret_(secret),
        compression_(options.compression),
        silence_(options.silence),
        clock_(clock),
        pacer_(options.limit_bytes_per_second),
        refusals_(kSameLineAgain) {}
  ~Service();

  // Gives the service a local trainer's memory, until remove_rank(). `instance` tells the trainer's process from others
  // that were or will be the same rank. Errors: of the engine where it can't register the memory; the service keeps the
  // rank all the same and tries again until it can.
  Result<> add_rank(RankKey key, std::uint64_t instance, local::View view);
  void remove_rank(RankKey key);  // closes all connections that may write into its memory first

  // Lets joiners be served out of this rank's memory when they ask for this incarnation of its replica, which is a
  // member of this job: a contributor, of which everything is served, or a joiner itself, of which only what is proven
  // is. Without an incarnation nobody is served any more, and the connections of those that are served now are closed.
  void serve(RankKey key, std::optional<Incarnation> incarnation, std::uint64_t job = 0, bool joining = false);

  // Catches this rank up from these sources. The caller calls it again whenever the list changes; an empty list pauses.
  // `committed` is the last committed step. The state must be at least as new as that of the first call, because the
  // rank has only the gradients of later steps. The service tries a source that refuses or is lost again, until the
  // list is without it. The sources contribute; `chain` are joiners.
  void catch_up(RankKey key, const std::set<SourceAddress>& sources, Step committed, TimePoint now,
                const Chain& chain = {});
  // Ends the catch-up of this rank, which was promoted or removed, and closes all connections that write into its
  // memory.
  void finish(RankKey key);

  // A rank whose state has become complete, current and verified since the last poll(), and that is still here.
  struct CompletedRank {
    RankKey key;
    std::uint64_t instance = 0;  // whose memory it is
  };
  std::vector<CompletedRank> poll(TimePoint now);
  // Does the work of poll() once more, and keeps the ranks that it completes for the next poll().
  void poll_again(TimePoint now);
  // Returns in which slices joiners have found their sources to differ since the last call.
  std::vector<std::pair<RankKey, Drift>> take_drifts() { return std::exchange(drifts_, {}); }
  // Returns the ranks that were removed since the last call because their device has failed, and whose memory it was.
  std::vector<std::pair<RankKey, std::uint64_t>> take_failed() { return std::exchange(failed_, {}); }
  bool busy() const { return busy_; }  // more work without waiting for events
  // poll(), take_drifts() or take_failed() will give something.
  bool has_news() const { return !caught_up_.empty() || !drifts_.empty() || !failed_.empty(); }
  // The caller, who called poll_again() last at `polled`, polls again after this time at the latest, and no later than
  // `most` from now.
  Duration wait(TimePoint polled, TimePoint now, Duration most) const;
  std::vector<RankKey> joining() const;
  std::size_t serving() const { return serving_.size(); }
  std::optional<CatchUpProgress> progress(RankKey key, TimePoint now) const;
  std::uint64_t bytes_served() const;
  std::uint64_t bytes_passed_on() const;  // of these: out of the state of a rank that was catching up itself
  // Of the joiners served now: how much, how fast, whether coded.
  std::vector<std::pair<RankKey, Source::Stats>> serving_now() const;
  // What to watch besides the engine: the doorbells of the trainers whose memory is in use now, which any poll changes.
  std::vector<int> doorbells() const;
  void arm_doorbells();

 private:
  static constexpr Duration kUnreachedAgain = std::chrono::minutes(1);  // it is logged

  struct LocalRank {
    std::uint64_t instance = 0;
    std::unique_ptr<local::View> view;
    bool registered = false;
    std::vector<transport::RegionId> state;  // by memory range, for what is sent from here
    transport::RegionId shadow;              // likewise
    // While it catches up: where sources write. Its own, so that they can be fenced off without disturbing whoever is
    // served from here.
    std::vector<transport::RegionId> target;
    std::unique_ptr<Joiner> joiner;
    bool reported = false;
    std::optional<Incarnation> serves;
    bool serves_joining = false;
    Proofs proofs;  // what may be served
    std::uint64_t passed_on_to_gone = 0;
    std::uint64_t job = 0;           // of which it is a member
    std::set<SourceAddress> wanted;  // sources
    Chain chain;                     // other sources
    struct Retry {
      TimePoint at{};
      Duration pause{};
      bool never = false;
    };
    std::map<SourceAddress, Retry> given_up;        // of the chain
    Step committed;                                 // as catch_up() was last given it
    Seldom not_yet_told{kSameLineAgain};            // that it can't catch up yet
    std::map<SourceAddress, std::string> lost_why;  // … a source, the last time
    Seldom unreached_told{kUnreachedAgain};
    TimePoint retry_at{};  // of what could not be registered, or connected with
    bool tries_again() const { return !registered || !wanted.empty(); }
    std::map<SourceAddress, transport::EndpointId> sources;  // … and the connections with them
  };
  struct Serving {
    RankKey rank;
    std::unique_ptr<Source> source;
  };
  struct FetchingFrom {
    RankKey rank;
    SourceAddress source;
    std::optional<TimePoint> asked;  // and not answered yet
    bool fellow = false;             // it is a joiner, as far as this daemon knows
  };

  Result<> register_rank(LocalRank& rank);
  bool start_joining(RankKey key, LocalRank& rank, TimePoint now);
  void try_again(RankKey key, LocalRank& rank, TimePoint now);
  // Registers all memory ranges or none, which leaves the list empty.
  Result<> register_state(const local::View& view, transport::Access access, std::vector<transport::RegionId>& regions);
  void deregister(std::vector<transport::RegionId>& regions);
  Result<transport::RegionId> register_memory(std::span<std::byte> memory, device::MemoryKind kind,
                                              transport::Access access, const std::optional<device::DmaBuf>& buffer);
  void connect_missing(RankKey key, LocalRank& rank, TimePoint now);
  void connect(RankKey key, LocalRank& rank, const SourceAddress& source, bool fellow, TimePoint now);
  void part_from(LocalRank& rank, const GivenUp& from, TimePoint now);
  void give_up_silent_sources(TimePoint now);
  std::vector<local::View*> views_in_use() const;
  void handle(const transport::Event& event, TimePoint now);
  void on_accepted(const transport::Event& event);
  void on_message(transport::EndpointId endpoint, BytesView bytes);
  void lose(transport::EndpointId endpoint, const std::string& why);
  void tell_of_loss(LocalRank& rank, const SourceAddress& source, const std::string& why);
  static std::string why_unreached(const LocalRank& rank, TimePoint now);
  void tell_of_unreached(RankKey key, LocalRank& rank, TimePoint now);

  transport::Engine& engine_;
  const transport::Secret secret_;
  const Compression compression_;
  const Duration silence_;
  const Clock& clock_;
  Pacer pacer_;
  std::map<RankKey, LocalRank> ranks_;
  std::map<transport::EndpointId, Serving> serving_;
  transport::EndpointId served_last_;
  std::map<transport::EndpointId, FetchingFrom> fetching_;
  std::vector<CompletedRank> caught_up_;
  std::vector<std::pair<RankKey, Drift>> drifts_;
  std::vector<std::pair<RankKey, std::uint64_t>> failed_;
  std::uint64_t served_by_gone_ = 0, passed_on_by_gone_ = 0;
  std::map<SourceAddress, Seldom> losses_;  // that were logged; a source that refuses is asked again and again
  Seldom refusals_;
  bool busy_ = false;
};

}  // namespace rejoin::catchup
