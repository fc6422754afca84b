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
// When every slice has been verified by every source, the joiner is done. What a source owes may wait for its trainer,
// so the joiner asks for a Sign now and then, in a Fetch, which is also the first message of the connection. A source
// that owes something and sends nothing for five silences, or longer over a slow link, stands still: it is given up, as
// below, and neither asked for anything nor compared with until it is heard again. Who sends something else first is of
// an older release, and may be silent. Who was given up is asked for digests, too, which older releases answer, and has
// twice as long from when it is heard.
//
// Several joiners pass on to each other what they have proven: what has been equal to a contributor's bytes. Such a
// fellow is a source of bytes, never of proof: what it has sent is compared with contributors' digests like everything.
//   1. The joiner connects with the same Hello, and sends Follow.
//   2. The fellow sends Offers, with the slices that it has proven, and again when there are more.
//   3. Fetch and Sent follow as with a contributor. A fellow of which nothing comes for half a silence, or longer over
//      a slow link, is given up, and so is one that has sent anything wrong: the caller closes its connection, the
//      fence, and others are asked for its slices.
//
// joiner.cc: what comes from whom. joiner_requests.cc: who is asked for what. joiner_proofs.cc: whether what comes is
// right. joiner_fellows.cc: other joiners, and who stands still.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "base/clock.h"
#include "base/round_trip.h"
#include "base/seldom.h"
#include "catchup/coder.h"
#include "catchup/landed.h"
#include "catchup/planner.h"
#include "catchup/proofs.h"
#include "local/view.h"
#include "stream.pb.h"
#include "transport/transport.h"

namespace rejoin::catchup {

struct CatchUpProgress {
  std::uint64_t bytes = 0, total_bytes = 0;  // in place, and of the whole state
  std::uint64_t wire_bytes = 0;              // what `bytes` took on the wire, after coding
  std::uint32_t slices = 0, total_slices = 0, verified = 0;
  std::uint32_t refetched = 0;
  std::uint32_t sources = 0, sources_used = 0;
  std::uint32_t fellows = 0;       // other joiners that are connected
  std::uint64_t from_joiners = 0;  // those of `bytes` that other joiners sent
  std::uint64_t passed_on = 0;     // bytes that this joiner sent to others
  double bytes_per_second = 0;
  double seconds = 0;
  bool done = false;
  std::string unreached;  // why none of the sources has been reached for long, in words
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

// A source or a fellow that the joiner does not ask any more.
struct GivenUp {
  ReplicaId source;
  std::string why;
  bool wrong = false;  // it has sent something wrong; otherwise it stands still, and may be asked again later
};

// A slice is verified when all sources have the same bytes as this replica, each at some version that both have held.
class Joiner {
 public:
  // `state` has the view's memory ranges, registered. `committed` is a step committed when the replica was admitted or
  // later: the replica has the gradients of later steps only. `silence` is the job's. The joiner says in `proofs` which
  // slices may be passed on.
  Joiner(transport::Engine& engine, local::View& view, std::vector<transport::RegionId> state, Proofs& proofs,
         Step committed, Duration silence, TimePoint now);
  ~Joiner();

  // The caller names the sources that have the state, once at first and again whenever they change. The joiner does not
  // wait for a source that can't be reached for long.
  void expect(const std::map<ReplicaId, Incarnation>& sources, TimePoint now);
  // The caller says how far away each source is (base/location.h); who is not named is at 0. The joiner asks near
  // sources first, and of those at one distance the ones whose connections have short round trips (base/round_trip.h).
  void set_distances(std::map<ReplicaId, std::size_t> distances);
  // This joiner is number `own` of the `of` joiners that serve each other, as all of them know it.
  void set_turn(std::uint32_t own, std::uint32_t of) { planner_.set_turn(own, of); }
  void on_source_up(ReplicaId source, transport::EndpointId endpoint);
  void on_fellow_up(ReplicaId fellow, transport::EndpointId endpoint);
  // A source or a fellow is gone. The caller has closed the endpoint before, so that it is fenced.
  void on_source_down(ReplicaId source);
  // Errors: `corrupt` where the message makes no sense; the caller then closes the source's connection.
  Result<> on_message(ReplicaId source, const proto::Stream& message);
  // A write of the source has landed. Where the event does not bring its digest the joiner takes that now, while the
  // bytes are in the cache.
  void on_written(ReplicaId source, const transport::Event& event);
  // Does what is due. While `busy`, writes are coming in, and verification waits for a quieter moment, since it costs
  // as much memory traffic as the stream.
  void work(TimePoint now, bool busy);

