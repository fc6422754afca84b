// What can go wrong, and when: drawn from a seed, or given.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/result.h"

namespace rejoin::sim {

enum class FaultKind : std::uint8_t {
  kill_trainer,       // SIGKILL at any event
  hang_trainer,       // SIGSTOP for a while: shorter or longer than what is patience's end
  slow_trainer,       // computes fifty times slower for a while
  kill_replica,       // all its ranks at once
  kill_all,           // every trainer
  kill_daemon,        // SIGKILL; its trainers live on
  power_loss,         // a node: daemon and trainers
  kill_coordinator,   // SIGKILL
  crash_in_append,    // … in mid-write: what it wrote last is torn at any byte
  disk_full,          // its log takes no more: it gives up
  partition,          // node and coordinator don't hear each other for a while
  one_way_partition,  // the node hears, and is not heard
  cut_ring,           // all data connections of a rank break
  cut_stream,         // all catch-up connections of a node break
  damage,             // one bit of a catch-up write is flipped on its way
  pause,              // all stand still with what is on its way between them, as one suspended machine: the clock jumps
  lose_rail,          // one rail of a rank and one of its node break, and come back
  slow_link,          // what a node or its ranks send, or what is sent to them, or both, takes long for a while
  damage_at_rest,     // one bit of what a joiner got flips in its memory, before it is brought up to date
  stop_daemon,        // SIGSTOP
  stop_coordinator,   // SIGSTOP
  stop_some,          // SIGSTOP of any set of processes, which go on in any order
  stop_all,           // … of all
  suspend_node,       // all of a machine, whose clock goes on, stands, or jumps
  slow_disk,          // the coordinator's next append takes this long: it stands
  hang_compute,       // a trainer stands while its library goes on; sometimes two at once
  reset_control,      // a node's connection to the coordinator is reset; what is on its way there is lost
  reset_ring,         // one data connection of a rank, between two that live on
  reset_stream,       // one catch-up connection of a node
  black_hole,         // what one replica sends to another does not arrive for a while, and neither learns of it
  refuse_memory,      // a rank's next registration of memory fails (when it starts), or its node's
  drift,              // from now on a contributor's optimizer computes something else
  flip_reduced,       // one bit of a reduced chunk flips on its way, in the next step
  flip_state,         // one bit of a contributor's state flips in its memory
  busy_trainer,  // a trainer says that it is busy, between steps or within one; some are for longer than they announced
  lose_log,      // the coordinator's log is gone, and all processes are started again, trainers from checkpoints
  slow_digest,   // the digests of a rank's next audit take this long, and its library goes on
  // Where there are several coordinators:
  store_away,         // their store answers nobody for a while
  store_cut_off,      // … one of them
  cut_off_from_some,  // one of them and some of the nodes don't hear each other for a while
  // And anywhere:
  slow_memory,     // a rank is killed, and the next one's memory takes this long to be registered: its thread stands
  kill_some,       // several replicas at once, so that several joiners come back
  lying_joiner,    // a node's daemon passes on to other joiners whatever is in the memory of its own, for a while
  forget,          // what lies between forgets the data connections of a rank, or of a node: neither side learns of it
  forget_control,  // … a node's connection to a coordinator, for a while or for ever; new ones pass
  second_process,  // another one comes up in a rank's place while the first lives, or is stopped and goes on later
  stop_introduction,  // SIGSTOP of a daemon or relay, between two messages of what it says of itself and its ranks
  other_job,          // at a coordinator's address there is another job's for a while
  older_log,  // the log is put back to an older copy, and members go on; later the operator does one thing or another
  // Where there are relays:
  kill_relay,  // SIGKILL of the one that a node is behind; it is started again after a while
  stop_relay,  // SIGSTOP
  // And where there are several coordinators (the last ones):
  store_read_only,  // their store answers reads, and takes nothing for a while: from nobody, or not from one of them
  store_set_back,   // … is put back to an older copy while the same one leads
  // Anywhere:
  stay_away,    // a replica's processes end, and are started again only after this time
  cut_off_all,  // no node hears the coordinators for so long, nor they one; sometimes they are started again meanwhile
  stop_stream,  // a daemon's catch-up thread alone stands still, as in a driver that does not return
  cut_replica,  // data of one replica, or two, and of all others does not arrive, one way or both; control does
};
constexpr std::size_t kFaultKinds = 57;
std::string_view to_string(FaultKind kind);
Result<FaultKind> parse_fault(std::string_view name);

// When a fault comes: at its time, or when this happens next after it.
enum class Moment : std::uint8_t { at_once, commit, epoch, update, catch_up_begun, caught_up, promoted, rank_up };
constexpr std::size_t kMoments = 8;
std::string_view to_string(Moment moment);

struct Fault {
  Duration at{};
  Moment moment{};
  FaultKind kind{};
  std::uint32_t replica = 0, rank = 0;
  Duration lasting{};
  std::uint64_t detail = 0;  // the seed of what else it draws
};
std::string to_string(const Fault& fault);

// At rates that the seed decides, from rare to hail, until `end`. `often`: this kind as often as all others together.
std::vector<Fault> draw_faults(std::uint64_t seed, std::uint32_t replicas, std::uint32_t ranks, Duration end,
                               std::optional<FaultKind> often = {});

// Bugs built into the simulated cluster on purpose, to see whether the checkers find them.
enum class Plant : std::uint8_t {
  none,
  commit_without_vote,        // a rank's reduction is reported before it is done
  apply_without_commit,       // an update is applied when the reduction is done here, whatever the coordinator decides
  apply_twice,                // one range of an update
  skip_an_update,             // … and one left out
  forget_a_decision,          // the log's last record was not on disk although it was acknowledged
  wrong_batch,                // a trainer trains other samples than it was given
  touch_the_input,            // gradients are changed while they are reduced
  damage_after_verification,  // a joiner's state changes after it was verified
  deaf_rank,                  // one rank of each replica stops hearing plans: one alone is put out, and held back
  early_verification,         // a joiner is called complete before it is
  stale_write,                // a write lands after its endpoint was closed
  log_too_much,               // the budget for kept gradients is ignored
  wrong_instance,             // that a joiner has caught up is believed of whoever is that rank when it is heard
  no_audit,                   // nobody compares replicas
  joiners_prove,              // a joiner takes others' digests for contributors', and they say anything
  // Where there are several coordinators:
  append_without_comparison,  // the store takes what a leader writes although another one has claimed
  send_before_durable,        // a leader takes a write for done when it is on its way
  answer_unconfirmed,         // … for confirmed, where nothing is to be written
  claim_without_majority,     // a standby takes over although the leader is heard
  replay_from_a_gap,          // … and reads the log from where it is, not from where it stopped
  append_behind_a_gap,        // the store takes an entry although it has lost the one before
};
constexpr std::size_t kPlants = 22;
std::string_view to_string(Plant plant);
Result<Plant> parse_plant(std::string_view name);

}  // namespace rejoin::sim
