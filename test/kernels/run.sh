#!/usr/bin/env bash
# Runs the container backend's tests on Debian's own kernels, each in a QEMU machine (TCG: no KVM is needed) whose only cgroup
# hierarchy is v2, with memory, pids and cpu enabled, as on a host that Debian installs.
#
#   test/kernels/run.sh [-k "bookworm trixie backports"] [-t "container keeper upper ..."] [-r regexp] [-m MiB] [-c cpus] [-x module]
#
# -k kernels (bookworm 6.1, trixie 6.12, backports whatever is newest), -t test programs, -r passed to -test.run, -x a module that is left out. Packages are taken by
# apt from Debian's mirror into a folder of their own; nothing is installed over this machine's kernel. What was fetched and built is
# kept in ${DSEC_KERNELS:-~/.cache/dsec/kernels}. Needs root (the root file system has devices and owners). Exits 1 when a test failed.
set -euo pipefail
cd "$(dirname "$0")/../.."

kernels="bookworm trixie backports" tests="" filter="" memory=3072 cpus=2 without=""
while getopts k:t:r:m:c:x: o; do
  case $o in x) without=$OPTARG ;; k) kernels=$OPTARG ;; t) tests=$OPTARG ;; r) filter=$OPTARG ;; m) memory=$OPTARG ;; c) cpus=$OPTARG ;; *) exit 2 ;; esac
done
cache=${DSEC_KERNELS:-${XDG_CACHE_HOME:-$HOME/.cache}/dsec/kernels}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
work=$(mktemp -d "$cache/run.XXXXXX")
qemu=""
trap '[ -z "$qemu" ] || kill "$qemu" 2>/dev/null || true; rm -rf "$work"' EXIT

. test/kernels/lib.sh
scripts/deps.sh qemu-system-x86_64:qemu-system-x86 mmdebstrap:mmdebstrap mke2fs:e2fsprogs depmod:kmod xz:xz-utils dpkg-deb:dpkg busybox:busybox-static

# The programs under test. Name, package, seconds, further flags.
programs() {
  cat <<'T'
upper      ./internal/layer/upper            1200
erofs      ./internal/layer/erofs            900
layer      ./internal/layer                  1800
confine    ./internal/confine                600
keeper     ./internal/keeper                 1200
container  ./internal/backend/container      2400
runtimes   ./test/kernels/runtimes           1200
T
}

# tests makes the second disk: test programs with their folders, the modules, the plan.
second() { # kernel
  local dir="$work/second-$1" release name package seconds
  mkdir -p "$dir/tests" "$dir/modules"
  release=$(ls "$cache/$1/modules"); cp -a "$cache/$1/modules/$release" "$dir/modules/"
  [ -z "$without" ] || find "$dir/modules" -name "$without.ko*" -delete
  : >"$dir/plan"
  while read -r name package seconds; do
    [ -z "$tests" ] || [[ " $tests " == *" $name "* ]] || continue
    mkdir -p "$dir/tests/$name"
    ln "$work/bin/$name.test" "$dir/tests/$name/$name.test"
    cp internal/guest/binary/dist/dsec-guest "$dir/tests/$name/"
    [ ! -d "$package/testdata" ] || cp -a "$package/testdata" "$dir/tests/$name/"
    echo "$name $seconds /disk/tests/$name /disk/tests/$name/$name.test -test.v -test.timeout=${seconds}s ${filter:+-test.run=$filter}" >>"$dir/plan"
  done < <(programs)
  truncate -s 8G "$work/second-$1.img"
  # With project quotas, which init mounts on: they can't be tried where the kernel has none.
  mke2fs -q -t ext4 -O quota,project -E quotatype=prjquota -d "$dir" -L second "$work/second-$1.img"
  rm -rf "$dir"
}

echo "== build"
make -s guest
export CGO_ENABLED=0 GOARCH=amd64
go build -o "$work/init" ./test/kernels/init
mkdir -p "$work/bin"
while read -r name package _; do
  [ -z "$tests" ] || [[ " $tests " == *" $name "* ]] || continue
  go test -c -o "$work/bin/$name.test" "$package"
done < <(programs)
rootimage=$cache/root.img
root "$rootimage" nodejs,default-jre-headless

fail=0
for k in $kernels; do
  fetch "$k"
  initramfs "$k"
  second "$k"
  echo "== $k"
  out=$cache/out/$k${without:+-without-$without}
  boot "$k" || fail=1
  log=$out
  while read -r name _; do
    [ -z "$tests" ] || [[ " $tests " == *" $name "* ]] || continue
    line=$(grep -a "^kernels: $name " "$log/console.log" || true)
    f="$log/out/$name.log"; [ -e "$f" ] || f=/dev/null
    echo "$k $name: $(grep -cE '^ *--- PASS' "$f" || true) passed, $(grep -cE '^ *--- FAIL' "$f" || true) failed, $(grep -cE '^ *--- SKIP' "$f" || true) skipped, exit ${line##* }"
    [ "${line##* }" = 0 ] && [ -n "$line" ] || fail=1
  done < <(programs)
  echo "logs: $log"
done
exit $fail
