#!/usr/bin/env bash
# Starts dsec on a state folder of its own, makes the judge's environment, judges Go's test programs and stops dsec again. Needs root and Go; the
# Makefile installed the rest. DSEC_JUDGE_ENV names a tar of scripts/fncall_env.sh that is there already.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v go >/dev/null || { echo "the judge needs Go (1.26 or later) in PATH" >&2; exit 1; }
[ "$(id -u)" -eq 0 ] || { echo "the judge needs root: calls run in namespaces of their own" >&2; exit 1; }
tar=${DSEC_JUDGE_ENV:-$(examples/judge/env.sh)}
dir=$(mktemp -d /var/tmp/dsec-judge.XXXXXX)
run=$(mktemp -d /run/dsec-judge.XXXXXX)
up=
cleanup() {
  [ -n "$up" ] && kill -TERM "$up" 2>/dev/null && wait "$up" 2>/dev/null || true
  umount -l "$dir/state/pool" 2>/dev/null || true # of a service that was killed
  rm -rf --one-file-system "$run" "$dir"
}
trap cleanup EXIT
cp examples/judge/languages.toml "$dir/"
printf '[fncall]\nlanguages = ["%s/languages.toml"]\n' "$dir" >"$dir/dsec.toml"
bin/dsec up --config "$dir/dsec.toml" --state "$dir/state" --run "$run" --listen "" --pool-size 4g >"$dir/up.log" 2>&1 &
up=$!
for _ in $(seq 1800); do [ -S "$run/dsec.sock" ] && [ -s "$run/key" ] && break; kill -0 "$up" 2>/dev/null || { cat "$dir/up.log" >&2; exit 1; }; sleep 0.1; done
export DSEC_URL="unix:$run/dsec.sock" DSEC_KEY_FILE="$run/key"
bin/dsec layer build fncall --tar "$tar"
bin/dsec env create fncall --base fncall
go run ./examples/judge "$@" || { echo "--- end of the service's log" >&2; tail -20 "$dir/up.log" >&2; exit 1; }
