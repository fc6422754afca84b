#!/usr/bin/env bash
# PyTorch jobs with a kill, beside what users would take instead: torch's DDP over Gloo (no faults), torchft, and ours.
# It makes an environment of its own in build/peers-venv: torch (a CPU build), torchft, and this build's package.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools=build/peers-venv
if [[ ! -x $tools/bin/torchft_lighthouse ]]; then
  python3 -m venv --clear "$tools"
  "$tools/bin/pip" install -qq --disable-pip-version-check --requirement python/requirements-test.txt "torch==2.13.0+cpu" torchft==0.2.0
fi
python/install.sh "$tools" build/release
exec "$tools/bin/python" bench/peers_torch.py "$@"
