#!/usr/bin/env bash
# runsc.sh: builds gVisor's runsc into bin/, once, from its released module, outside of this module's go.mod. Takes minutes. A newer one:
# remove bin/runsc and name the module's version in RUNSC_VERSION (of its branch `go`).
set -euo pipefail
cd "$(dirname "$0")/.."
version=${RUNSC_VERSION:-v0.0.0-20260905035102-160fafc42237}
[ -x bin/runsc ] && exit 0
go=${GO:-go}
skip() {
	echo "runsc.sh: no runsc, and so no runtime gvisor: $1" >&2
	exit "${RUNSC_MISSING:-0}"
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bin=$PWD/bin
mkdir -p "$bin"
cd "$work"
printf 'module runsc.local\n' >go.mod
GOFLAGS=-mod=mod "$go" get "gvisor.dev/gvisor/runsc@$version" >get.log 2>&1 || skip "the module $version can't be had: $(tail -n 1 get.log)"
# With cgo it would be linked dynamically, and fail in the empty root that it makes for itself.
date=${version#v0.0.0-}
GOFLAGS=-mod=mod CGO_ENABLED=0 "$go" build -trimpath -ldflags "-s -w -X gvisor.dev/gvisor/runsc/version.version=release-${date:0:8}.0" \
	-o runsc gvisor.dev/gvisor/runsc >build.log 2>&1 || skip "it does not build: $(tail -n 1 build.log)"
./runsc --version >/dev/null || skip "it does not run here"
mv runsc "$bin/runsc"
echo "bin/runsc: $("$bin/runsc" --version | head -n 1)"
