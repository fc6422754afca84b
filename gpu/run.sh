#!/usr/bin/env bash
# ./run gpu test|bench|nccl: what needs a GPU, on the machine's first one, with NVIDIA's driver. Needs no toolkit to run.
# ./run gpu pack DIR: everything for that into one folder, for a machine that can't build: DIR/run.sh test|bench|nccl.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ -d $here/bin ]]; then  # packed
  bin=$here/bin plugin=$here/lib data=$here/shakespeare.txt
  export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
else
  bin=$here/../build/release/bin plugin=$here/../build/release/lib data=$here/../data/shakespeare.txt
fi
library=libcuda.so.1

need_gpu() {
  python3 -c "import ctypes; ctypes.CDLL('$library')" 2>/dev/null || { echo "gpu: no CUDA driver here ($library): install NVIDIA's" >&2; exit 77; }
}

# step WHAT COMMAND…: one line before it; the first failure ends everything.
step() { printf '== %s\n' "$1"; shift; "$@"; }

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

# A library of this name, where the linker or a Python package has it.
find_library() {
  ldconfig -p | sed -n "s/.* => \(.*$1.*\)/\1/p" | head -1 | grep . || ls /usr/local/cuda/lib64/"$1"* 2>/dev/null | head -1 | grep . ||
    python3 -c "import glob, site, sys
for root in site.getsitepackages() + sys.path:
    for found in glob.glob(f'{root}/nvidia/*/lib/$1*'): print(found); sys.exit()"
}

case ${1:-} in
  test)
    need_gpu
    export REJOIN_CUDA=$library
    step "the seam, the kernels against float64 and the CPU's digests" "$bin/device_test"
    step "staging" "$bin/transport_test" --gtest_filter='Staged*:*staged*'
    step "the ring in GPU memory, with members dying" "$bin/ftar_test" --gtest_filter='*gpu*:*Gpu*:*Kernel*'
    step "catch-up into GPU memory" "$bin/catchup_test" --gtest_filter='*gpu*'
    step "sessions' streams and state" "$bin/session_test"
    if sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null); then
      for tool in memcheck racecheck synccheck; do
        step "compute-sanitizer, $tool" "$sanitizer" --tool $tool --error-exitcode 9 "$bin/device_test" --gtest_filter='Kernels.*'
      done
    else
      echo "gpu: no compute-sanitizer here (it is in the CUDA toolkit): the kernels were not run under it" >&2
    fi
    for transport in shm tcp; do
      step "a write of GPU memory over $transport" pair rejoin_write_bw --transport $transport --use_cuda 0 -s 3000001 -n 200 --verify
      step "a read of it" pair rejoin_read_bw --transport $transport --use_cuda 0 -s 3000001 -n 200 --verify
      for type in float32 float64 bfloat16 float16 int32 int64; do
        step "all-reduce of $type over $transport" \
          "$bin/rejoin_allreduce_perf" --transport $transport --use_cuda 0 --ranks 3 -d $type -o mean -b 1000 -e 8M -f 31 -n 3 --reduce-blocks 2
      done
      for state in session pool expandable; do
        step "kill and rejoin over $transport, tensors in GPU memory: $state" \
          "$bin/rejoin-demo" --data "$data" --device cuda:0 --state $state --transport $transport --steps 120 --kill 1.0@30 --no-baseline
      done
    done
    echo "gpu test: passed" ;;
  bench)
    need_gpu
    step "kernels beside the card's copy bandwidth" "$bin/rejoin_kernel_bw"
    step "the same in works of 64 MiB, for the whole card" "$bin/rejoin_kernel_bw" --chunk 64M
    for transport in shm tcp; do
      for size in 64K 1M 8M; do
        pair rejoin_write_bw --transport $transport -s $size -D 3 | grep -E '^ [0-9]|Memory'
        pair rejoin_write_bw --transport $transport -s $size -D 3 --use_cuda 0 | grep -E '^ [0-9]|Memory'
      done
      "$bin/rejoin_allreduce_perf" --transport $transport --ranks 2 -b 1M -e 64M -f 4
      "$bin/rejoin_allreduce_perf" --transport $transport --ranks 2 -b 1M -e 64M -f 4 --use_cuda 0
      "$bin/rejoin_catchup_bw" --transport $transport -s 1G
      "$bin/rejoin_catchup_bw" --transport $transport -s 1G --use_cuda 0
    done ;;
  nccl)
    need_gpu
    [[ -x $bin/rejoin_nccl_check ]] || { echo "gpu: rejoin_nccl_check was not built: no NCCL was found (nccl.h, libnccl.so) when this was configured" >&2; exit 77; }
    nccl=$(find_library libnccl.so) || { echo "gpu: no libnccl.so here" >&2; exit 77; }
    export LD_LIBRARY_PATH=$(dirname "$nccl"):$plugin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    # Two processes on one GPU, and nothing but the network between them.
    export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    for devices in tcp shm; do
      step "NCCL over Rejoin's plugin, $devices" env NCCL_NET_PLUGIN=rejoin REJOIN_NCCL_DEVICES=$devices NCCL_DEBUG_FILE="$log" "$bin/rejoin_nccl_check"
      grep -E -i 'rejoin' "$log" | sed 's/^/   NCCL: /' | sort -u | head -12
      grep -q -E 'Using network.*[Rr]ejoin' "$log" || { echo "gpu: NCCL's log does not say that it used the plugin:" >&2; cat "$log" >&2; exit 1; }
    done
    step "NCCL over its own sockets" env NCCL_NET_PLUGIN=none NCCL_NET=Socket NCCL_DEBUG=WARN "$bin/rejoin_nccl_check" ;;
  pack)
    to=${2:?usage: ./run gpu pack DIR}
    mkdir -p "$to/bin" "$to/lib"
    for program in device_test transport_test ftar_test catchup_test session_test rejoin_write_bw rejoin_read_bw rejoin_allreduce_perf rejoin_catchup_bw rejoin_kernel_bw \
                   rejoin_nccl_check rejoin-demo rejoin-demo-trainer rejoind rejoin_nccl_net_test; do
      [[ ! -x $bin/$program ]] || install -s "$bin/$program" "$to/bin/"
    done
    install -s "$plugin/libnccl-net-rejoin.so" "$to/lib/"
    # All libraries but those of the C and C++ compilers, which every machine has, and NVIDIA's, which belong to its driver.
    ldd "$to"/bin/* "$to"/lib/*.so | sed -n 's/.* => \(\/[^ ]*\).*/\1/p' | sort -u |
      grep -v -E '/(libc|libm|libmvec|libdl|librt|libpthread|libresolv|libgcc_s|libstdc\+\+|libnccl|libcuda|libcudart)\.so' | xargs -I{} cp -L {} "$to/lib/"
    cp "$here/run.sh" "$data" "$to/"
    du -sh "$to" ;;
  *) echo "usage: ./run gpu test|bench|nccl|pack DIR" >&2; exit 2 ;;
esac
