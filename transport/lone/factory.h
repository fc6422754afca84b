// A lone rail: an engine of a backend that can be striped, where it is not. It passes everything on, but says what is
// wrong where a peer has several rails, to which it would be another transport.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace rejoin::transport::lone {

std::unique_ptr<Engine> make_engine(std::unique_ptr<Engine> below);

}  // namespace rejoin::transport::lone
