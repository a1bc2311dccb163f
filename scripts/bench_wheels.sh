#!/usr/bin/env bash
# bench_wheels.sh FOLDER: ten versions of two Python packages, a folder each, for make bench B=dedup.
set -euo pipefail
numpy=(1.26.0 1.26.1 1.26.2 1.26.3 1.26.4 2.0.0 2.0.1 2.0.2 2.1.0 2.1.1)
requests=(2.28.0 2.28.1 2.28.2 2.29.0 2.30.0 2.31.0 2.32.0 2.32.1 2.32.2 2.32.3)
for v in 0 1 2 3 4 5 6 7 8 9; do
  [ -d "$1/$v" ] && continue
  rm -rf "$1/$v.new"
  timeout 120 pip download -q --no-deps --only-binary :all: --python-version 3.11 --platform manylinux2014_x86_64 -d "$1/$v.new" \
    "numpy==${numpy[$v]}" "requests==${requests[$v]}" >&2
  mv "$1/$v.new" "$1/$v"
done
