// What only tests ask a reducer.
#pragma once

#include <mutex>

#include "device/reducer.h"

namespace rejoin::device {

struct ReducerPeer {
  // No kernel of this is on the device, or about to be. Waits for whoever launches one.
  static bool resting(Reducer& reducer) {
    const std::lock_guard launching(reducer.launching_);
    return *reducer.kernel_->idle();
  }
};

}  // namespace rejoin::device
