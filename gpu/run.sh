#!/usr/bin/env bash
# ./run gpu test|bench|probe|nccl: what needs a GPU, on the machine's first one, with NVIDIA's driver. Needs no toolkit to run.
# ./run gpu pack DIR: everything for that into one folder, for a machine that can't build: DIR/run.sh test|bench|probe|nccl.
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

# Where all threads of a group of processes stand: by gdb, or as far as the kernel tells.
stacks() {
  local pid task
  for pid in $(ps -o pid= -g "$1" 2>/dev/null || pgrep -g "$1"); do
    printf -- '-- stuck: %s %s\n' "$pid" "$(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null)"
    if command -v gdb >/dev/null; then timeout 30 gdb -p "$pid" -batch -ex 'thread apply all bt 12' 2>/dev/null | grep -E '^(#|Thread)'
    else for task in "/proc/$pid/task"/*; do printf '%s in %s, %s\n' "$(cat "$task/comm")" "$(cat "$task/wchan")" "$(cut -d' ' -f1 "$task/syscall")"; done 2>/dev/null
    fi || true
  done
}

# What a step's output says in figures: tests, or the last line of a table, or how long a replica was missed.
figure() {
  sed -n -E -e 's/^\[  PASSED  \] ([0-9]+ tests?).*/\1 passed/p' -e 's/^\[  FAILED  \] ([0-9]+ tests?), listed below.*/\1 FAILED/p' \
    -e "s/.*the survivors' commit of that step ([0-9.]+ ms) later.*/commit \1 later/p" -e 's/.*same bits on all replicas: (yes|no).*/same bits: \1/p' \
    -e 's/^ +([0-9]+( +[a-z0-9]+)*)( +[0-9.]+.*)$/\1\3/p' "$1" | sed -E 's/ +/ /g' | tail -2 | paste -sd';'
}

rows=() failures=0
# step WHAT COMMAND…: a line before it, a time limit (STEP_LIMIT seconds), and a row of the table at the end. On a hang: where it stands.
step() {
  local what=$1 limit=${STEP_LIMIT:-120} began=$SECONDS rc=0 pid log
  shift
  printf '== %s\n' "$what"
  log=$(mktemp)
  set -m
  ("$@") >"$log" 2>&1 &
  pid=$!
  set +m
  # The log is a file and not a pipe to a `tee`: it is whole once the command has ended.
  timeout $limit tail -s 0.1 --pid=$pid -n +1 -f "$log" || true
  if kill -0 $pid 2>/dev/null; then
    stacks $pid >&2
    kill -KILL -- -$pid
    wait $pid || true
    rows+=("HANGS|$what|killed after $limit s")
    failures=$((failures + 1))
  else
    wait $pid || rc=$?
    rows+=("$([[ $rc == 0 ]] && echo passed || echo "FAILED ($rc)")|$what|$((SECONDS - began)) s; $(figure "$log")")
    [[ $rc == 0 ]] || failures=$((failures + 1))
  fi
  rm -f "$log"
}

# The table, the card, and the exit status.
finish() {
  local row
  printf '\n%s: %s\n' "$1" "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1 || true)"
  for row in "${rows[@]}"; do IFS='|' read -r outcome what figures <<<"$row"; printf '%-11s %-72s %s\n' "$outcome" "$what" "$figures"; done
  ((failures == 0)) || { echo "$1: $failures of ${#rows[@]} steps failed"; exit 1; }
  echo "$1: passed"
}

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

# NCCL's library and our plugin are found, two processes may share the GPU, and nothing but the network is between them.
nccl_between_processes() {
  local nccl
  [[ -x $bin/rejoin_nccl_check ]] || { echo "gpu: rejoin_nccl_check was not built: no NCCL was found (nccl.h, libnccl.so) when this was configured" >&2; return 1; }
  nccl=$(find_library libnccl.so) && [[ -n $nccl ]] || { echo "gpu: no libnccl.so here" >&2; return 1; }
  export LD_LIBRARY_PATH=$(dirname "$nccl"):$plugin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_MULTI_RANK_GPU_ENABLE=1
}

