#include "rejoin/card.h"

#include <algorithm>

#include "base/fail.h"
#include "membership/rank.h"
#include "transport/advertise.h"

namespace rejoin {

namespace {

// Where its last word begins.
std::size_t address_in(const std::string& text) { return text.rfind(' ') + 1; }  // 0: it is all of it

}  // namespace

// A daemon puts an address in place of the one of `listening`; others would be told something else than the card.
Result<> check_card(const std::string& card, const std::string& listening) {
  const auto longest = std::max(card.size(), listening.size());
  if (longest > membership::kMostCardBytes)
    return fail(ErrorCode::invalid_argument, "a card of {} bytes, over {}", longest, membership::kMostCardBytes);
  if (listening.empty()) return {};
  const auto at = address_in(listening);
  if (!transport::listens_everywhere({listening.substr(at)}))
    return fail(ErrorCode::invalid_argument,
                "set_card(): the last word of '{}' is no address that is listened on for all (0.0.0.0:PORT or "
                "[::]:PORT): give the card alone",
                printable(listening, listening.size()));
  if (card.substr(0, address_in(card)) != listening.substr(0, at))
    return fail(ErrorCode::invalid_argument,
                "set_card(): '{}' and '{}' differ in more than the last word, which is the address",
                printable(card, card.size()), printable(listening, listening.size()));
  return {};
}

}  // namespace rejoin