  bool done() const { return done_; }
  // The caller closes the connections of these.
  std::vector<GivenUp> take_given_up() { return std::exchange(given_up_, {}); }
  std::vector<Drift> take_drifts() { return std::exchange(drifts_, {}); }
  // Since when no source has been there that has sent anything. Nothing where one is, or it has not lasted yet.
  std::optional<TimePoint> unreached_since(TimePoint now) const;
  CatchUpProgress progress(TimePoint now) const;

 private:
  // What one source was asked by a Verify.
  struct Asked {
    std::vector<std::size_t> which;     // indices into the question's slices
    bool over = false;                  // it has answered, or never will
    std::vector<std::uint64_t> theirs;  // its digests, in the order of `which`
  };
  // Slices whose digests at one version are compared with those of several sources.
  struct Question {
    std::uint64_t number = 0, version = 0;
    std::vector<std::uint32_t> slices;
    std::vector<local::View::Pinned> pinned;
    std::vector<std::optional<std::uint64_t>> ours;  // our digests, by part
    std::map<ReplicaId, Asked> asked;
  };
  // A source that the caller has named.
  struct Expected {
    Incarnation incarnation;
    // Since when it is not connected, or is but has sent nothing yet and may still refuse.
    std::optional<TimePoint> missing_since;
    TimePoint connected_at{};
    std::vector<bool> agrees;    // by slice: its bytes are the same as ours
    bool stood_still = false;    // it was given up for that, and nothing has been heard of it since
    bool advised = false;        // … what to do about it
    int doubled = 1;             // it is waited for so many times as long: twice for each time that it lived after all
    std::uint64_t at_least = 0;  // the version of its state, by its last message
  };
  // A slice that differed from one source while the digest of another one is older or not known.
  struct Suspect {
    int times = 0;
    TimePoint again_at{};
  };

  struct Source {
    transport::EndpointId endpoint;
    TimePoint moved_at{};                     // when it sent something last, or owed nothing
    std::optional<TimePoint> asked_at;        // for a Sign, which has not come yet
    bool gives_signs = false, older = false;  // older: of a release that gives none
  };
  struct Fellow {
    transport::EndpointId endpoint;
    TimePoint moved_at{};  // when it sent something last, or was asked while nothing was outstanding
  };
  // A slice that a source says is in place.
  struct Arrival {
    ReplicaId source;
    proto::Sent sent;
    std::uint64_t wire_bytes = 0;
    bool intact = true;  // false once its bytes have been found not to be what was sent
    Generation generation(std::uint32_t part) const { return {source, sent.generations(static_cast<int>(part))}; }
  };

  static constexpr int kMostDoubled = 64;
  static constexpr int kUsual = 4;  // a wait is long when it is so many times the usual one
  static constexpr Duration kDisputed = std::chrono::seconds(1);  // until sources that differed are asked again

