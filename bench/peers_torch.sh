#!/usr/bin/env bash
# PyTorch jobs with a kill, beside what users would take instead: torch's DDP over Gloo (no faults), torchft, and ours.
# It makes an environment of its own in build/peers-venv: torch (a CPU build), torchft, and this build's package.
# With "reconfigure" first: DDP, Gloo with torch's enable_reconfigure and ours, in the environment of torch_reconfigure.sh, whose
# torch can do that; torchft 0.2.0 did not get through in 300 s there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${1:-} == reconfigure ]]; then
  shift
  bench/torch_reconfigure.sh --prepare
  exec build/reconfigure-venv/bin/python bench/peers_torch.py --only ddp,gloo,rejoin "$@"
fi
tools=build/peers-venv
if [[ ! -x $tools/bin/torchft_lighthouse ]]; then
  python3 -m venv --clear "$tools"
  "$tools/bin/pip" install -qq --disable-pip-version-check --requirement python/requirements-test.txt "torch==2.13.0+cpu" torchft==0.2.0
fi
python/install.sh "$tools" build/release
exec "$tools/bin/python" bench/peers_torch.py "$@"
