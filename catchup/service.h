// All catch-up of one node, in one thread: serves joiners out of local trainers' states, and fetches for local joiners.
// It owns no thread; whoever owns the engine calls it.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <vector>

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
  auto operator<=>(const SourceAddress& other) const {
    return std::tie(replica, incarnation) <=> std::tie(other.replica, other.incarnation);
  }
  bool operator==(const SourceAddress& other) const { return (*this <=> other) == 0; }
};

// What a joiner's daemon shows when it connects.
struct Hello {
  std::uint64_t secret;
  std::uint32_t replica, rank;  // whose state is wanted
  std::uint64_t incarnation;
  std::uint64_t manifest;
};

class Service {
 public:
  static constexpr Duration kSameLineAgain = std::chrono::seconds(10);  // in the log
  struct Options {
    Compression compression = Compression::when_it_pays;
    double limit_bytes_per_second = 0;           // of what is sent to all joiners together; 0: none
    Duration silence = std::chrono::seconds(2);  // the job's: a source that does not answer for so long is asked anew
  };
  // `clock` times the coder; both outlive the service.
  Service(transport::Engine& engine, std::uint64_t secret, const Options& options, const Clock& clock)
      : engine_(engine),
        secret_(secret),
        compression_(options.compression),
        silence_(options.silence),
        clock_(clock),
        pacer_(options.limit_bytes_per_second),
        refusals_(kSameLineAgain) {}
  ~Service();

  // A local trainer's memory, from now until remove_rank(). `life` tells its process from others that were or will be
  // the same rank. Where its memory can't be registered it is kept all the same, and tried again until it can.
  Result<> add_rank(RankKey key, std::uint64_t life, shm::View view);
  void remove_rank(RankKey key);  // fences everyone off its memory first

  // Joiners may be served out of this rank's memory, when they ask for this incarnation of its replica: it contributes.
  // None: they may not, and those that are served now are let go.
  void serve(RankKey key, std::optional<Incarnation> incarnation);

  // Catches this rank up from these sources; again with another list where they have changed. An empty list pauses.
  // `committed`: the last step that is. Nothing older than that of the first call will do: the rank has the gradients
  // of later steps only. A source that refuses or is lost is tried again, until the list is without it.
  void catch_up(RankKey key, const std::set<SourceAddress>& sources, Step committed, TimePoint now);
  // No longer: it was promoted or removed. Its memory is fenced.
  void finish(RankKey key);

  // The ranks that have become whole, current and proven since the last call, and are still here.
  struct Whole {
    RankKey key;
    std::uint64_t life = 0;  // whose memory it is
  };
  std::vector<Whole> poll(TimePoint now);
  // The same once more, keeping what became of it for the next poll().
  void poll_again(TimePoint now);
  // What joiners have found their sources to differ in since the last call.
  std::vector<std::pair<RankKey, Drift>> take_drifts() { return std::exchange(drifts_, {}); }
  // Whose device has failed since: they were removed.
  std::vector<RankKey> take_failed() { return std::exchange(failed_, {}); }
  bool busy() const { return busy_; }  // more work without waiting for events
  std::vector<RankKey> joining() const;
  std::size_t serving() const { return serving_.size(); }
  std::optional<Progress> progress(RankKey key, TimePoint now) const;
  std::uint64_t bytes_served() const;
  // Of the joiners served now: how much, how fast, whether coded.
  std::vector<std::pair<RankKey, Source::Stats>> serving_now() const;
  // What to watch besides the engine: the trainers' doorbells.
  std::vector<int> doorbells() const;
  void arm_doorbells();

 private:
  struct LocalRank {
    std::uint64_t life = 0;
    std::unique_ptr<shm::View> view;
    bool registered = false;
    std::vector<transport::RegionId> state;  // by segment, for what is sent from here
    transport::RegionId aside;               // likewise
    // While it catches up: where sources write. Its own, so that they can be fenced off without disturbing whoever is
    // served from here.
    std::vector<transport::RegionId> target;
    std::unique_ptr<Joiner> joiner;
    bool reported = false;
    std::optional<Incarnation> serves;
    std::set<SourceAddress> wanted;                          // sources
    Step committed;                                          // when it was last told whom it has
    TimePoint retry_at{};                                    // of what could not be registered, or connected with
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
  };

  Result<> register_rank(LocalRank& rank);
  Result<> start_joining(LocalRank& rank, TimePoint now);
  void try_again(RankKey key, LocalRank& rank, TimePoint now);
  // Registers all segments or none, which leaves the list empty.
  Result<> register_state(const shm::View& view, std::vector<transport::RegionId>& regions);
  void deregister(std::vector<transport::RegionId>& regions);
  Result<transport::RegionId> register_memory(std::span<std::byte> memory, device::MemoryKind kind,
                                              const std::optional<device::DmaBuf>& buffer);
  void connect_missing(RankKey key, LocalRank& rank, TimePoint now);
  void give_up_silent_sources(TimePoint now);
  void handle(const transport::Event& event, TimePoint now);
  void on_accepted(const transport::Event& event);
  void on_message(transport::EndpointId endpoint, BytesView bytes);
  void lose(transport::EndpointId endpoint, const std::string& why);
  void tell_of_loss(const SourceAddress& source, const std::string& why);

  transport::Engine& engine_;
  const std::uint64_t secret_;
  const Compression compression_;
  const Duration silence_;
  const Clock& clock_;
  Pacer pacer_;
  std::map<RankKey, LocalRank> ranks_;
  std::map<transport::EndpointId, Serving> serving_;
  std::map<transport::EndpointId, FetchingFrom> fetching_;
  std::vector<Whole> caught_up_;
  std::vector<std::pair<RankKey, Drift>> drifts_;
  std::vector<RankKey> failed_;
  std::uint64_t served_by_gone_ = 0;
  std::map<SourceAddress, Seldom> losses_;  // that were told of; a source that refuses is asked again and again
  Seldom refusals_;
  bool busy_ = false;
};

}  // namespace rejoin::catchup
