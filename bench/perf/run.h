// A tool in perftest's manner, from its command line to its exit status.
#pragma once

#include "bench/perf/options.h"

namespace rejoin::bench::perf {

int run(Test test, int argc, char** argv);

}  // namespace rejoin::bench::perf
