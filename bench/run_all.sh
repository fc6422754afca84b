#!/usr/bin/env bash
# The project's figures on this machine, each beside the machine's own limit, in one run. Arguments are ignored.
set -euo pipefail
bin=$(dirname "${BASH_SOURCE[0]}")/../build/release/bin
for transport in shm tcp; do
  for ranks in 2 3 4; do
    "$bin/rejoin_allreduce_perf" --transport $transport --ranks $ranks -b 4K -e 64M -f 16384 -n 10
    "$bin/rejoin_allreduce_perf" --transport $transport --ranks $ranks -b 64K -e 1M -f 16 -n 50 | tail -n 2
  done
done
for transport in shm tcp; do "$bin/rejoin_catchup_bw" --transport $transport; done
