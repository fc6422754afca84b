// Fetches one local rank's state from all healthy sources at once, watches it being kept current, and has it proven.
// Runs in the daemon; the trainer's part (keeping and applying gradients) is keeper.h.
//
// joiner.cc: what comes from whom. joiner_proofs.cc: whether it is right.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "base/clock.h"
#include "catchup/coder.h"
#include "catchup/landed.h"
#include "catchup/planner.h"
#include "shm/view.h"
#include "stream.pb.h"
#include "transport/transport.h"

namespace rejoin::catchup {

struct Progress {
  std::uint64_t bytes = 0, total_bytes = 0;  // in place; of the whole state
  std::uint64_t wire_bytes = 0;              // of `bytes`, as they travelled
  std::uint32_t slices = 0, total_slices = 0, proven = 0;
  std::uint32_t refetched = 0;
  std::uint32_t sources = 0, sources_used = 0;
  double bytes_per_second = 0;
  double seconds = 0;
  bool done = false;
};

// Sources that have different bytes at one version: one of them is wrong, and none is to be trusted with this slice
// before it is known which.
struct Drift {
  std::string tensor;
  std::uint64_t first = 0, count = 0;  // elements
  std::uint64_t version = 0;
  std::vector<std::pair<ReplicaId, std::uint64_t>> digests;  // of sources
  std::uint64_t place = 0, places = 0;                       // bytes of a column before it, of all
};

// A slice is proven when all sources have the same bytes as this replica, each at some version that both have held.
class Joiner {
 public:
  // `state`: the view's segments, registered. `committed`: the last step when it was admitted, or since then: this
  // replica has the gradients of later steps only. `silence`: the job's.
  Joiner(transport::Engine& engine, shm::View& view, std::vector<transport::RegionId> state, Step committed,
         Duration silence, TimePoint now);
  ~Joiner();

  // From whom the state is to be had; again where that has changed. One that can't be reached for long is not waited
  // for.
  void expect(const std::map<ReplicaId, Incarnation>& sources, TimePoint now);
  void on_source_up(ReplicaId source, transport::EndpointId endpoint);
  void on_source_down(ReplicaId source);  // after its endpoint was closed: it is fenced
  // Errors: `corrupt`; the caller closes the source's connection.
  Result<> on_message(ReplicaId source, const proto::Stream& message);
  // An extent has landed: its digest is taken while its bytes are in the cache.
  void on_written(ReplicaId source, std::uint64_t tag);
  // `busy`: extents are coming in; proofs, which cost as much memory traffic as the stream, wait for a quieter moment.
  void work(TimePoint now, bool busy);

  bool done() const { return done_; }
  std::vector<Drift> take_drifts() { return std::exchange(drifts_, {}); }
  Progress progress(TimePoint now) const;

 private:
  struct Asked {
    std::vector<std::size_t> which;  // of the question's slices
    bool over = false;               // answered, or never will be
    std::vector<std::uint64_t> theirs;
  };
  struct Question {
    std::uint64_t number = 0, version = 0;
    std::vector<std::uint32_t> slices;
    std::vector<shm::View::Held> held;
    std::vector<std::optional<std::uint64_t>> ours;  // by part
    std::map<ReplicaId, Asked> asked;
  };
  struct Expected {
    Incarnation incarnation;
    // Not connected, or not for long and nothing has come: it may refuse whenever it is asked.
    std::optional<TimePoint> missing_since;
    TimePoint connected_at{};
    std::vector<bool> agrees;  // by slice
  };
  struct Suspect {  // differed from a source while another one's word is older, or not known
    int times = 0;
    TimePoint again_at{};
  };

  // A slice that a source says is in place.
  struct Arrival {
    ReplicaId source;
    proto::Sent sent;
    std::uint64_t wire_bytes = 0;
    bool whole = true;  // nothing has shown yet that its bytes are not what was sent
    Round round(std::uint32_t part) const { return {source, sent.rounds(static_cast<int>(part))}; }
  };

  Result<> on_sent(ReplicaId source, const proto::Sent& sent);
  void take_in_arrivals();
  bool decode(Arrival& arrival);
  void settle(const Arrival& arrival);
  Result<> on_proof(ReplicaId source, const proto::Proof& proof);
  void ask_for_slices();
  // Those that are connected, and those that should be at once.
  std::size_t sources_soon() const {
    return sources_.size() +
           static_cast<std::size_t>(std::count_if(expected_.begin(), expected_.end(), [&](const auto& one) {
             const auto& [source, known] = one;
             return !sources_.contains(source) && known.missing_since && now_ - *known.missing_since < silence_ / 4;
           }));
  }
  void ask_for_proof();
  bool settle(Question& question);
  void settle_slice(std::uint32_t slice, std::uint64_t version, std::uint64_t ours,
                    const std::map<ReplicaId, std::uint64_t>& theirs);
  void report_drift(std::uint32_t slice, std::uint64_t version, const std::map<ReplicaId, std::uint64_t>& theirs);
  void agree(ReplicaId source, std::uint32_t slice);
  bool asks(const Expected& source, std::uint32_t slice) const;
  bool waited_for(const Expected& source) const;
  void heard(Expected& source);
  void look_at_proofs();
  bool all_agree(std::uint32_t slice) const;
  void set_proven(std::uint32_t slice, bool proven);
  void drop(Question& question);
  void fetch_again(std::uint32_t slice);
  bool say(transport::EndpointId endpoint, const proto::Stream& message);

  transport::Engine& engine_;
  shm::View& view_;
  const std::vector<transport::RegionId> state_;
  Planner planner_;
  const std::uint64_t oldest_;  // version that will do
  const shm::Clock at_first_;   // when this was made
  // It came with a version later than any that is committed, of a checkpoint from before the job was rolled back: its
  // clock says nothing until it has changed. (Where that version is that of its first update, slices that were asked
  // for with too low a version have a gap, and are fetched again.)
  bool foreign_;
  const Duration silence_;
  std::map<ReplicaId, transport::EndpointId> sources_;
  std::map<ReplicaId, Expected> expected_;
  Landed landed_;
  Arrived arrived_;                // until they are proven
  std::vector<Arrival> arrivals_;  // that have not been looked at
  std::vector<bool> proven_;
  std::uint32_t proven_count_ = 0;
  std::set<std::uint32_t> unproven_;  // arrived
  std::uint32_t asked_up_to_ = 0;     // of them
  std::map<std::uint32_t, Suspect> suspects_;
  std::vector<Drift> drifts_;
  TimePoint now_{};
  std::vector<Question> questions_;
  std::uint64_t next_question_ = 1;
  std::uint64_t bytes_ = 0, wire_bytes_ = 0;
  Coder coder_;
  std::map<ReplicaId, std::uint64_t> from_;
  shm::Clock seen_;
  const TimePoint started_;
  TimePoint finished_{};
  bool done_ = false;
};

}  // namespace rejoin::catchup
