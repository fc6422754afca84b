#include "base/release.h"

namespace rejoin {

const char* release() { return REJOIN_VERSION; }

}  // namespace rejoin
