#!/usr/bin/env bash
# The Python package: built over this build's library, its form and types checked, its tests run. What it needs besides is
# in build/python-venv, where ./run puts it.
set -euo pipefail
build=$1 source=$2 tools=$2/build/python-venv
if [[ ! -x $tools/bin/pytest ]]; then
  echo "SKIPPED: the Python package: $tools is not there; ./run test makes it, where PyPI can be reached"
  exit 77
fi
export REJOIN_STATUS=127.0.0.1:0  # of daemons: the system picks the port
cd "$source/python"
./install.sh "$tools" "$build"
"$tools/bin/ruff" check --no-cache .
"$tools/bin/ruff" format --no-cache --check .
if ! "$tools/bin/python" -c 'import torch' 2>/dev/null; then
  echo "SKIPPED: the Python package's tests: there is no torch in $tools"
  exit 77
fi
"$tools/bin/mypy" --cache-dir "$build/mypy"
scratch=$(mktemp -d /tmp/rejoin-python-XXXXXX)
trap 'rm -rf "$scratch"' EXIT
# The trainer of rejoin_step_perf --python is a script for this package.
"$build/bin/rejoin_step_perf" --python "$tools/bin/python" -s 4K --replicas 2 -n 20 -w 5 >"$scratch/steps" || { cat "$scratch/steps"; exit 1; }
REJOIN_FLIGHT_DIR="$scratch/flight" REJOIN_FAKE_CUDA_FOLDER="$build/fake_cuda" OMP_NUM_THREADS=1 "$tools/bin/python" -m pytest -q -p no:cacheprovider -rsfE --durations 5 \
  --numprocesses 2 --dist worksteal --basetemp "$scratch/tests" "${@:3}"
