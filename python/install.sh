#!/usr/bin/env bash
# install.sh ENVIRONMENT BUILD: the package, over the library and programs of that build tree, into a Python environment
# that has what requirements-test.txt names.
set -euo pipefail
environment=$(cd "$1" && pwd) build=$(cd "$2" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")"
exec "$environment/bin/pip" install -qq --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall \
  -C build-dir="$build/python" -C cmake.define.REJOIN_BUILD="$build" .
