#!/usr/bin/env bash
# Bulk writes between two processes beside NIXL and Mooncake's transfer engine, one after the other, three rounds, 16
# writes at a time: MiB/s, one figure a round, so compare means with means. Each has an environment of its own in build/,
# with its wheel from PyPI; what could not be installed, or does not run here, is said. --prepare does no more than that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=$PWD/build/release/bin
scratch=$(mktemp -d); trap 'rm -rf "$scratch"' EXIT

environment() { # name package → whether it is there
  local tools=build/$1-venv
  [[ -e $tools/ready ]] && return
  if python3 -m venv --clear "$tools" && "$tools/bin/pip" install -qq --no-deps --disable-pip-version-check "$2" numpy 2>"$scratch/pip" &&
    { [[ $1 != mooncake ]] || "$tools/bin/pip" install -qq --disable-pip-version-check "$2" 2>"$scratch/pip"; }; then
    touch "$tools/ready"
  else
    echo "$2 could not be installed: $(tail -n 1 "$scratch/pip")" >&2
    return 1
  fi
}
declare -A there
for name in nixl mooncake; do
  package=nixl-cu12; [[ $name == nixl ]] || package=mooncake-transfer-engine-non-cuda
  environment $name $package && there[$name]=1
done
[[ ${1:-} != --prepare ]] || exit 0

peer() { # name transport size rounds → MiB/s
  [[ -n ${there[$1]:-} ]] || { echo -; return; }
  local said
  if said=$(timeout 120 "build/$1-venv/bin/python" bench/peers_transfer.py "$@" 2>"$scratch/said" </dev/null); then tail -n 1 <<<"$said"
  else echo -; echo "$1 over $2: $(tail -n 1 "$scratch/said")" >&2; fi
}
ours() { # transport size writes → MiB/s
  local line port
  exec 3< <("$bin/rejoin_write_bw" --transport "$1" -p 0 --bind_source_ip 127.0.0.1 -s "$2" -n "$3" -t 16 2>&1)
  while read -r line <&3; do
    if [[ $line =~ ^listening\ on\ .*:([0-9]+)$ ]]; then port=${BASH_REMATCH[1]}; break; fi
  done
  "$bin/rejoin_write_bw" --transport "$1" -p "${port:?rejoin_write_bw has not started}" -s "$2" -n "$3" -t 16 127.0.0.1 | awk -v s="$2" '$1 == s { print $4 }'
  cat <&3 >/dev/null  # until it has ended
  exec 3<&-
}
for round in 1 2 3; do
  for size in 65536 1048576; do
    rounds=$((size > 100000 ? 20 : 100))
    printf '%7s bytes, TCP: nixl %8s   mooncake %8s   rejoin_write_bw %8s   shared memory: nixl %8s   rejoin_write_bw %8s MiB/s\n' $size \
      "$(peer nixl tcp $size $rounds)" "$(peer mooncake tcp $size $rounds)" "$(ours tcp $size $((rounds * 16)))" \
      "$(peer nixl shm $size $rounds)" "$(ours shm $size $((rounds * 16)))"
  done
done
