#!/usr/bin/env bash
# The documentation as a site and the C++ reference, built without a warning. The tools are where ./run test puts them.
set -euo pipefail
source=$1
if [[ ! -x $source/build/docs-venv/bin/mkdocs ]] || ! command -v doxygen >/dev/null; then
  echo "SKIPPED: the site: mkdocs or Doxygen is not there; ./run docs installs them, where PyPI can be reached"
  exit 77
fi
cd "$source"
rm -rf build/site
./run docs
for page in index.html quick-start/index.html api/index.html; do
  [[ -s build/site/$page ]] || { echo "./run docs made no build/site/$page"; exit 1; }
done
