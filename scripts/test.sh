#!/usr/bin/env bash
# All tests: fast ones first, then those that need root and the real kernel, then whole programs. A skip whose reason is not on the list
# fails the run. Ends with one line "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp) turn=$(mktemp); trap 'rm -f "$out" "$turn"' EXIT
fail=0
step() { # name, command...
  echo "== $1"; shift
  "$@" || { fail=1; echo "FAILED: $*"; }
}
step vet go vet ./...
unformatted=$(git ls-files '*.go' | grep -v -E '\.pb\.go$|\.connect\.go$' | xargs -r gofmt -l)
[ -z "$unformatted" ] || { echo "gofmt would change: $unformatted"; fail=1; }
# One package at a time: two cores, and those that use the kernel measure what they leave behind. The next is built meanwhile. Tests that
# may run beside others mostly wait: three at once keep two processors busy.
limit=1600 each=20m
[ -z "${DSEC_TORTURE:-}" ] || { limit=0; each=48h; } # DSEC_TORTURE_FOR says how long the endless ones go on
timeout $limit go test -json -p 2 -parallel 3 -exec "flock -o $turn" -timeout $each ./... >"$out" 2>&1 || fail=1
go run ./scripts/report "$out" || fail=1
step python scripts/test_python.sh
step judge examples/judge/run.sh -n 100
exit $fail
