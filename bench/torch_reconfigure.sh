#!/usr/bin/env bash
# How soon survivors of a kill all-reduce again, by Rejoin's backend of torch.distributed and by Gloo's (torch_reconfigure.py).
# It makes an environment of its own in build/reconfigure-venv: a torch that can reconfigure (5 GB; there is no build for
# CPUs alone of it here), and this build's package. --prepare does no more than that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools=build/reconfigure-venv
if ! "$tools/bin/python" -c 'import torch.distributed as dist; dist._reconfigure' 2>/dev/null; then
  python3 -m venv --clear "$tools"
  "$tools/bin/pip" install -qq --disable-pip-version-check --requirement python/requirements-test.txt torch==2.14.1
fi
python/install.sh "$tools" build/release
[[ ${1:-} != --prepare ]] || exit 0
OMP_NUM_THREADS=1 exec "$tools/bin/python" bench/torch_reconfigure.py "$@"
