#!/usr/bin/env bash
# A trainer's CUDA code includes the installed headers.
set -euo pipefail
build=$1 nvcc=$2 source=$(dirname "${BASH_SOURCE[0]}")
[[ -n $nvcc ]] || { echo "SKIPPED: no nvcc of CUDA 12 or later was found when the build was configured; -DREJOIN_NVCC= names one"; exit 77; }
scratch=$(mktemp -d /tmp/rejoin-nvcc-XXXXXX)
trap 'rm -rf "$scratch"' EXIT
cmake --install "$build" --component development --prefix "$scratch/tree" >/dev/null
root=$(echo "$scratch"/tree/include/rejoin-*)
"$nvcc" -std=c++20 -I"$root" -c -o "$scratch/optimizer.o" "$source/optimizer.cu"
echo "$("$nvcc" --version | grep -o 'release [0-9.]*') compiles the installed headers"
