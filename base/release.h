// The version of this build, as people name it: 0.1.0.
#pragma once

namespace rejoin {

const char* release();

}  // namespace rejoin
