#!/usr/bin/env bash
# Installs into a scratch tree and builds the minimal trainer against it, by CMake package and by pkg-config.
set -euo pipefail
build=$1 source=$2 boundary=$3
scratch=$(mktemp -d /tmp/rejoin-install-XXXXXX)
trap 'rm -rf "$scratch"' EXIT
cmake --install "$build" --prefix "$scratch/tree" >/dev/null
mkdir "$scratch/user"
cp "$source/examples/minimal.cc" "$boundary" "$scratch/user/"
cat > "$scratch/user/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(user CXX)
find_package(rejoin REQUIRED)
add_executable(user minimal.cc)
target_link_libraries(user PRIVATE rejoin::rejoin)
add_executable(boundary boundary.cc)
target_link_libraries(boundary PRIVATE rejoin::rejoin)
CMAKE
cmake -G Ninja -S "$scratch/user" -B "$scratch/build" -DCMAKE_PREFIX_PATH="$scratch/tree" >/dev/null
cmake --build "$scratch/build" >/dev/null
# It starts, finds its library, and says what it lacks.
output=$("$scratch/build/user" 2>&1 || true)
grep -q "no daemon socket" <<<"$output" || { echo "unexpected: $output"; exit 1; }
output=$("$scratch/build/boundary" 2>&1) || { echo "unexpected: $output"; exit 1; }
libdir=$(dirname "$(find "$scratch/tree" -name rejoin.pc)")
c++ "$scratch/user/minimal.cc" -o "$scratch/by_pkg_config" $(PKG_CONFIG_PATH="$libdir" pkg-config --cflags --libs rejoin)
output=$(LD_LIBRARY_PATH="$(dirname "$libdir")" "$scratch/by_pkg_config" 2>&1 || true)
grep -q "no daemon socket" <<<"$output" || { echo "unexpected: $output"; exit 1; }
output=$("$scratch/tree/bin/rejoin" --help)
grep -q status <<<"$output"
for page in "$source"/docs/man/*; do  # each beside the others of its section
  name=${page##*/}
  [[ -f $(find "$scratch/tree" -path "*/man${name##*.}/$name") ]] || { echo "manual page $name is not installed"; exit 1; }
done
echo "installed tree works"
