#!/usr/bin/env bash
# check.sh PACKAGES SOURCE BASE: installs the packages on a bare Debian 12 in a chroot, uses them there, and removes them.
# BASE is a tar of that Debian, which is made where it is not there. It needs root, mmdebstrap and a Debian mirror.
set -euo pipefail
if [[ ${4:-} != inside ]]; then
  base=$3
  [[ -f $base ]] || { echo "check: a bare Debian 12 into $base"; mmdebstrap --quiet --format=tar --variant=minbase bookworm "$base.part" && mv "$base.part" "$base"; }
  scratch=$(mktemp -d /tmp/rejoin-packages-XXXXXX)
  trap 'rm -rf "$scratch"' EXIT
  # All that is mounted and started there ends with this process.
  unshare --mount --pid --fork --kill-child --propagation private "$0" "$1" "$2" "$base" inside "$scratch"
  exit
fi
packages=$1 source=$2 base=$3 root=$5/root
mkdir "$root"
tar -xf "$base" -C "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/dev/shm"
mount --bind /dev/pts "$root/dev/pts"
mkdir "$root/packages" "$root/trainer"
cp "$packages"/*.deb "$root/packages"
cp "$source/examples/minimal.cc" "$root/trainer"

say() { echo "check: $*"; }
inside=(chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive)
by_user=("${inside[@]}" setpriv --reuid rejoin --regid rejoin --clear-groups)
there() { "${inside[@]}" "$@"; }
as_user() { "${by_user[@]}" "$@"; }
# What lies there, but for what belongs to dpkg, to apt and to nobody.
all_files() {
  (cd "$root" && find . -xdev \( -path ./proc -o -path ./tmp -o -path ./packages -o -path ./trainer -o -path ./var/cache -o -path ./var/log \
    -o -path ./var/lib/apt -o -path ./var/lib/dpkg -o -path ./dev/shm \) -prune -o -printf '%y %m %u %p\n' | grep -v ' ./etc/.*-$\| ./etc/ld.so.cache$\| ./run/' | sort
   sort etc/passwd etc/group)
}

say "what they depend on, and a compiler"
there apt-get update -qq
own=$(for package in "$packages"/*.deb; do dpkg-deb -f "$package" Package; done | paste -sd'|')
needed=$(for package in "$packages"/*.deb; do dpkg-deb -f "$package" Depends | sed 's/, /\n/g'; done | sort -u | grep -vE "^($own) " | paste -sd,)
there apt-get satisfy -y -qq --no-install-recommends "$needed" "g++, cmake, ninja-build, pkg-config" >"$root/tmp/apt.log" 2>&1 ||
  { cat "$root/tmp/apt.log"; exit 1; }
all_files >"$root/tmp/before"

say "they install"
there sh -c 'apt-get install -y -qq --no-install-recommends /packages/*.deb' >"$root/tmp/apt.log" 2>&1 ||
  { cat "$root/tmp/apt.log"; exit 1; }
for program in $(for package in "$packages"/*.deb; do dpkg-deb -c "$package"; done | grep -o '\./usr/bin/..*'); do
  there "/${program#./}" --version >/dev/null || { say "$program does not start"; exit 1; }
done

say "the demo runs"
as_user rejoin-demo --steps 400 --params 50000 --kill 1.0@40 --no-baseline | tail -12

say "a trainer that is compiled there runs, by CMake and by pkg-config"
cat >"$root/trainer/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(trainer CXX)
find_package(rejoin 0.1 REQUIRED)
add_executable(trainer minimal.cc)
target_link_libraries(trainer PRIVATE rejoin::rejoin)
CMAKE
there sh -ec 'cd /trainer && cmake -G Ninja -S . -B build && cmake --build build && g++ -std=c++20 minimal.cc -o by_pkg_config $(pkg-config --cflags --libs rejoin)' \
  >"$root/tmp/compile.log" 2>&1 || { cat "$root/tmp/compile.log"; exit 1; }
there install -d -o rejoin -m 700 /run/rejoin
there sh -c 'head -c 32 /dev/urandom >/run/rejoin/key && chmod 600 /run/rejoin/key && chown rejoin /run/rejoin/key'
"${by_user[@]}" rejoind --coordinator --socket /run/rejoin/socket --log-directory /run/rejoin/log --job-key-file /run/rejoin/key \
  --address-file /run/rejoin/addresses --replicas 2 --ranks 1 --batch 8 --steps 30 2>"$root/tmp/rejoind.log" &
daemon=$!
for ((i = 0; i < 300; ++i)); do [[ -s $root/run/rejoin/addresses ]] && break; sleep 0.1; done
for trainer in 0:/trainer/build/trainer 1:/trainer/by_pkg_config; do
  "${by_user[@]}" env REJOIN_REPLICA="${trainer%%:*}" REJOIN_RANK=0 REJOIN_SOCKET=/run/rejoin/socket "${trainer#*:}" >"$root/tmp/trainer${trainer%%:*}.log" 2>&1 &
  trainers+=($!)
done
for trainer in "${trainers[@]}"; do
  wait "$trainer" || { cat "$root"/tmp/trainer*.log "$root/tmp/rejoind.log"; say "a trainer failed"; exit 1; }
done
tail -qn 1 "$root"/tmp/trainer*.log
as_user rejoin audit /run/rejoin/log/decisions.log --steps 30 | tail -2
kill "$daemon" && wait "$daemon"

say "the plugin passes its test"
there env REJOIN_NCCL_DEVICES=tcp sh -c 'rejoin_nccl_net_test /usr/lib/*/libnccl-net-rejoin.so' >"$root/tmp/plugin.log" 2>&1 ||
  { cat "$root/tmp/plugin.log"; exit 1; }
grep '^passed' "$root/tmp/plugin.log"

say "removed, they leave settings and logs; purged, nothing"
there sh -ec 'mkdir -p /etc/rejoin/train /var/lib/rejoin/train && touch /etc/rejoin/train/key /var/lib/rejoin/train/decisions.log'
there apt-get remove -y -qq ${own//|/ } >"$root/tmp/apt.log" 2>&1 || { cat "$root/tmp/apt.log"; exit 1; }
all_files >"$root/tmp/removed"
left=$(diff "$root/tmp/before" "$root/tmp/removed" | grep '^[<>]' | grep -v ' \./etc/rejoin\| \./var/lib/rejoin\|> rejoin:' || true)
[[ -z $left ]] || { say "removed, they leave"; echo "$left"; exit 1; }
[[ -f $root/etc/rejoin/train/key && -f $root/var/lib/rejoin/train/decisions.log ]] || { say "removed, they take a key or a log along"; exit 1; }
there dpkg --purge ${own//|/ } >"$root/tmp/apt.log" 2>&1 || { cat "$root/tmp/apt.log"; exit 1; }
all_files >"$root/tmp/purged"
diff "$root/tmp/before" "$root/tmp/purged" || { say "purged, they leave something (>), or took something (<)"; exit 1; }
say "ok"
