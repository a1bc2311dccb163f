#!/usr/bin/env bash
# The Python SDK: types, units, and a run against a real `dsec up`. A venv of its own, since the python3 in PATH may lack venv or pip.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d client/python/tests ] || { echo "no Python SDK yet"; exit 0; }
exec client/python/tests/run.sh
