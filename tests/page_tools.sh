#!/usr/bin/env bash
# A test of what is seen of a job, in the environment that ./run page-test makes, or in the system's where there is none.
set -euo pipefail
test=$1 binaries=$2 source=$3
python=$source/build/page-venv/bin/python
[[ -x $python ]] || python=python3
export REJOIN_FLIGHT_DIR=${binaries%/bin}/flight
if [[ $test == metrics_test.py ]]; then
  exec "$python" "$source/tests/$test" "$binaries" "$source"
fi
exec "$python" "$source/tests/$test" "$binaries"
