#!/usr/bin/env bash
# Runs the container backend's tests on Debian's own kernels, each in a QEMU machine (TCG: no KVM is needed) whose only cgroup
# hierarchy is v2, with memory, pids and cpu enabled, as on a host that Debian installs.
#
#   test/kernels/run.sh [-k "bookworm trixie backports"] [-t "container keeper upper ..."] [-r regexp] [-m MiB] [-c cpus]
#
# -k kernels (bookworm 6.1, trixie 6.12, backports whatever is newest), -t test programs, -r passed to -test.run. Packages are taken by
# apt from Debian's mirror into a folder of their own; nothing is installed over this machine's kernel. What was fetched and built is
# kept in ${DSEC_KERNELS:-~/.cache/dsec/kernels}. Needs root (the root file system has devices and owners). Exits 1 when a test failed.
set -euo pipefail
cd "$(dirname "$0")/../.."

kernels="bookworm trixie backports" tests="" filter="" memory=3072 cpus=2
while getopts k:t:r:m:c: o; do
  case $o in k) kernels=$OPTARG ;; t) tests=$OPTARG ;; r) filter=$OPTARG ;; m) memory=$OPTARG ;; c) cpus=$OPTARG ;; *) exit 2 ;; esac
done
mirror=${DSEC_DEBIAN_MIRROR:-http://deb.debian.org/debian}
cache=${DSEC_KERNELS:-${XDG_CACHE_HOME:-$HOME/.cache}/dsec/kernels}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
work=$(mktemp -d "$cache/run.XXXXXX")
qemu=""
trap '[ -z "$qemu" ] || kill "$qemu" 2>/dev/null || true; rm -rf "$work"' EXIT

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

apt() { # command of apt, arguments: with sources and lists of its own
  local cmd=$1; shift
  "$cmd" -o Dir::Etc::sourcelist="$cache/apt/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$cache/apt/lists" \
    -o Dir::Cache="$cache/apt/cache" -o APT::Sandbox::User=root "$@"
}

suite() { case $1 in backports) echo trixie-backports ;; *) echo "$1" ;; esac; }

