#!/usr/bin/env bash
# versitygw.sh: builds the S3 server that the tests of the store use beside their own, once, into bin/e2e. Takes minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x bin/e2e/versitygw ] && exit 0
mkdir -p bin/e2e
GOBIN=$PWD/bin/e2e GOFLAGS= "${GO:-go}" install github.com/versity/versitygw/cmd/versitygw@v1.8.0
