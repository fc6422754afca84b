#!/usr/bin/env bash
# With the Python environment of the documentation, which reads YAML; './run package --check' has one that knows more.
set -euo pipefail
python=$2/build/docs-venv/bin/python
if ! "$python" -c 'import yaml' 2>/dev/null; then
  echo "SKIPPED: the manifests: $python has no yaml; ./run test installs it, where PyPI can be reached"
  exit 77
fi
exec "$python" "$(dirname "${BASH_SOURCE[0]}")/manifests_test.py" "$1/bin" "$2"
