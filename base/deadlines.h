// What is waited for how long, as parts or multiples of the job's silence (--silence-ms): the time for which a peer may
// be silent before it is taken for gone. docs/operations.md has the same as a table, and tests/readme_test.py compares.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/clock.h"

namespace rejoin::deadlines {

constexpr std::chrono::milliseconds kSilence = std::chrono::seconds(2);  // where nobody has said another one
constexpr std::chrono::milliseconds kLongestSilence = std::chrono::hours(1);

struct Deadline {
  std::int64_t times = 1, parts = 1;
  constexpr Duration of(Duration silence) const { return silence * times / parts; }
};

// In how many ticks a silence is counted, and how long one is: none is longer than half a second, since the others may
// have a shorter silence.
constexpr int ticks_of(Duration silence) {
  return std::max(16, static_cast<int>(silence / std::chrono::milliseconds(500)));
}
constexpr Duration tick_of(Duration silence) { return silence / ticks_of(silence) + std::chrono::milliseconds(1); }

// Who is silent, or has no time to say more than that it is there:
constexpr Deadline kHeartbeatOfTrainer{1, 8};    // a trainer's heartbeat to its daemon
constexpr Deadline kHeartbeatOfDaemon{1, 4};     // a daemon's or relay's heartbeat to the coordinator
constexpr Deadline kOthersComeBack{5, 1};        // who is silent while others still come back after the same loss
constexpr Deadline kStreamsWait{4, 1};           // CUDA streams that wait for a progress thread that stands still
constexpr Deadline kStartPatience{15, 1};        // replicas that have not come, at the start of a job that lost all
constexpr Deadline kSoonPutOut{30, 1};           // a replica that is put out was admitted so lately: soon again
constexpr Deadline kFirstReadmission{4, 1};      // from the second such time on, the pause until admission; it doubles
constexpr Deadline kLongestReadmission{150, 1};  // the longest pause before such a replica is admitted
// Several coordinators:
constexpr Deadline kTakeover{3, 20};   // the leading coordinator is not heard, or can't write: others may take over
constexpr Deadline kLeaderSign{1, 8};  // what a leading coordinator with nothing to write writes all the same
constexpr Deadline kStoreTry{1, 8};    // a try at one member of their etcd; where most members are late it doubles
constexpr Deadline kLongestStoreTry{4, 1};   // the longest try at one member of their etcd
constexpr Deadline kElsewhere{3, 8};         // nobody leads at any address: other addresses of a name are tried
constexpr Deadline kLongestElsewhere{4, 1};  // the longest pause until they are tried again
constexpr Deadline kAbandoned{2, 1};         // a leader of which the store shows nothing, and no node hears it
// Control connections:
constexpr Deadline kControlProof{4, 1};  // a caller's proof of the job key
constexpr Deadline kCallAgain{1, 8};     // a call to a coordinator that nobody answers: made once more beside it
constexpr Deadline kForgotten{1, 2};     // nothing is heard or acknowledged over one: a second one is made beside it
constexpr Deadline kUnheard{3, 4};       // likewise, where what is sent is acknowledged
constexpr Deadline kRepeated{1, 4};      // likewise, where what was lost is sent again and never acknowledged
// Data connections, those of the all-reduce and the stream alike:
constexpr Deadline kDataProof{5, 1};          // a caller's proof of the secret, and the listener's answer
constexpr Deadline kUnacknowledged{5, 1};     // bytes that a peer's kernel does not acknowledge, over TCP
constexpr Deadline kProbeOfIdle{1, 1};        // an idle data connection is asked whether it is there, over TCP
constexpr Deadline kUnanswered{1, 2};         // nothing acknowledged while a step waits: connected anew, over TCP
constexpr Deadline kAllAddresses{1, 2};       // the addresses of a name, until each of them is called
constexpr Deadline kRailStall{1, 2};          // a rail on which nothing moves while another one of its peer answers
constexpr Deadline kFirstRailRetry{1, 20};    // the first try to use a dead rail again; the pause doubles
constexpr Deadline kLongestRailRetry{5, 1};   // the longest pause between two tries to use a dead rail again
constexpr Deadline kUnreachableSource{5, 1};  // a source of a catch-up that can't be reached
constexpr Deadline kSignOfSource{1, 2};       // a source that owes something and sends nothing: it is asked for a sign
constexpr Deadline kStillFellow{1, 2};  // another joiner that owes slices and sends nothing; more over a slow link
constexpr Deadline kFellowRetry{8, 1};  // the longest pause until it is asked again; the pause doubles
constexpr Deadline kIdleStream{1, 8};   // a joiner to which nobody sends: it asks contributors for more

}  // namespace rejoin::deadlines
