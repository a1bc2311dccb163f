#!/usr/bin/env bash
# Resets a whole machine in the midst of a load, again and again, and checks after each start that what was acknowledged with durability
# host is there, that nothing of before is in the way, and that all works: test/e2e TestMachineReset. The machine is QEMU (TCG) with a
# kernel of Debian's; a reset is the end of QEMU by kill -9: what the machine's kernel had not written to its disk is lost.
#
#   test/kernels/reset.sh [-n resets] [-k kernel] [-m MiB] [-c cpus] [-b path of dsec]
#
# What was fetched and built is kept as for run.sh beside it. Needs root. Exits 1 when a life failed; its console is shown.
set -euo pipefail
cd "$(dirname "$0")/../.."

n=5 k=bookworm memory=3072 cpus=2 dsec=bin/dsec
while getopts n:k:m:c:b: o; do
  case $o in n) n=$OPTARG ;; k) k=$OPTARG ;; m) memory=$OPTARG ;; c) cpus=$OPTARG ;; b) dsec=$OPTARG ;; *) exit 2 ;; esac
done
cache=${DSEC_KERNELS:-${XDG_CACHE_HOME:-$HOME/.cache}/dsec/kernels}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
work=$(mktemp -d "$cache/reset.XXXXXX")
qemu=""
# What was started is timeout, whose child the machine is; a signal that can't be caught has to go to that.
end() { [ -z "$qemu" ] || { pkill -KILL -P "$qemu" || true; wait "$qemu" || true; qemu=""; } 2>/dev/null; }
trap 'end; rm -rf "$work"' EXIT

. test/kernels/lib.sh
scripts/deps.sh qemu-system-x86_64:qemu-system-x86 mmdebstrap:mmdebstrap mke2fs:e2fsprogs depmod:kmod xz:xz-utils dpkg-deb:dpkg busybox:busybox-static
[ -x "$dsec" ] || { echo "reset: $dsec is missing; make build" >&2; exit 1; }
CGO_ENABLED=0 go build -o "$work/init" ./test/kernels/init
CGO_ENABLED=0 go test -c -o "$work/e2e.test" ./test/e2e
rootimage=$cache/root.img
root "$rootimage" nodejs,default-jre-headless
fetch "$k"
initramfs "$k"

# The second disk: the programs, and all that dsec keeps. The third, which the machine reads alone: what it told.
disk="$work/second" release=$(ls "$cache/$k/modules")
mkdir -p "$disk/tests" "$disk/modules"
cp -a "$cache/$k/modules/$release" "$disk/modules/"
cp "$work/e2e.test" "$dsec" "$disk/tests/"
cat >"$disk/tests/life" <<'T'
#!/bin/sh
if grep -q dsec.last /proc/cmdline; then export DSEC_RESET_LAST=1; fi
DSEC_E2E_BIN=/disk/tests/dsec DSEC_RESET=/disk/dsec DSEC_RESET_TOLD=/dev/vdc exec ./e2e.test -test.v -test.timeout=110m -test.run='^TestMachineReset$'
T
chmod +x "$disk/tests/life"
echo "reset 7000 /disk/tests /disk/tests/life" >"$disk/plan"
truncate -s 12G "$work/second-$k.img"
mke2fs -q -t ext4 -O quota,project -E quotatype=prjquota -d "$disk" -L second "$work/second-$k.img"
rm -rf "$disk"

: >"$work/told"
console="$work/console-$k"
for i in $(seq 1 $((n + 1))); do
  { cat "$work/told"; echo; } >"$work/third.img"
  truncate -s %1M "$work/third.img"
  append=
  [ "$i" -le "$n" ] || append=dsec.last
  start "$k" -drive "file=$work/third.img,format=raw,if=virtio,readonly=on"
  facts() { grep -ac '^# reset: ' "$console" || true; }
  until grep -aqE '^kernels: reset ' "$console" || ! kill -0 "$qemu" 2>/dev/null || { [ "$i" -le "$n" ] && [ "$(facts)" -ge 20 ]; }; do sleep 1; done
  if [ "$i" -le "$n" ] && kill -0 "$qemu" 2>/dev/null && ! grep -aqE '^kernels: reset ' "$console"; then
    sleep "$((RANDOM % 20)).$((RANDOM % 10))"
    end
    echo "life $i: reset after $(facts) facts; $(grep -aoE '[0-9]+ facts of earlier lives hold' "$console" || echo "earlier ones were not looked at")"
  else
    wait "$qemu" || true
    qemu=""
  fi
  tr -d '\r' <"$console" | grep -a '^# reset: ' >>"$work/told" || true
  mkdir -p "$cache/out/reset"
  tr -d '\r' <"$console" >"$cache/out/reset/life-$i.log"
  if grep -aqE '^kernels: (reset [^0]|.*failed)|^ *--- FAIL|panic:' "$console" || { [ "$i" -gt "$n" ] && ! grep -aq '^kernels: reset 0' "$console"; }; then
    tail -n 80 "$cache/out/reset/life-$i.log"
    debugfs -R "cat out/reset.log" "$work/second-$k.img" 2>/dev/null | tail -n 60
    echo "life $i failed"
    exit 1
  fi
done
echo "$n resets, $(wc -l <"$work/told") facts: all hold"
