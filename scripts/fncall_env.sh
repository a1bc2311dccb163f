#!/usr/bin/env bash
# Makes the environment of the languages that come with dsec as a tar: fncall_env.sh OUTPUT [go | java | rust]. With "go" it has this
# machine's Go and a build cache of the standard library; "java" and "rust" are environments of their own, fncall-java and fncall-rust.
# Then: dsec layer build fncall --tar OUTPUT && dsec env create fncall --base fncall
set -euo pipefail
out=$1 go=${2:-}
case $go in
java) packages=bash,coreutils,default-jdk-headless ;;
rust) packages=bash,coreutils,rustc,gcc,libc6-dev ;;
"" | go) packages=bash,coreutils,gcc,g++,libc6-dev,python3,python3-pytest,nodejs ;;
*) echo "fncall_env.sh: want OUTPUT [go | java | rust], not $go" >&2; exit 2 ;;
esac
mirror=${DSEC_MIRROR:-/etc/apt/sources.list}
[ -s "$mirror" ] || [ -n "${DSEC_MIRROR:-}" ] || mirror=
tree=$(mktemp -d /tmp/dsec-fncall-env.XXXXXX)
trap 'rm -rf "$tree"' EXIT
# The JDK's packages link manual pages in a folder that they do not make.
mmdebstrap --quiet --variant=minbase --setup-hook='mkdir -p "$1/usr/share/man/man1"' --skip=output/dev --include="$packages" --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
	--dpkgopt='path-exclude=/usr/share/locale/*' "${DSEC_SUITE:-bookworm}" "$tree/root.tar" ${mirror:+"$mirror"}
if [ "$go" = go ]; then
	mkdir -p "$tree/go/usr/local/go" "$tree/go/var/cache/dsec"
	root=$(go env GOROOT)
	for d in bin pkg src lib VERSION go.env; do
		[ -e "$root/$d" ] && cp -a "$root/$d" "$tree/go/usr/local/go/"
	done
	rm -rf "$tree"/go/usr/local/go/src/cmd/*/testdata "$tree"/go/usr/local/go/src/*/testdata
	# The paths and the environment of the calls' compiler: they are part of what the cache goes by.
	mkdir "$tree/build"
	for f in 0 1; do
		env -i PATH=/usr/bin:/bin HOME="$tree/build" GOROOT= GOCACHE="$tree/go/var/cache/dsec/go-build" GOTOOLCHAIN=local GO111MODULE=off CGO_ENABLED=0 \
			GOTELEMETRY=off unshare -m sh -c "mkdir -p /usr/local/go; mount --bind '$tree/go/usr/local/go' /usr/local/go; cd '$tree/build'; /usr/local/go/bin/go build std" || { [ $f = 0 ] || exit 1; }
	done
	chmod -R a+rX "$tree/go"
	tar -C "$tree/go" --numeric-owner --owner=0 --group=0 -rf "$tree/root.tar" usr var
fi
mv "$tree/root.tar" "$out"
