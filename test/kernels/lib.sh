# Functions for tests in QEMU machines with Debian's kernels; sourced by run.sh beside it and by test/firecracker/run.sh. They want these
# variables: cache (a folder that stays), work (one that does not), memory (MiB), cpus, rootimage (the first disk); and take
# qemu_program, cpu, append (of the kernel's command line), seconds, silence (a bound on that of the console, in seconds of the machine's
# processor time) and out (a
# folder for logs).

# Debian's mirror: what the environment says, else the first of this machine's own sources.
mirror=${DSEC_DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | awk '/\/debian\/?$/ && !n++ {sub("/$", ""); print}')}
[ -n "$mirror" ] || { echo "apt has no source whose address ends in /debian; DSEC_DEBIAN_MIRROR names a mirror" >&2; exit 1; }

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

# root makes the first disk: a Debian with the tools that the host needs. With more, /runtimes is another one with these packages: it is
# trixie, since node of bookworm knows cgroup v1 alone.
root() { # image, packages of /runtimes or nothing
  [ -e "$1" ] && return
  echo "== make the root"
  debian bookworm "$work/root" busybox-static,btrfs-progs,e2fsprogs,erofs-utils,nftables,iproute2,kmod,procps
  [ -z "${2:-}" ] || debian trixie "$work/root/runtimes" "$2"
  mkdir -p "$work/root/disk" "$work/root/lib/modules"
  truncate -s 2G "$work/root.img"
  mke2fs -q -t ext4 -d "$work/root" -L root "$work/root.img"
  mv "$work/root.img" "$1"
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

# watch ends a machine that hangs: its console has been silent for seconds of processor time, or for as long by the clock while it wanted no
# processor, or ten times as long by the clock. With dsec.heartbeat process 1 says every 10 s that it lives. By the clock alone a busy host
# would look like a machine that hangs.
watch() { # console, pid, seconds
  local at=0 cpu=0 idle=0 now ticks machine
  ticks=$(getconf CLK_TCK)
  while sleep 2; do
    machine=$(pgrep -P "$2" | head -n 1) || true # what is awaited is timeout, whose child it is
    now=$(awk '{sub(/.*\) /, ""); print $12 + $13}' "/proc/${machine:-$2}/stat" 2>/dev/null) || return 0
    [ -n "$now" ] || return 0
    if [ "$(stat -c %Y "$1")" != "$at" ]; then at=$(stat -c %Y "$1") cpu=$now idle=0; fi
    # One of its threads that waits for a processor is not idle.
    if grep -qs '^State:.[RD]' "/proc/${machine:-$2}"/task/*/status; then idle=0; else idle=$((idle + 2)); fi
    if [ $(((now - cpu) / ticks)) -gt "$3" ] || [ $idle -gt "$3" ] || [ $(($(date +%s) - at)) -gt $((10 * $3)) ]; then
      echo "silent for $(((now - cpu) / ticks)) s of its processor, $(($(date +%s) - at)) s by the clock: ended"; kill "$2"; return 0
    fi
  done
}

# start begins a kernel with the first and the second disk, and more drives if given; qemu is its pid. cpu and append say what it has beyond
# the default.
start() { # kernel, more arguments of QEMU
  local k=$1 khz
  shift
  khz=$(awk '/^cpu MHz/ {printf "%d", $4 * 1000; exit}' /proc/cpuinfo)
  local accel=tcg,thread=multi,tb-size=512
  if [ -n "${icount:-}" ]; then accel=tcg,thread=single,tb-size=512 khz=1000000; fi
  # tsc hints: without them the clock's calibration under TCG fails now and then, and the machine never boots.
  timeout "${seconds:-5400}" ${qemu_program:-qemu-system-x86_64} -nodefaults -no-user-config -display none -no-reboot -accel "$accel" ${icount:+-icount "$icount"} -M q35 -cpu "${cpu:-max}" \
    -smp "$cpus" -m "$memory" -kernel "$cache/$k/vmlinuz" -initrd "$work/initramfs-$k.img" -serial stdio \
    -append "console=ttyS0 quiet panic=-1 tsc_early_khz=${khz:-2500000} no_timer_check tsc=reliable net.ifnames=0 ${append:-}" \
    -drive "file=$rootimage,format=raw,if=virtio,snapshot=on" -drive "file=$work/second-$k.img,format=raw,if=virtio,cache=unsafe" "$@" \
    </dev/null >"$work/console-$k" 2>&1 &
  qemu=$!
}

# boot runs a kernel until it powers off.
boot() { # kernel
  local k=$1 status=0
  start "$k"
  [ -z "${silence:-}" ] || watch "$work/console-$k" "$qemu" "$silence" &
  tail -n +1 --pid=$qemu -f "$work/console-$k" | sed -u 's/\r$//' | grep --line-buffered -aE '^(kernels:|.*seen: |# |bench|[a-z]+\.[a-z0-9_.]+ [0-9.e+-]+ |FAIL|panic:|fatal error| *--- (FAIL|SKIP)|--- )|Oops|BUG:|Kernel panic' &
  local show=$!
  wait "$qemu" || status=$? # a signal is heeded in a wait, so the machine never outlives this
  wait "$show" || true
  qemu=""
  local logs=${out:-$cache/out/$k}
  rm -rf "$logs"; mkdir -p "$logs"
  tr -d '\r' <"$work/console-$k" >"$logs/console.log"
  debugfs -R "rdump out $logs" "$work/second-$k.img" >/dev/null 2>&1 || true
  rm -f "$work/second-$k.img" "$work/initramfs-$k.img"
  [ $status -eq 0 ] || { echo "QEMU ended with $status"; tail -n 30 "$logs/console.log"; return 1; }
  return 0
}
