#!/usr/bin/env bash
# Kills a trainer and the host under it, and compares with a run that nobody disturbed. Needs root, Python 3.9 and what the Makefile installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "$(id -u)" -eq 0 ] || { echo "the example needs root: sandboxes are made of mounts and namespaces" >&2; exit 1; }
exec python3 examples/preempt/run.py "$@"
