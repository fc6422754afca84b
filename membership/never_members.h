// The incarnations that were given out and have not been members, as the log tells of them: a process that comes back
// with one of these keeps it, since nothing has gone on without it. In each place the next one takes over, so that
// processes that end before they are members, again and again, leave no more than one behind: whoever still has an
// earlier one has lost its place, and starts again. Numbers are never used again, whatever is forgotten here.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>

#include "control.pb.h"

namespace rejoin::membership {

class NeverMembers {
 public:
  void take(const proto::LogRecord::Incarnated& given_out);
  void erase(std::uint64_t incarnation);
  void erase_up_to(std::uint64_t incarnation);
  // Whether it is one of them, and a rank of this replica may have been given it: where the log does not say to whom,
  // any.
  bool may_be_of(std::uint64_t incarnation, std::uint32_t replica, std::uint32_t rank) const;
  std::size_t size() const { return all_.size(); }
  void to(proto::LogRecord::Snapshot& snapshot) const;
  static NeverMembers from(const proto::LogRecord::Snapshot& snapshot);
  bool operator==(const NeverMembers&) const = default;

 private:
  // A replica, all of whose ranks have it, or one rank, where the job was finished when it came.
  struct Place {
    std::uint32_t replica = 0;
    std::optional<std::uint32_t> rank;
    auto operator<=>(const Place&) const = default;
  };
  void add(std::uint64_t incarnation, std::optional<Place> place);

  std::map<std::uint64_t, std::optional<Place>> all_;  // nothing: older releases have not written it down
  std::map<Place, std::uint64_t> last_;                // of these; a replica's is before those of its ranks
};

}  // namespace rejoin::membership
