#!/usr/bin/env bash
# frameworks_test.sh PACKAGES TOOLS [ARGS]: the Python package under transformers, accelerate and Lightning, which TOOLS, an
# environment, has; PACKAGES: where the package itself is, with torch and pytest. ARGS are pytest's. By ./run frameworks.
set -euo pipefail
packages=$1 tools=$2
cd "$(dirname "${BASH_SOURCE[0]}")/../python"
scratch=$(mktemp -d /tmp/rejoin-frameworks-XXXXXX)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH=$packages REJOIN_STATUS=127.0.0.1:0 REJOIN_FLIGHT_DIR=$scratch/flight OMP_NUM_THREADS=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$tools/bin/python" -m pytest -q -p no:cacheprovider -rsfE --durations 10 --basetemp "$scratch/tests" tests/test_frameworks.py "${@:3}"
