// What a rank reports to its daemon, while that does not read. Its socket takes some; the rest waits here. A report
// that is made again and again while things last waits once: the newest takes the place of the one before, so what
// waits is bounded by what there is to say (one accusation of a kind for each member), however long the daemon stands.
#pragma once

#include <list>
#include <map>
#include <tuple>

#include "base/fd.h"
#include "base/result.h"
#include "control.pb.h"

namespace rejoin {

class ReportQueue {
 public:
  void add(proto::FromNode report);
  // Sends as much as the socket takes. Errors: of the socket; that it takes no more now is none.
  Result<> send(const Fd& daemon);
  void clear();
  std::size_t size() const { return waiting_.size(); }  // for tests

 private:
  // What it is about: of two with the same key the newer one says all that the older one did.
  using Key = std::tuple<int, std::uint32_t, bool, bool>;
  static bool repeats(const proto::FromNode& report);
  static Key key_of(const proto::FromNode& report);

  std::list<proto::FromNode> waiting_;
  std::map<Key, std::list<proto::FromNode>::iterator> repeated_;  // of these
};

}  // namespace rejoin
