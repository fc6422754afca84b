// What kind of cluster a seed plays: each dimension from a hash of its own, so that over seeds all combinations come.
#pragma once

#include <map>
#include <string>

#include "base/clock.h"
#include "base/ring_links.h"

namespace rejoin::sim {

// How the ranks' gradients travel: all uncoded, or coded in one way; or each process has a way of its own.
enum class Codings : std::uint8_t { off, eight, four, automatic, mixed };
constexpr std::size_t kCodings = 5;

struct Shape {
  std::uint32_t replicas = 3, ranks = 2;
  std::uint32_t nodes = 1;     // a replica, which share its ranks
  Duration slowest{};          // message of the network
  Duration detection{};        // until the transport sees that a peer is gone
  bool viewable = false;       // trainers can look into each other's memory
  bool late_writes = false;    // bytes leave when posted, and land although their poster has failed
  bool lands_stopped = false;  // … and although the process that they are written to is stopped, as a NIC does
  unsigned rails = 1;
  bool direct = false;    // small buckets skip the ring
  bool doubling = false;  // … in rounds, however few members there are

  LinkRule links;  // with whom a member is connected: in half of the jobs, which are larger, not with all others

  bool slow_streams = false;  // the daemons' catch-up threads get little of the processor

  std::uint64_t checkpoint_steps = 0;  // from one checkpoint of a replica to the next; 0: it writes none
  bool evaluates = false;              // its trainers do other things between steps, for longer than the silence
  bool long_updates = false;           // some updates of its trainers last up to a second
  std::uint32_t coordinators = 1;      // more than one: they share a store
  std::uint32_t relays = 0;            // between most of the nodes and the coordinators
  bool constant_batch = false;         // contributors share the samples of all replicas
  bool upgrade = false;                // its processes are of two releases, and each start may be of either
  bool balance = false;                // … or less of them than others where they are slower: some are, for a while
  bool located = false;                // replicas are in four rooms, with slower links between, and say so
  bool measured = false;               // … they don't, and the links are so slow that it shows
  Codings codings{};
  bool clips = false;       // trainers tell how much of each step's gradient has counted
  bool stages = false;      // the ranks of a replica declare different things, as the stages of a pipeline do
  std::uint64_t steps = 0;  // the job ends with this one; 0: it does not
  bool old = false;         // the job has been through so many epochs and instances that their numbers are long

  bool coded() const { return codings != Codings::off; }
  float factor(std::uint64_t step) const;  // what they tell of this step; 1 where they tell nothing

  static Shape of(std::uint64_t seed);
  std::map<std::string, std::string> values() const;  // by dimension
};

// Buckets up to this size skip the ring.
std::uint64_t direct_bytes(const Shape& shape);

// Of how many pairs of values, one of each of two dimensions, there could be.
std::size_t pairs_of_values();

}  // namespace rejoin::sim
