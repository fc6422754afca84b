#!/usr/bin/env bash
# Installs into a scratch tree and builds the minimal trainers against it, by CMake package and by pkg-config.
set -euo pipefail
build=$1 source=$2 boundary=$3
scratch=$(mktemp -d /tmp/rejoin-install-XXXXXX)
trap 'rm -rf "$scratch"' EXIT
cmake --install "$build" --prefix "$scratch/tree" >/dev/null
mkdir "$scratch/user"
cp "$source"/examples/minimal.{cc,c} "$boundary" "$scratch/user/"
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
output=$("$scratch/build/boundary" 2>"$scratch/said") || { echo "unexpected: $output"; exit 1; }
[[ $output == "one class on both sides" ]] || { echo "not to standard output: $output"; exit 1; }
grep -q "tcp+aes: " "$scratch/said" || { echo "not said: $(<"$scratch/said")"; exit 1; }
libdir=$(dirname "$(find "$scratch/tree" -name rejoin.pc)")
flags=$(PKG_CONFIG_PATH="$libdir" pkg-config --cflags --libs rejoin)
by_pkg_config() {
  "$@" -Wall -Wextra -Werror -o "$scratch/by_pkg_config" $flags || { echo "not compiled: $*"; exit 1; }
  output=$(LD_LIBRARY_PATH="$(dirname "$libdir")" "$scratch/by_pkg_config" 2>&1 || true)
  grep -q "no daemon socket" <<<"$output" || { echo "unexpected: $output"; exit 1; }
}
by_pkg_config c++ -std=c++20 "$scratch/user/minimal.cc"
for compiler in gcc clang; do
  if command -v "$compiler" >/dev/null; then by_pkg_config "$compiler" "$scratch/user/minimal.c"; fi
done
if output=$(c++ -std=c++17 -fsyntax-only "$scratch/user/minimal.cc" $flags 2>&1); then echo "C++17 is taken"; exit 1; fi
grep -q "compile with -std=c++20" <<<"$output" || { echo "unexpected: $output"; exit 1; }
# As PyTorch's wheels up to 2.6 have their extensions compiled: another std::string than the library's.
of_before="c++ -std=c++20 -D_GLIBCXX_USE_CXX11_ABI=0 -fsyntax-only"
if output=$($of_before "$scratch/user/minimal.cc" $flags 2>&1); then echo "another std::string is taken"; exit 1; fi
grep -q "or no -stdlib=libc++, -D_GLIBCXX_USE_CXX11_ABI=0" <<<"$output" || { echo "unexpected: $output"; exit 1; }
echo '#include <rejoin/c.h>' | $of_before -x c++ - $flags || { echo "rejoin/c.h needs the library's std::string"; exit 1; }
output=$("$scratch/tree/bin/rejoin" --help)
grep -q status <<<"$output"
for page in "$source"/docs/man/*; do  # each beside the others of its section
  name=${page##*/}
  [[ -f $(find "$scratch/tree" -path "*/man${name##*.}/$name") ]] || { echo "manual page $name is not installed"; exit 1; }
done
echo "installed tree works"
