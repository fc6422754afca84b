#include "bench/perf/run.h"

int main(int argc, char** argv) {
  return rejoin::bench::perf::run(rejoin::bench::perf::Test::REJOIN_PERF_TEST, argc, argv);
}
