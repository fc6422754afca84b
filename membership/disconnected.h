// Which members have no connection with each other, as their accusations say in this epoch. That a connection is
// missing is true of both its ends, whoever says it and whoever is heard first. Pure.
#pragma once

#include <map>
#include <set>
#include <string>
#include <tuple>

#include "membership/coordinator_state.h"
#include "membership/members.h"

namespace rejoin::membership {

class Disconnected {
 public:
  // `patience`: for how long what was said of a wait that is not too long yet is taken for so, and how long one that is
  // has to stand.
  Disconnected(const std::map<Edge, Accusation>& accusations, const Members& members, TimePoint now, Duration patience);

  // Whether they alone do. Not where somebody waits who can't say for what: of one whom many lack, most of whom can't
  // say so, it would only be known that it is one of two.
  bool decides() const { return !all_.empty() && !untold_; }
  bool stands() const { return stands_; }  // one of them does
  const std::map<ReplicaId, std::set<ReplicaId>>& all() const { return all_; }

  int lacks(ReplicaId member) const;  // so many others it has no connection with
  // The same; how many of these have none with it alone; and how many it had none with in this step who are out since.
  // `mended`: pairs that have tried to connect again.
  std::tuple<int, int, int> weight(ReplicaId member, const std::map<Edge, int>& mended) const;
  // In the words of who has found it out, whichever end that is.
  std::string why(ReplicaId member) const;

 private:
  const std::map<Edge, Accusation>& accusations_;
  const Members& members_;
  std::map<ReplicaId, std::set<ReplicaId>> all_;
  bool stands_ = false, untold_ = false;
};

// These ranks have all connections now, since they say otherwise of each that they lack, and nothing else: they wait
// for something else, or have reduced the step. What they said before of connections counts no more.
void on_connected(std::map<Edge, Accusation>& accusations, ReplicaId replica, const RankSet& ranks);

// How much an accusation tells of what is wrong.
inline int explains(bool lost, bool found, bool unconnected) { return lost ? 2 + int{found} : int{unconnected}; }

}  // namespace rejoin::membership
