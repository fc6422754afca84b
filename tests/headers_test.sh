#!/usr/bin/env bash
# Each installed header compiles by itself, and of the libraries that Rejoin is built with needs tl::expected alone.
set -euo pipefail
build=$1 compiler=$2
scratch=$(mktemp -d /tmp/rejoin-headers-XXXXXX)
trap 'rm -rf "$scratch"' EXIT
cmake --install "$build" --component development --prefix "$scratch/tree" >/dev/null
root=$(echo "$scratch"/tree/include/rejoin-*)
count=0
for header in $(cd "$root" && find . -name '*.h' -printf '%P\n'); do
  echo "#include \"$header\"" > "$scratch/user.cc"
  "$compiler" -std=c++20 -Wall -Wextra -Werror -I"$root" -fsyntax-only -MD -MF "$scratch/user.d" "$scratch/user.cc"
  if foreign=$(grep -oE '[^ ]*/(fmt|CLI|spdlog|asio|google|nlohmann|prometheus)/[^ ]*' "$scratch/user.d" | head -1); then
    echo "$header includes $foreign, which who uses the library would have to install"
    exit 1
  fi
  count=$((count + 1))
done
[[ $count -ge 12 ]] || { echo "only $count headers are installed in $root"; exit 1; }
echo "$count headers"