# with_mps COMMAND…: beside NVIDIA's multi-process service, by which processes share a GPU without taking turns.
with_mps() {
  local rc=0
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
  nvidia-cuda-mps-control -d || return 1
  "$@" || rc=$?
  echo quit | nvidia-cuda-mps-control || rc=1
  return $rc
}

case ${1:-} in
  test)
    need_gpu
    export REJOIN_CUDA=$library
    step "the seam, the kernels against float64 and the CPU's digests" "$bin/device_test"
    step "staging" "$bin/transport_test" --gtest_filter='Staged*:*staged*'
    step "the coder beside the CPU's, the ring in GPU memory, plain and coded, with members dying" "$bin/ftar_test" --gtest_filter='*gpu*:*Gpu*:*Kernel*'
    step "catch-up into GPU memory" "$bin/catchup_test" --gtest_filter='*gpu*'
    step "sessions' streams and state" "$bin/session_test"
    # As frameworks set it, for their streams to share one queue of the hardware.
    step "the same with one hardware queue" env CUDA_DEVICE_MAX_CONNECTIONS=1 "$bin/session_test"
    step "the same, kernels loaded by their first launch" env CUDA_MODULE_LOADING=LAZY "$bin/session_test"
    if sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null); then
      for tool in memcheck racecheck synccheck; do
        step "compute-sanitizer, $tool" "$sanitizer" --tool $tool --error-exitcode 9 "$bin/device_test" --gtest_filter='Kernels.*'
        STEP_LIMIT=300 step "compute-sanitizer, $tool, of the coder" "$sanitizer" --tool $tool --error-exitcode 9 "$bin/ftar_test" --gtest_filter='GpuCoder.*'
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
        case $type in
          float32|bfloat16|float16)
            for bits in 8 4; do
              step "the same, coded in $bits bits" \
                "$bin/rejoin_allreduce_perf" --transport $transport --use_cuda 0 --ranks 3 -d $type -o mean -b 1000 -e 8M -f 31 -n 3 --reduce-blocks 2 --coding $bits
            done ;;
        esac
      done
      for state in session pool expandable; do
        step "kill and rejoin over $transport, tensors in GPU memory: $state" \
          "$bin/rejoin-demo" --data "$data" --device cuda:0 --state $state --transport $transport --steps 120 --kill 1.0@30 --no-baseline
      done
    done
    finish "gpu test" ;;
  bench)
    need_gpu
    out=${REJOIN_OUT:-gpu-bench}  # a folder
    mkdir -p "$out"
    rm -f "$out"/*.json "$out"/*.html "$out"/*.svg "$out"/nccl-*.txt
    to_file() { "${@:2}" >"$1" || { cat "$1"; return 1; }; }
    step "kernels beside the card's copy bandwidth" to_file "$out/kernels.json" "$bin/rejoin_kernel_bw" --json --svg "$out/kernels.svg" ${REJOIN_KERNEL_BW:-}
    for transport in shm tcp; do
      for memory in "" "--use_cuda 0"; do
        where=$transport-$([[ -z $memory ]] && echo host || echo GPU)
        for size in 64K 1M 8M; do
          # shellcheck disable=SC2086
          step "a write of $size over $transport, ${memory:-host}" pair rejoin_write_bw --transport $transport -s $size -D ${REJOIN_SECONDS:-3} --out_json_file "$out/write-$where-$size.json" --out_json $memory
        done
        # shellcheck disable=SC2086
        step "all-reduce over $transport, ${memory:-host}" "$bin/rejoin_allreduce_perf" --transport $transport --ranks 2 -b 1M -e 64M -f 4 --json "$out/allreduce-$where.json" $memory
        # shellcheck disable=SC2086
        step "catch-up over $transport, ${memory:-host}" "$bin/rejoin_catchup_bw" --transport $transport -s ${REJOIN_STATE:-1G} --json "$out/catchup-$where.json" $memory
      done
    done
    step "steps of a session, host" "$bin/rejoin_step_perf" -s 4K,1M --replicas 2 -n 200 --json "$out/steps-host.json"
    step "steps of a session, GPU" "$bin/rejoin_step_perf" -s 4K,1M --replicas 2 -n 200 --use_cuda 0 --json "$out/steps-GPU.json"
    if command -v nvidia-cuda-mps-control >/dev/null; then
      step "all-reduce over shm, GPU, under MPS" with_mps "$bin/rejoin_allreduce_perf" --transport shm --ranks 2 -b 1M -e 64M -f 4 --use_cuda 0 --json "$out/allreduce-shm-GPU-MPS.json"
    else echo "gpu: no nvidia-cuda-mps-control here: nothing was measured under MPS" >&2; fi
    if nccl_between_processes; then
      step "NCCL between two processes, over the plugin" to_file "$out/nccl-Rejoin.txt" env NCCL_NET_PLUGIN=rejoin REJOIN_NCCL_DEVICES=tcp "$bin/rejoin_nccl_check"
      step "NCCL between two processes, over its sockets" to_file "$out/nccl-sockets.txt" env NCCL_NET_PLUGIN=none NCCL_NET=Socket "$bin/rejoin_nccl_check"
    fi
    STEP_LIMIT=300 step "a served daemon beside a trainer that fills the card" to_file "$out/probe.json" "$bin/rejoin_gpu_probe" --json ${REJOIN_PROBE:-}
    python3 "$here/page.py" "$out" "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1 || true)"
    finish "gpu bench" ;;
  probe)
    need_gpu
    STEP_LIMIT=${STEP_LIMIT:-300} step "what the driver does while streams wait, and what a served daemon costs a busy trainer" "$bin/rejoin_gpu_probe"
    finish "gpu probe" ;;
  nccl)
    need_gpu
    nccl_between_processes || exit 77
    export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET
    logs=$(mktemp -d)
    trap 'rm -rf "$logs"' EXIT
    names_the_plugin() { grep -q -h -E 'Using network.*[Rr]ejoin' "$@" || { echo "NCCL's log does not say that it used the plugin:"; cat "$@"; return 1; }; }
    for devices in tcp shm; do
      # Each process writes a log of its own.
      step "NCCL over Rejoin's plugin, $devices" env NCCL_NET_PLUGIN=rejoin REJOIN_NCCL_DEVICES=$devices NCCL_DEBUG_FILE="$logs/$devices.%p" "$bin/rejoin_nccl_check"
      step "NCCL's own log names it" names_the_plugin "$logs/$devices".*
      grep -h -E -i 'rejoin' "$logs/$devices".* | sed 's/^/   NCCL: /' | sort -u | head -12 || true
    done
    step "NCCL over its own sockets" env NCCL_NET_PLUGIN=none NCCL_NET=Socket NCCL_DEBUG=WARN "$bin/rejoin_nccl_check"
    finish "gpu nccl" ;;
  pack)
    to=${2:?usage: ./run gpu pack DIR}
    mkdir -p "$to/bin" "$to/lib"
    for program in device_test transport_test ftar_test catchup_test session_test rejoin_write_bw rejoin_read_bw rejoin_allreduce_perf rejoin_catchup_bw rejoin_step_perf rejoin_kernel_bw rejoin_gpu_probe \
                   rejoin_nccl_check rejoin-demo rejoin-demo-trainer rejoind rejoin_nccl_net_test; do
      [[ ! -x $bin/$program ]] || install -s "$bin/$program" "$to/bin/"
    done
    install -s "$plugin/libnccl-net-rejoin.so" "$to/lib/"
    # What the programs load at run time, which the other machine may lack.
    loaded=()
    for library in libibverbs.so.1 librdmacm.so.1 libucs.so.0 libucp.so.0; do
      path=$(find_library "$library") && [[ -n $path ]] && loaded+=("$path")
    done
    cp -L "${loaded[@]}" "$to/lib/"
    # All libraries but those of the C and C++ compilers, which every machine has, and NVIDIA's, which belong to its driver.
    ldd "$to"/bin/* "$to"/lib/*.so "${loaded[@]}" | sed -n 's/.* => \(\/[^ ]*\).*/\1/p' | sort -u |
      grep -v -E '/(libc|libm|libmvec|libdl|librt|libpthread|libresolv|libgcc_s|libstdc\+\+|libnccl|libcuda|libcudart)\.so' | xargs -I{} cp -L {} "$to/lib/"
    cp "$here/run.sh" "$here/page.py" "$data" "$to/"
    du -sh "$to" ;;
  *) echo "usage: ./run gpu test|bench|probe|nccl|pack DIR" >&2; exit 2 ;;
esac
