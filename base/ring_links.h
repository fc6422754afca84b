// With whom a member of a ring is connected: in a small ring with all others; in a larger one with those that it needs,
// and with spares, so that any of its survivors close the ring without a new connection.
//
// Members stand in an order that all agree on, the contributors first. Two of them need each other where they are
// neighbours, in the ring of all or in that of the contributors, or where their positions differ in one bit: whoever
// exchanges sums or hands results on in rounds (ftar/schedule.h). When members are lost, those behind them move up. So
// two are linked where the loss of up to `spares` members can make them need each other: the one of the lower position
// moves by s, the other by t, 0 ≤ s ≤ t ≤ spares. That is the same seen from both, and at most 2(spares + 1) links for
// each bit of a position, 2(spares + 1) for neighbours, and as many spares again where the ring closes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace rejoin {

struct LinkRule {
  // Up to so many members, and `spares` more, are all connected with each other; nothing: however many there are.
  std::optional<std::uint32_t> full_mesh_members;
  std::uint32_t spares = 2;

  bool operator==(const LinkRule&) const = default;
  bool all(std::size_t members) const {
    return !full_mesh_members || members <= std::size_t{*full_mesh_members} + spares;
  }
};

// Whether the members at these two positions are to be connected.
bool linked(const LinkRule& rule, std::uint32_t one, std::uint32_t other, std::uint32_t contributors,
            std::uint32_t members);

// The positions of those with whom this one is to be connected, ascending.
std::vector<std::uint32_t> links_of(const LinkRule& rule, std::uint32_t position, std::uint32_t contributors,
                                    std::uint32_t members);

}  // namespace rejoin
