#!/usr/bin/env bash
# Starts dsec on a state folder of its own, runs the example, and stops it again. Needs root and Go; the Makefile installed the rest.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v go >/dev/null || { echo "the demo needs Go (1.26 or later) in PATH" >&2; exit 1; }
[ "$(id -u)" -eq 0 ] || { echo "the demo needs root: sandboxes are made of mounts and namespaces" >&2; exit 1; }
dir=${DSEC_DEMO_DIR:-$(mktemp -d /var/tmp/dsec-demo.XXXXXX)}
run=$(mktemp -d /run/dsec-demo.XXXXXX)
up=
cleanup() {
  [ -n "$up" ] && kill -TERM "$up" 2>/dev/null && wait "$up" 2>/dev/null || true
  rm -rf "$run"
  [ -n "${DSEC_DEMO_DIR:-}" ] || rm -rf "$dir"
}
trap cleanup EXIT
conf=()
if [ -n "${DSEC_DEMO_RUNTIME:-}" ]; then # crun, runc or gvisor instead of dsec's own
  printf '[gateway]\nruntime = "%s"\n' "$DSEC_DEMO_RUNTIME" >"$run/dsec.toml"
  conf=(--config "$run/dsec.toml")
fi
bin/dsec up "${conf[@]}" --state "$dir" --run "$run" --listen "" --pool-size 12g >"$dir/up.log" 2>&1 &
up=$!
for _ in $(seq 1800); do [ -S "$run/dsec.sock" ] && [ -s "$run/key" ] && break; kill -0 "$up" 2>/dev/null || { cat "$dir/up.log" >&2; exit 1; }; sleep 0.1; done
export DSEC_URL="unix:$run/dsec.sock" DSEC_KEY_FILE="$run/key"
go run ./examples/swe "$@" || { echo "--- end of the service's log" >&2; tail -20 "$dir/up.log" >&2; exit 1; }
