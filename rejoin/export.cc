// librejoin.so is made of the modules' objects; this names its version.
#include "rejoin/c.h"

extern "C" const char* rejoin_version(void) { return REJOIN_VERSION; }
