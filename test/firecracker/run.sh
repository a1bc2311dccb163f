#!/usr/bin/env bash
# Runs dsec with the operator's Firecracker in a nested machine: QEMU emulates a processor with SVM (TCG), so the machine's own KVM works,
# and the machines that Firecracker runs in it are real ones. No KVM is needed here. docs/ops/firecracker.md.
#
#   DSEC_FIRECRACKER=.../firecracker DSEC_JAILER=.../jailer test/firecracker/run.sh [-t "suite machines ..."] [-r regexp] [-m MiB] [-c cpus] [-b "flags"]
#
# -t programs (see below), -r passed to -test.run instead of the program's own, -b the benchmark alone, with flags for it. Both programs have to be static. Each
# program has a nested machine of its own. When that is lost, as QEMU's emulation of SVM now and then does, another one goes on after the
# tests that have a verdict. Needs root, and a kernel for guests that is an ELF file (make guest-kernel). Exits 1 when a test failed or has no
# verdict; without a binary it says so and exits 0. Logs and what was seen lie apart for each version: two of them can run at once.
set -euo pipefail
cd "$(dirname "$0")/../.."

chosen="" filter="" memory=6000 cpus=1 bench=""
while getopts t:r:m:c:b: o; do
  case $o in t) chosen=$OPTARG ;; r) filter=$OPTARG ;; m) memory=$OPTARG ;; c) cpus=$OPTARG ;; b) bench="$OPTARG " ;; *) exit 2 ;; esac
done
if [ -z "${DSEC_FIRECRACKER:-}" ]; then
  echo "skip: DSEC_FIRECRACKER names no Firecracker program (and DSEC_JAILER no jailer): nothing was run"; exit 0
fi
for f in "$DSEC_FIRECRACKER" ${DSEC_JAILER:+"$DSEC_JAILER"}; do
  [ -x "$f" ] || { echo "no program: $f" >&2; exit 1; }
  ! ldd "$f" 2>/dev/null | grep -q '=>' || { echo "$f is not static: the nested machine has no libraries for it" >&2; exit 1; }
done
kernel=""
for k in "${DSEC_GUEST_KERNEL:-}" "${XDG_CACHE_HOME:-$HOME/.cache}/dsec/guest-kernel"; do
  [ -z "$kernel" ] && [ -n "$k" ] && [ -e "$k/vmlinux" ] && kernel=$k
done
[ -n "$kernel" ] || { echo "skip: no kernel for guests that Firecracker boots: make guest-kernel"; exit 0; }

cache=${DSEC_KERNELS:-${XDG_CACHE_HOME:-$HOME/.cache}/dsec/kernels}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
work=$(mktemp -d "$cache/run.XXXXXX")
qemu=""
trap '[ -z "$qemu" ] || kill "$qemu" 2>/dev/null || true; rm -rf "$work"' EXIT
. test/kernels/lib.sh
scripts/deps.sh qemu-system-x86_64:qemu-system-x86 mmdebstrap:mmdebstrap mke2fs:e2fsprogs depmod:kmod xz:xz-utils dpkg-deb:dpkg busybox:busybox-static
qemu_program=${DSEC_NESTED_QEMU:-qemu-system-x86_64}
cpu=max,+svm,+npt append="mitigations=off dsec.heartbeat" silence=90 rootimage=$cache/firecracker-root.img

# The programs. Name, test program, seconds, with the jailer or without, what is run; DSEC_PARTS are of the conformance suite.
programs() {
  cat <<'T'
suite1   real     1200 jail TestConformance birth,command,outcome,stdin
suite2   real     1200 jail TestConformance output,surroundings,terminal
suite3   real     1200 jail TestConformance session,pause,deadline,port
suite4   real     1200 jail TestConformance limit,snapshot,end,recovery,file
machines machines 1500 jail Test(Clones|Killed|Paused|Network|Saved|Crash) -
more     machines 1500 jail Test(Fork|Machines|Resume|Memory|Rates) -
real     real     1200 jail Test(Jail|Clones|Memory|DeadWarden) -
bare     real     900  bare TestConformance session,port,pause
bare2    machines 900  bare Test(Clones|Killed|Saved|Network) -
T
}

# With ICOUNT=shift=2,sleep=on the machine's clock counts its instructions, 4 ns each: on a busy host its processor is slow by everybody else's
# clock and not by its own, so that no bound in dsec or in a test depends on what else runs. It takes five times as long, by the host's clock,
# so what is bounded by that has slack; the machine's own clock bounds the tests, and silence ends one that hangs.
icount=${ICOUNT:-} slack=1
[ -z "$icount" ] || slack=6 silence=$((6 * silence))
machines=4 # for one program, when they are lost

