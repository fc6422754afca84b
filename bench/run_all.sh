#!/usr/bin/env bash
# The project's figures on this machine, each beside the machine's own limit, in one run. Arguments are ignored.
set -euo pipefail
bin=$(dirname "${BASH_SOURCE[0]}")/../build/release/bin
for transport in shm tcp; do
  for ranks in 2 3 4; do
    "$bin/rejoin_allreduce_perf" --transport $transport --ranks $ranks -b 4K -e 1M -f 16 -n 1000 -w 100
    "$bin/rejoin_allreduce_perf" --transport $transport --ranks $ranks -b 64M -e 64M -n 20 | tail -n 1
  done
done
"$bin/rejoin_step_perf"
for transport in shm tcp; do "$bin/rejoin_recovery_perf" --transport $transport; done
for transport in shm tcp; do "$bin/rejoin_catchup_bw" --transport $transport; done
# A slow link: what zstd brings for values spread like a trained model's.
for compression in off auto; do
  "$bin/rejoin_catchup_bw" --transport tcp --limit 50 --weights -s 128M --compression $compression | tail -n 1
done
