// The store that several coordinators of one job share: it says who leads, and has the log of decisions. It is
// linearizable, and each request is one transaction in it.
//
// The store holds:
//   leader    a proto::Leader. The store's revision of the last time it was written is the fencing token: what a leader
//             writes is written only if `leader` has still the revision of its own claim.
//   log       the records of all decisions, numbered from 0 on. An entry holds those of one append, and is found at the
//             number of its first one.
//   snapshot  a LogRecord that stands for all records before a position. The log begins with the records behind the
//             snapshot before it, so that who follows the log misses none of them. What is before that is not of the
//             log: an append that is done late, after its sender has repeated it, may leave an entry there, which the
//             next snapshot deletes.
//   alive     written by a leader that has nothing to append: a sign of life, and a test of its fence.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"

namespace rejoin::membership {

struct StoreRequest {
  enum class Kind : std::uint8_t {
    read,     // the log from `position` on; or, where nothing follows there and the snapshot stands for more, that, and
              // the log from there on
    claim,    // if `leader` has the revision `token` (0: there is none): `value` is the new one
    append,   // if `leader` has the revision `token`, the log has what is to be `behind`, and no entry at `position`:
              // `value` is that entry
    renew,    // if `leader` has the revision `token`, and the log what is to be `behind`: `alive` is written
    compact,  // if `leader` has the revision `token`, and the snapshot there stands for fewer records: `value` is the
              // snapshot, of the records before `position`; those that the one there stands for are deleted
  };
  // What this leader has written or read last: that the log has it still. Without that, the store was set back to an
  // older copy under the leader, and an entry would leave a gap. (So no entry is ever behind a gap, not even one that
  // is written late.)
  struct Behind {
    std::optional<std::uint64_t> entry;   // there is one at this position
    std::uint64_t snapshot_revision = 0;  // or else, unless 0: the snapshot was written then
  };
  Kind kind{};
  std::uint64_t token = 0, position = 0;
  // For all but a read: the value that `leader` must have, too, since an etcd that is made anew counts its revisions
  // from 1 again.
  std::string leader;
  std::string value;   // serialized: claim: proto::Leader; append: proto::LogEntry; compact: proto::LogRecord
  bool recent = true;  // read: as of now; otherwise it may be as of some time ago, which spares the store work
  bool whole = false;  // compact: all of the log before `position` is deleted
  Behind behind{};     // append, renew
  // Compact, unless empty: an entry at `entry_at`, written with the snapshot, whatever the log lacks before it; it ends
  // where the snapshot does.
  std::string entry{};
  std::uint64_t entry_at = 0;
};

struct StoreAnswer {
  enum class Outcome : std::uint8_t {
    done,     // read: always, where an answer came
    refused,  // the condition did not hold, and nothing was written
    unknown,  // no answer came in time: it may have been done, may be done later, or never
  };
  Outcome outcome = Outcome::unknown;
  std::string error;  // unknown: why, for people
  // What `leader` is as of the transaction, after it where it is a claim that was done; unset where the outcome is
  // unknown.
  std::uint64_t leader_revision = 0;
  std::string leader;  // a serialized proto::Leader; empty: there is none
  // A read sets these. The entries follow on one another, from `position` on, or from the snapshot's where it is given.
  std::uint64_t alive_revision = 0;
  std::uint64_t snapshot_position = 0;                         // the records that the newest snapshot stands for
  std::uint64_t snapshot_revision = 0;                         // of the last time it was written; 0: there is none
  std::string snapshot;                                        // empty: the log has what follows on `position`
  std::vector<std::pair<std::uint64_t, std::string>> entries;  // position, a serialized proto::LogEntry
  bool more = false;                                           // there are entries behind these
  // What the log has at the position of an append that was refused; empty: nothing.
  std::string existing;
};

// A store as its shell sees it. Thread: one.
class Store {
 public:
  virtual ~Store() = default;
  // Starts one request, of which there is one at a time. The store calls `done` once, later, on the same thread; never
  // where it was destroyed before.
  virtual void submit(const StoreRequest& request, std::function<void(StoreAnswer)> done) = 0;
  // Of the request under way, where it is not answered although its time is over: why, for people, and since when.
  struct Overdue {
    std::string why;
    TimePoint since{};
  };
  virtual std::optional<Overdue> overdue() const { return std::nullopt; }
};

}  // namespace rejoin::membership