# second makes the second disk: the programs, the modules, the plan.
second() { # name, tests that have a verdict
  local dir=$work/second release name program seconds jail run parts env
  rm -rf "$dir"; mkdir -p "$dir/tests" "$dir/modules" "$dir/firecracker"
  release=$(ls "$cache/bookworm/modules"); cp -a "$cache/bookworm/modules/$release" "$dir/modules/"
  cp "$DSEC_FIRECRACKER" "$dir/firecracker/firecracker"
  [ -z "${DSEC_JAILER:-}" ] || cp "$DSEC_JAILER" "$dir/firecracker/jailer"
  mkdir "$dir/kernel"; cp "$kernel/vmlinux" "$kernel/release" "$dir/kernel/"
  cp test/firecracker/prepare.sh internal/guest/binary/dist/dsec-guest internal/guest/binary/dist/dsec-guest-vm "$work"/bin/* "$dir/tests/"
  echo "prepare 60 /disk/tests /disk/tests/prepare.sh" >"$dir/plan"
  env="DSEC_GUEST_KERNEL=/disk/kernel DSEC_FIRECRACKER=/disk/firecracker/firecracker"
  if [ "$1" = bench ]; then
    printf 'firecracker = "/disk/firecracker/firecracker"\n%s' "${DSEC_JAILER:+jailer = \"/disk/firecracker/jailer\"}" | tr '\n' ';' >"$dir/tests/settings"
    echo "bench ${seconds_of_bench:-1500} /disk/tests /usr/bin/env $env DSEC=/disk/tests/dsec /disk/tests/bench-vm -prefix fc -plain=false -cpu 1 -settings $(cat "$dir/tests/settings" | tr -d ' ') $bench" >>"$dir/plan"
  else
    read -r name program seconds jail run parts < <(programs | awk -v n="$1" '$1 == n')
    if [ "$jail" = jail ] && [ -n "${DSEC_JAILER:-}" ]; then env+=" DSEC_JAILER=/disk/firecracker/jailer"; fi
    [ "$parts" = - ] || env+=" DSEC_PARTS=$parts"
    echo "$name $seconds /disk/tests /usr/bin/env $env /disk/tests/$program.test -test.v=test2json -test.timeout=${seconds}s -test.run=${filter:-$run}${2:+ -test.skip=$2}" >>"$dir/plan"
  fi
  truncate -s 16G "$work/second-bookworm.img"
  mke2fs -q -t ext4 -O quota,project -E quotatype=prjquota -d "$dir" -L second "$work/second-bookworm.img"
  rm -rf "$dir"
}

# nested runs one program, and sets out to its logs and said to its exit status; empty: the machine was lost.
nested() { # name, seconds, tests that have a verdict
  seconds=$((($2 + 120) * slack))
  initramfs bookworm
  second "$1" "${3:-}"
  boot bookworm || true
  said=$(awk -v n="$1" '$1 == "kernels:" && $2 == n {print $3}' "$out/console.log")
}

# verdicts of all machines of a program: "PASS TestA/part", each test once. Those of an unfinished test's parts count too.
verdicts() { # name
  find "$logs/$1" "$logs/$1".* -maxdepth 1 -name console.log -exec cat {} + 2>/dev/null | awk '$1 == "---" && $2 ~ /^(PASS|FAIL|SKIP):$/ {print substr($2, 1, 4), $3}' | sort -u || true
}

# persistent runs one program until it has ended, in a new machine each time that one is lost.
persistent() { # name, seconds
  local i have=""
  rm -rf "$logs/$1" "$logs/$1".*
  for i in $(seq "$machines"); do
    out=$logs/$1; [ "$i" = 1 ] || out+=.$i
    nested "$1" "$2" "$have"
    [ -z "$said" ] || return 0
    # Whole tests and their parts, whose names are one word: what lies below is run again.
    have=$(verdicts "$1" | awk '$2 ~ /^[A-Za-z0-9_]+(\/[A-Za-z0-9_]+)?$/ {gsub("/", "$/^", $2); printf "%s^%s$", sep, $2; sep = "|"}')
    echo "the nested machine was lost (the $i. of at most $machines)"
  done
}

echo "== build"
make -s guest
export CGO_ENABLED=0 GOARCH=amd64
go build -o "$work/init" ./test/kernels/init
mkdir -p "$work/bin"
if [ -n "$bench" ]; then
  go build -trimpath -ldflags '-s -w' -o "$work/bin/dsec" ./cmd/dsec
  go build -trimpath -ldflags '-s -w' -o "$work/bin/bench-vm" ./bench/vm
else
  go test -c -o "$work/bin/real.test" ./test/firecracker
  go test -c -o "$work/bin/machines.test" ./internal/backend/vm
fi
root "$rootimage"
fetch bookworm
version=$("$DSEC_FIRECRACKER" --version | awk 'NR == 1 {print $2}')
logs=$cache/out/firecracker/$version
mkdir -p "$logs"
about="Firecracker $version (sha256 $(sha256sum "$DSEC_FIRECRACKER" | cut -c 1-12)), $("$qemu_program" --version | awk 'NR == 1 {print "QEMU", $4}'), Debian's kernel $(ls "$cache/bookworm/modules"), guests' $(cat "$kernel/release"), dsec $(git describe --always --dirty 2>/dev/null || echo unknown)"
echo "$about"

# note keeps what was seen, each line with what it is about.
note() { echo "$1"; echo "$(date -u +%FT%TZ) $1; $about" >>"$logs/seen"; }

if [ -n "$bench" ]; then
  persistent bench "${seconds_of_bench:-1500}"
  while read -r line; do note "$line" >/dev/null; done < <(find "$logs"/bench* -maxdepth 1 -name console.log -exec grep -ahE '^[a-z]+\.[a-z0-9_.]+ [0-9.e+-]+ |^# ' {} +)
  note "bench $bench: exit ${said:-none}"
  [ "$said" = 0 ]
  exit
fi
fail=0
while read -r name _ seconds jail _; do
  [ -z "$chosen" ] || [[ " $chosen " == *" $name "* ]] || continue
  echo "== $name ($jail)"
  persistent "$name" "$seconds"
  all=$(verdicts "$name")
  count() { grep -c "^$1 " <<<"$all" || true; }
  note "$name: $(count PASS) passed, $(count FAIL) failed, $(count SKIP) skipped, exit ${said:-none}, machines $(ls -d "$logs/$name" "$logs/$name".* 2>/dev/null | wc -l)"
  [ "$said" = 0 ] && [ "$(count FAIL)" = 0 ] || fail=1
done < <(programs)
echo "logs: $logs"
exit $fail
