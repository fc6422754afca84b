#!/usr/bin/env bash
# Point to point beside what users would take instead, one after the other, three rounds: UCX's own benchmark over its
# shared memory and TCP, iperf3, and rejoin_write_bw. Needs ucx-utils and iperf3; what is missing is left out.
set -euo pipefail
bin=$(cd "$(dirname "${BASH_SOURCE[0]}")/../build/release/bin" && pwd)
scratch=$(mktemp -d); trap 'rm -rf "$scratch"; kill $(jobs -p) 2>/dev/null || true' EXIT

for tool in ucx_perftest:ucx-utils iperf3:iperf3; do
  command -v "${tool%:*}" >/dev/null || echo "no ${tool%:*} here: install ${tool#*:}" >&2
done
ucx() { # transports test size iterations → MiB/s
  command -v ucx_perftest >/dev/null || { echo -; return; }
  local port=$((20000 + RANDOM % 20000))
  UCX_TLS=$1 UCX_WARN_UNUSED_ENV_VARS=n ucx_perftest -p $port >"$scratch/server" 2>&1 &
  until ss -ltn 2>/dev/null | grep -q ":$port " || grep -q Waiting "$scratch/server"; do :; done
  UCX_TLS=$1 ucx_perftest 127.0.0.1 -p $port -t "$2" -s "$3" -n "$4" -f 2>/dev/null | awk '/^[ 0-9]/ { rate = $6 } END { print rate }'
  wait $! || true
}
ours() { # transport size iterations → MiB/s
  "$bin/rejoin_write_bw" --transport "$1" -p 0 --bind_source_ip 127.0.0.1 -s "$2" -n "$3" -t 16 >"$scratch/server" 2>&1 &
  until port=$(sed -n 's/listening on .*:\([0-9]*\)$/\1/p' "$scratch/server") && [[ -n $port ]]; do :; done
  "$bin/rejoin_write_bw" --transport "$1" -p "$port" -s "$2" -n "$3" -t 16 127.0.0.1 | awk -v s="$2" '$1 == s { print $4 }'
  wait $! || true
}
iperf() { # → MiB/s
  command -v iperf3 >/dev/null || { echo -; return; }
  local port=$((20000 + RANDOM % 20000))
  iperf3 -s -1 -p $port >/dev/null & 
  until ss -ltn 2>/dev/null | grep -q ":$port "; do :; done
  iperf3 -c 127.0.0.1 -p $port -t 2 -f M | awk '/receiver/ { print $7 }'
  wait $! || true
}
for round in 1 2 3; do
  printf 'shared memory, 1 MiB:  ucp_put_bw %8s   rejoin_write_bw %8s MiB/s\n' "$(ucx posix,cma,self ucp_put_bw 1048576 5000)" "$(ours shm 1048576 5000)"
  printf 'TCP, 1 MiB:  ucx tag_bw %8s   iperf3 %8s   rejoin_write_bw %8s MiB/s\n' "$(ucx tcp,self tag_bw 1048576 3000)" "$(iperf)" "$(ours tcp 1048576 3000)"
done