  Result<> on_sent(ReplicaId source, const proto::Sent& sent);
  void take_in_arrivals();
  bool decode(Arrival& arrival);
  void settle(const Arrival& arrival);
  Result<> on_verify_reply(ReplicaId source, const proto::VerifyReply& reply);
  Result<> on_offers(ReplicaId fellow, const proto::Offers& offers);
  void heard_of(ReplicaId source);
  void make_up_for_pause(TimePoint now);
  void mind_fellows(TimePoint now);
  void mind_sources(TimePoint now);
  void ask_for_sign(Source& source);
  void ask_for_any_answer(const Source& source);
  void advise(ReplicaId source, Expected& known, Duration usually);
  bool owes(ReplicaId source) const;
  bool stands_still(ReplicaId source) const;
  Duration patience_at_first(Duration shortest) const;
  Duration patience(Duration shortest) const;
  Duration usual() const;  // between two slices that came
  void give_up(ReplicaId source, std::string why, bool wrong);
  void sent_wrong(std::uint32_t slice, std::optional<ReplicaId> source);
  void ask_for_slices();
  std::vector<std::size_t> sources_soon() const;
  std::size_t distance_to(ReplicaId source) const;
  void rank_sources();
  void choose_reach(const std::vector<std::size_t>& distances);
  bool ask(ReplicaId source, transport::EndpointId endpoint, std::size_t near, bool idle);
  void request_verification(const std::set<std::uint32_t>& among, std::uint32_t& up_to);
  bool settle(Question& question);
  void settle_slice(std::uint32_t slice, std::uint64_t version, std::uint64_t ours,
                    const std::map<ReplicaId, std::uint64_t>& theirs);
  void report_drift(std::uint32_t slice, std::uint64_t version, const std::map<ReplicaId, std::uint64_t>& theirs);
  void agree(ReplicaId source, std::uint32_t slice);
  void prove(std::uint32_t slice);
  void doubt(std::uint32_t slice);
  bool asks(const Expected& source, std::uint32_t slice) const;
  std::uint64_t reached(const local::Clock& clock) const;
  std::uint64_t newest(const local::Clock& clock) const;
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
  Proofs& proofs_;
  Planner planner_;
  const std::uint64_t oldest_;   // the least version that will do
  const local::Clock at_first_;  // the page's clock when the joiner was made
  // The state came with a version later than any that is committed, of a checkpoint from before the job was rolled
  // back, so its clock says nothing until it has changed. (Where that version is that of the first update, slices that
  // were asked for with too low a version have a gap, and are fetched again.)
  bool foreign_;
  const Duration silence_;
  std::map<ReplicaId, Source> sources_;
  std::map<ReplicaId, Expected> expected_;
  std::map<ReplicaId, std::size_t> distances_;             // as set_distances() has them
  std::map<ReplicaId, RoundTripLength> round_trips_;       // of connected sources, where they have been measured
  std::optional<std::map<ReplicaId, std::size_t>> ranks_;  // sources in order of both; nothing: to be found anew
  // Sources up to this distance are asked. What comes from them shows whether they are enough.
  struct Reach {
    std::size_t distance = 0, nearest = 0;
    std::uint32_t arrived = 0;  // how many slices had arrived when the reach was chosen
    TimePoint at{};             // when that was
  };
  std::optional<Reach> reach_;
  std::map<ReplicaId, Fellow> fellows_;
  std::map<std::uint32_t, ReplicaId> came_from_;  // slices that fellows sent and that are not proven yet
  std::vector<GivenUp> given_up_;
  TimePoint came_at_{};  // when anything was sent last
  Landed landed_;
  Arrived arrived_;                // slices, until they are verified
  std::vector<Arrival> arrivals_;  // those that have not been looked at
  std::vector<bool> verified_;
  std::uint32_t verified_count_ = 0;
  std::set<std::uint32_t> unverified_;  // slices that have arrived
  std::set<std::uint32_t> unproven_;    // those of them that are not known to equal any contributor's bytes
  std::uint32_t asked_up_to_ = 0, proving_up_to_ = 0;  // up to which slice of these two sets sources were asked
  std::map<std::uint32_t, Suspect> suspects_;
  std::vector<Drift> drifts_;
  Seldom drifts_told_{kDisputed}, damaged_told_{kSameLineAgain}, differs_told_{kSameLineAgain};
  TimePoint now_{};
  std::vector<Question> questions_;
  std::uint64_t next_question_ = 1;
  std::uint64_t bytes_ = 0, wire_bytes_ = 0, from_joiners_ = 0;
  Coder coder_;
  std::map<ReplicaId, std::uint64_t> from_;
  local::Clock seen_;
  // An update that may have been given slices which are void now: it writes to them, so nothing is asked for before it
  // is over.
  std::optional<local::Clock> update_of_void_;
  const TimePoint started_;
  TimePoint finished_{};
  bool done_ = false;
};

}  // namespace rejoin::catchup
