// The joiner fetches one local rank's state from all healthy sources at once, watches the trainer keep it current, and
// verifies it. It runs in the daemon's stream thread; the trainer's part, which keeps and applies gradients, is in
// gradient_log.h.
//
// The messages between a joiner and each of its sources, in order (stream.proto):
//   1. The joiner connects with a Hello, which names the rank, the incarnation and the manifest that it wants.
//   2. The joiner sends Fetch with slices, the least version that will do, and where in its memory they go.
//   3. The source writes the slices' parts, each column with a WriteTag, and sends Sent with their version and digests.
//   4. The joiner compares the digests, and fetches a slice that differs again. The trainer brings a slice that
//      is behind its state up to date, from its gradient log.
//   5. The joiner sends Verify with a version and current slices to every source that has not been compared with them.
//   6. The source answers with VerifyReply: its digests at that version, or that its state is past it.
// When every slice has been verified by every source, the joiner is done.
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
#include "local/view.h"
#include "stream.pb.h"
#include "transport/transport.h"

namespace rejoin::catchup {

struct CatchUpProgress {
  std::uint64_t bytes = 0, total_bytes = 0;  // how much of the state is in place, and how large the state is
  std::uint64_t wire_bytes = 0;              // how many bytes `bytes` took on the wire, after coding
  std::uint32_t slices = 0, total_slices = 0, verified = 0;
  std::uint32_t refetched = 0;
  std::uint32_t sources = 0, sources_used = 0;
  double bytes_per_second = 0;
  double seconds = 0;
  bool done = false;
};

// Several sources have different bytes at one version. One of them is wrong, and the joiner trusts none of them with
// this slice before it is known which.
struct Drift {
  std::string tensor;
  std::uint64_t first = 0, count = 0;  // elements
  std::uint64_t version = 0;
  std::vector<std::pair<ReplicaId, std::uint64_t>> digests;  // of sources
  std::uint64_t offset = 0, total = 0;                       // bytes: of a column before it, of the whole column
};

// A slice is verified when all sources have the same bytes as this replica, each at some version that both have held.
class Joiner {
 public:
  // `state`: the view's memory ranges, registered. `committed`: the last step when it was admitted, or since then: this
  // replica has the gradients of later steps only. `silence`: the job's.
  Joiner(transport::Engine& engine, local::View& view, std::vector<transport::RegionId> state, Step committed,
         Duration silence, TimePoint now);
  ~Joiner();

  // The caller names the sources that have the state, once at first and again whenever they change. The joiner does not
  // wait for a source that can't be reached for long.
  void expect(const std::map<ReplicaId, Incarnation>& sources, TimePoint now);
  void on_source_up(ReplicaId source, transport::EndpointId endpoint);
  void on_source_down(ReplicaId source);  // the caller has closed the endpoint before, so that the source is fenced
  // Errors: `corrupt` where the message makes no sense; the caller then closes the source's connection.
  Result<> on_message(ReplicaId source, const proto::Stream& message);
  // A write of the source has landed; the joiner takes its digest now, while its bytes are in the cache.
  void on_written(ReplicaId source, std::uint64_t tag);
  // Does what is due. While `busy`, writes are coming in, and verification waits for a quieter moment, since it costs
  // as much memory traffic as the stream.
  void work(TimePoint now, bool busy);

  bool done() const { return done_; }
  std::vector<Drift> take_drifts() { return std::exchange(drifts_, {}); }
  CatchUpProgress progress(TimePoint now) const;

