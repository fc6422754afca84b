#!/usr/bin/env bash
# check.sh PACKAGES SOURCE BASE: boots a bare Debian 12, of which BASE is a tar, with systemd in a namespace, installs the
# packages there, and has systemd run a job's daemons. It needs root, cgroups of version 2, and a Debian mirror.
set -euo pipefail
if [[ ${4:-} != inside ]]; then
  groups=$(findmnt -n -o TARGET -t cgroup2 | head -1)
  [[ -n $groups ]] || { echo "check: SKIPPED: systemd: no cgroups of version 2 are mounted here"; exit 0; }
  scratch=$(mktemp -d /tmp/rejoin-systemd-XXXXXX) group=$groups/rejoin-check-$$
  trap 'find "$group" -depth -type d -exec rmdir {} + 2>/dev/null; rm -rf "$scratch"' EXIT
  mkdir "$group" "$scratch/root"
  tar -xf "$3" -C "$scratch/root"
  cp "$1"/*.deb "$2/examples/minimal.cc" "$(dirname "$0")/check_inside.sh" "$scratch/root/opt"
  # Its packages first, with the network; then systemd, without.
  unshare --mount --propagation private chroot "$scratch/root" /bin/sh -ec \
    'apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends systemd dbus g++ pkg-config /opt/*.deb
     g++ -std=c++20 /opt/minimal.cc -o /opt/minimal $(pkg-config --cflags --libs rejoin)' >"$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
  (
    echo "$BASHPID" >"$group/cgroup.procs"
    timeout -k 5 180 unshare --mount --pid --net --uts --ipc --cgroup --fork --kill-child --propagation private "$0" "$1" "$2" "$3" inside "$scratch/root" \
      </dev/null >"$scratch/log" 2>&1 || true
  )
  cat "$scratch/root/opt/result" 2>/dev/null || cat "$scratch/log"
  [[ $(tail -n 1 "$scratch/root/opt/result") == "check: ok" ]] || { cat "$scratch/root/opt/said"; exit 1; }
  exit
fi
root=$5
mount --bind "$root" "$root"
ip link set lo up 2>/dev/null || python3 -c 'import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 0x49))'
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
for place in run tmp dev/shm; do mount -t tmpfs tmpfs "$root/$place"; done
mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
cat >"$root/etc/systemd/system/check.service" <<'UNIT'
[Unit]
After=multi-user.target
[Service]
ExecStart=/bin/bash /opt/check_inside.sh
UNIT
ln -sf ../check.service "$root/etc/systemd/system/multi-user.target.wants/"
# systemd hands credentials on through mounts that others see, too.
mount --make-rshared /
exec chroot "$root" env -i container=check PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --log-target=console
