// What a trainer tells others of itself: Session::set_card().
#pragma once

#include <string>

#include "base/result.h"

namespace rejoin {

// Errors: `invalid_argument`.
Result<> check_card(const std::string& card, const std::string& listening);

}  // namespace rejoin