 private:
  struct Asked {
    std::vector<std::size_t> which;  // of the question's slices
    bool over = false;               // answered, or never will be
    std::vector<std::uint64_t> theirs;
  };
  struct Question {
    std::uint64_t number = 0, version = 0;
    std::vector<std::uint32_t> slices;
    std::vector<local::View::Pinned> pinned;
    std::vector<std::optional<std::uint64_t>> ours;  // by part
    std::map<ReplicaId, Asked> asked;
  };
  struct Expected {
    Incarnation incarnation;
    // Not connected, or not for long and nothing has come: it may refuse whenever it is asked.
    std::optional<TimePoint> missing_since;
    TimePoint connected_at{};
    std::vector<bool> agrees;    // by slice
    std::uint64_t at_least = 0;  // version of its state, as far as it has told
  };
  struct Suspect {  // differed from a source while another one's digest is older, or not known
    int times = 0;
    TimePoint again_at{};
  };

  // A slice that a source says is in place.
  struct Arrival {
    ReplicaId source;
    proto::Sent sent;
    std::uint64_t wire_bytes = 0;
    bool intact = true;  // nothing has shown yet that its bytes are not what was sent
    Generation generation(std::uint32_t part) const { return {source, sent.generations(static_cast<int>(part))}; }
  };

  Result<> on_sent(ReplicaId source, const proto::Sent& sent);
  void take_in_arrivals();
  bool decode(Arrival& arrival);
  void settle(const Arrival& arrival);
  Result<> on_verify_reply(ReplicaId source, const proto::VerifyReply& reply);
  void ask_for_slices();
  // Those that are connected, and those that should be at once.
  std::size_t sources_soon() const {
    return sources_.size() +
           static_cast<std::size_t>(std::count_if(expected_.begin(), expected_.end(), [&](const auto& one) {
             const auto& [source, known] = one;
             return !sources_.contains(source) && known.missing_since && now_ - *known.missing_since < silence_ / 4;
           }));
  }
  void request_verification();
  bool settle(Question& question);
  void settle_slice(std::uint32_t slice, std::uint64_t version, std::uint64_t ours,
                    const std::map<ReplicaId, std::uint64_t>& theirs);
  void report_drift(std::uint32_t slice, std::uint64_t version, const std::map<ReplicaId, std::uint64_t>& theirs);
  void agree(ReplicaId source, std::uint32_t slice);
  bool asks(const Expected& source, std::uint32_t slice) const;
  std::optional<std::uint64_t> comparable_at(std::uint32_t slice, const local::Clock& clock) const;
  bool waited_for(const Expected& source) const;
  void heard(Expected& source);
  void recheck_verified();
  bool all_agree(std::uint32_t slice) const;
  void set_verified(std::uint32_t slice, bool verified);
  void drop(Question& question);
  void fetch_again(std::uint32_t slice);
  bool send(transport::EndpointId endpoint, const proto::Stream& message);

  transport::Engine& engine_;
  local::View& view_;
  const std::vector<transport::RegionId> state_;
  Planner planner_;
  const std::uint64_t oldest_;   // version that will do
  const local::Clock at_first_;  // when this was made
  // It came with a version later than any that is committed, of a checkpoint from before the job was rolled back: its
  // clock says nothing until it has changed. (Where that version is that of its first update, slices that were asked
  // for with too low a version have a gap, and are fetched again.)
  bool foreign_;
  const Duration silence_;
  std::map<ReplicaId, transport::EndpointId> sources_;
  std::map<ReplicaId, Expected> expected_;
  Landed landed_;
  Arrived arrived_;                // until they are verified
  std::vector<Arrival> arrivals_;  // that have not been looked at
  std::vector<bool> verified_;
  std::uint32_t verified_count_ = 0;
  std::set<std::uint32_t> unverified_;  // arrived
  std::uint32_t asked_up_to_ = 0;       // of them
  std::map<std::uint32_t, Suspect> suspects_;
  std::vector<Drift> drifts_;
  TimePoint now_{};
  std::vector<Question> questions_;
  std::uint64_t next_question_ = 1;
  std::uint64_t bytes_ = 0, wire_bytes_ = 0;
  Coder coder_;
  std::map<ReplicaId, std::uint64_t> from_;
  local::Clock seen_;
  const TimePoint started_;
  TimePoint finished_{};
  bool done_ = false;
};

}  // namespace rejoin::catchup
