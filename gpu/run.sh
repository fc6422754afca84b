#!/usr/bin/env bash
# ./run gpu test|bench: what needs a GPU, on the machine's first one, with NVIDIA's driver. Needs no toolkit.
set -euo pipefail
bin=build/release/bin
library=libcuda.so.1
python3 -c "import ctypes; ctypes.CDLL('$library')" 2>/dev/null || { echo "gpu: no CUDA driver here ($library): install NVIDIA's" >&2; exit 77; }

# pair TOOL ARGS…: a server and a client of it on this machine; the client's table.
pair() {
  local tool=$1 out port=
  shift
  out=$(mktemp)
  "$bin/$tool" "$@" -p 0 --bind_source_ip 127.0.0.1 >"$out" 2>&1 &
  local server=$!
  exec 3< <(tail --pid=$server -n +1 -f "$out")
  while [[ -z $port ]] && read -r line <&3; do port=$(sed -n 's/^listening on .*:\([0-9]*\)$/\1/p' <<<"$line"); done
  exec 3<&-
  [[ -n $port ]] || { cat "$out" >&2; return 1; }
  "$bin/$tool" "$@" -p "$port" 127.0.0.1
  wait $server
  rm -f "$out"
}

case ${1:-} in
  test)
    export REJOIN_CUDA=$library
    "$bin/device_test"
    "$bin/transport_test" --gtest_filter='Staged*:*staged*'
    for transport in shm tcp; do
      pair rejoin_write_bw --transport $transport --use_cuda 0 -s 3000001 -n 200 --verify
      pair rejoin_read_bw --transport $transport --use_cuda 0 -s 3000001 -n 200 --verify
    done ;;
  bench)
    for transport in shm tcp; do
      for size in 64K 1M 8M; do
        pair rejoin_write_bw --transport $transport -s $size -D 3 | grep -E '^ [0-9]|Memory'
        pair rejoin_write_bw --transport $transport -s $size -D 3 --use_cuda 0 | grep -E '^ [0-9]|Memory'
      done
    done ;;
  *) echo "usage: ./run gpu test|bench" >&2; exit 2 ;;
esac
