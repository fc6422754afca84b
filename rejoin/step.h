// What a trainer is told of a step, made of what the driver knows.
#pragma once

#include "rejoin/driver.h"
#include "rejoin/session.h"

namespace rejoin {

// Errors: `refused`, for a trainer that is not `weighted` where its gradients would have to be.
Result<std::optional<Session::Step>> step_of(StepView view, bool weighted);

}  // namespace rejoin
