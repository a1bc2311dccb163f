#!/usr/bin/env bash
# run.sh create|exec|idle|trajectory|dedup|images|burst|fncall|vm|firecracker [N]: one benchmark on a dsec of its own. Figures on standard output, remarks on standard error.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-} n=${2:-} program=${1:-}
case "$what" in
  create) scripts/deps.sh crun:crun runc:runc containerd:containerd ctr:containerd; args=() ;;
  exec) args=() ;;
  trajectory) args=(${n:+-steps "$n"}) ;;
  idle) args=(${n:+"$n"}) ;;
  dedup) # ten versions of one environment: real ones when pip gets them, else edited files
    base=${DSEC_BENCH_BASE:-$(ls -S bin/e2e/debian-*.tar 2>/dev/null | head -n 1)}
    [ -n "$base" ] || { echo "bench: no Debian tree; DSEC_BENCH_BASE names a tar, make test makes one" >&2; exit 1; }
    args=(-base "$base")
    scripts/bench_wheels.sh bin/bench-wheels && args+=(-wheels bin/bench-wheels) || echo "# no wheels: files are edited instead" >&2 ;;
  images) scripts/deps.sh mmdebstrap:mmdebstrap; args=() ;;
  vm) scripts/deps.sh qemu-system-x86_64:qemu-system-x86 mkfs.ext4:e2fsprogs busybox:busybox-static
    debian=${XDG_CACHE_HOME:-$HOME/.cache}/dsec/debian-kernel # with which the same is measured, and plain QEMU
    env -u DSEC_GUEST_KERNEL scripts/debian-kernel.sh "$debian" >&2 || { echo "# no kernel of Debian's: nothing is measured with it" >&2; debian=; }
    args=(${n:+-clones "$n"} ${debian:+-debian "$debian"}) ;;
  firecracker) # in a nested machine
    exec test/firecracker/run.sh -m "${MEMORY:-6000}" -b "-clones ${n:-30} ${BENCH_FLAGS:-}" ;;
  fncall) scripts/deps.sh crun:crun bwrap:bubblewrap mmdebstrap:mmdebstrap gcc:gcc # python and C++ on an environment that is made once
    env=bin/fncall-env.tar; [ -f "$env" ] || scripts/fncall_env.sh "$env" || env=
    args=(${env:+-env "$env"}) ;;
  burst) scripts/deps.sh mmdebstrap:mmdebstrap; args=(-burst) program=images ;;
  *) echo "usage: make bench B=create|exec|idle|trajectory|dedup|images|burst|fncall|vm|firecracker [N=1000]" >&2; exit 2 ;;
esac
[ -x "${DSEC:-bin/dsec}" ] || { echo "bench: ${DSEC:-bin/dsec} is missing; make build" >&2; exit 1; }
CGO_ENABLED=0 ${GO:-go} build -o "bin/bench-$program" "./bench/$program"
exec "bin/bench-$program" ${args[@]+"${args[@]}"} ${BENCH_FLAGS:-}