# fetch leaves a kernel's files in $cache/<kernel>/{vmlinuz,modules/<release>}.
fetch() {
  local k=$1 suite version image packages d
  [ -e "$cache/$k/vmlinuz" ] && return
  suite=$(suite "$k")
  if [ ! -e "$cache/apt/ready" ]; then
    mkdir -p "$cache/apt/lists/partial" "$cache/apt/cache/archives/partial"
    for s in bookworm trixie trixie-backports; do echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $s main"; done >"$cache/apt/sources.list"
    apt apt-get update -qq
    touch "$cache/apt/ready"
  fi
  version=$(apt apt-cache madison linux-image-cloud-amd64 | awk -v s="$suite/main" '$6 == s && !n++ {print $3}')
  image=$(apt apt-cache show "linux-image-cloud-amd64=$version" | awk '!n && match($0, /linux-image-[0-9][^ ,]*/) {n = 1; print substr($0, RSTART, RLENGTH)}')
  # Newer releases split the image: boot file, modules and their lists lie in packages beside it.
  packages=$image
  for d in linux-base linux-binary linux-modules; do
    if apt apt-cache show "$d-${image#linux-image-}" >/dev/null 2>&1; then packages+=" $d-${image#linux-image-}"; fi
  done
  echo "== fetch $packages ($version)"
  rm -rf "$cache/$k"; mkdir -p "$cache/$k/deb" "$cache/$k/tree" "$cache/$k/modules"
  (cd "$cache/$k/deb" && apt apt-get download -qq $packages)
  for d in "$cache/$k"/deb/*.deb; do dpkg-deb -x "$d" "$cache/$k/tree"; done
  find "$cache/$k/tree" -name 'vmlinuz*' -type f -exec mv {} "$cache/$k/vmlinuz.new" \;
  find "$cache/$k/tree" \( -name 'config-*' -o -name config \) -type f -exec cp {} "$cache/$k/config" \;
  for d in "$cache/$k"/tree/lib/modules/* "$cache/$k"/tree/usr/lib/modules/*; do
    [ -d "$d/kernel" ] && mv "$d" "$cache/$k/modules/"
  done
  find "$cache/$k/modules" -name '*.ko.xz' -exec xz -d {} +
  mkdir -p "$cache/$k/base/lib"; ln -s ../../modules "$cache/$k/base/lib/modules"
  depmod -b "$cache/$k/base" "$(ls "$cache/$k/modules")"
  rm -rf "$cache/$k/deb" "$cache/$k/tree"
  mv "$cache/$k/vmlinuz.new" "$cache/$k/vmlinuz" # last: it says that all is there
}

# root makes the first disk: a Debian with the tools that the host needs, and in /runtimes another one with programs that size
# themselves by their limits. That one is trixie: node of bookworm knows cgroup v1 alone.
root() {
  [ -e "$cache/root.img" ] && return
  echo "== make the root"
  debian bookworm "$work/root" busybox-static,btrfs-progs,e2fsprogs,erofs-utils,nftables,iproute2,kmod,procps
  debian trixie "$work/root/runtimes" nodejs,default-jre-headless
  mkdir -p "$work/root/disk" "$work/root/lib/modules"
  truncate -s 2G "$work/root.img"
  mke2fs -q -t ext4 -d "$work/root" -L root "$work/root.img"
  mv "$work/root.img" "$cache/root.img"
  rm -rf "$work/root"
}

debian() { # suite, folder, packages
  mmdebstrap --quiet --format=directory --variant=minbase --aptopt='Apt::Install-Recommends "false"' --include="$3" \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    "$1" "$2" "deb $mirror $1 main"
  rm -rf "$2"/var/lib/apt/lists/* "$2"/var/cache/apt/* "$2"/dev/*
}

initramfs() { # kernel
  local dir="$work/initramfs-$1" modules release n=10 m
  release=$(ls "$cache/$1/modules"); modules="$cache/$1/modules/$release"
  mkdir -p "$dir/modules" "$dir/new" "$dir/proc" "$dir/sys" "$dir/dev"
  cp "$work/init" "$dir/init"
  for m in virtio_pci virtio_blk quota_v2; do
    for f in $(awk -F: -v m="/$m.ko" 'index($1, m) {n = split($2, d, " "); for (i = n; i > 0; i--) print d[i]; print $1}' "$modules/modules.dep"); do
      [ -n "$(find "$dir/modules" -name "*-$(basename "$f")")" ] || cp "$modules/$f" "$dir/modules/$((n++))-$(basename "$f")"
    done
  done
  (cd "$dir" && find . | busybox cpio -o -H newc 2>/dev/null) >"$work/initramfs-$1.img"
}

# tests makes the second disk: test programs with their folders, the modules, the plan.
second() { # kernel
  local dir="$work/second-$1" release name package seconds
  mkdir -p "$dir/tests" "$dir/modules"
  release=$(ls "$cache/$1/modules"); cp -a "$cache/$1/modules/$release" "$dir/modules/"
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

boot() { # kernel
  local k=$1 khz status=0
  khz=$(awk '/^cpu MHz/ {printf "%d", $4 * 1000; exit}' /proc/cpuinfo)
  # tsc hints: without them the clock's calibration under TCG fails now and then, and the machine never boots.
  timeout 5400 qemu-system-x86_64 -nodefaults -no-user-config -display none -no-reboot -accel tcg,thread=multi,tb-size=512 -M q35 -cpu max \
    -smp "$cpus" -m "$memory" -kernel "$cache/$k/vmlinuz" -initrd "$work/initramfs-$k.img" -serial stdio \
    -append "console=ttyS0 quiet panic=-1 tsc_early_khz=${khz:-2500000} no_timer_check tsc=reliable net.ifnames=0" \
    -drive "file=$cache/root.img,format=raw,if=virtio,snapshot=on" -drive "file=$work/second-$k.img,format=raw,if=virtio,cache=unsafe" \
    </dev/null >"$work/console-$k" 2>&1 &
  qemu=$!
  tail -n +1 --pid=$qemu -f "$work/console-$k" | sed -u 's/\r$//' | grep --line-buffered -aE '^(kernels:|seen: |FAIL|panic:|fatal error| *--- (FAIL|SKIP)|--- )|Oops|BUG:|Kernel panic' || true
  wait "$qemu" || status=$?
  qemu=""
  out=$cache/out/$k; rm -rf "$out"; mkdir -p "$out"
  tr -d '\r' <"$work/console-$k" >"$out/console.log"
  debugfs -R "rdump out $out" "$work/second-$k.img" >/dev/null 2>&1 || true
  rm -f "$work/second-$k.img" "$work/initramfs-$k.img"
  [ $status -eq 0 ] || { echo "QEMU ended with $status"; tail -n 30 "$out/console.log"; return 1; }
  return 0
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
root

fail=0
for k in $kernels; do
  fetch "$k"
  initramfs "$k"
  second "$k"
  echo "== $k"
  boot "$k" || fail=1
  log="$cache/out/$k"
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
