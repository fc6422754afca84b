#!/usr/bin/env bash
# check.sh PACKAGES BASE: there is no Docker here: what the last stage of the Dockerfile RUNs is run in a chroot of a bare
# Debian 12, with the packages where the stage COPYs them to, and then its CMD as its USER.
set -euo pipefail
if [[ ${3:-} != inside ]]; then
  scratch=$(mktemp -d /tmp/rejoin-image-XXXXXX)
  trap 'rm -rf "$scratch"' EXIT
  unshare --mount --pid --fork --kill-child --propagation private "$0" "$1" "$2" inside "$scratch"
  exit
fi
packages=$1 base=$2 root=$4/root file=$(dirname "${BASH_SOURCE[0]}")/Dockerfile
mkdir "$root"
tar -xf "$base" -C "$root"
mount -t proc proc "$root/proc"
stage=$(awk '/^FROM/ { stage = "" } { stage = stage $0 "\n" } END { printf "%s", stage }' "$file" | grep -v '^#' | sed -z 's/\\\n//g')
value() { sed -n "s/^$1 //p" <<<"$stage"; }
to=$(value COPY | awk '{ print $NF }')
cp -r "$packages" "$root$to"
there() { chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive "$@"; }
there /bin/sh -ec "$(value RUN)" >"$root/tmp/run.log" 2>&1 || { cat "$root/tmp/run.log"; exit 1; }
user=$(value USER)
mapfile -t words < <(value CMD | python3 -c 'import json, sys; print(*json.load(sys.stdin), sep="\n")')
output=$(there setpriv --reuid "$user" --regid "$user" --clear-groups "${words[@]}")
grep -q -- --coordinator <<<"$output" || { echo "the image says: $output"; exit 1; }
[[ ! -e $root$to ]] || { echo "the image keeps $to"; exit 1; }
echo "check: the image's commands run; it would have $(du -sm "$root" --exclude=proc | cut -f1) MB"
