#!/usr/bin/env bash
# Installs what the tests, the demo and the benchmarks use from Debian's packages. Does nothing where all is there.
set -euo pipefail
need=()
for pair in mmdebstrap:mmdebstrap fsck.erofs:erofs-utils mkfs.btrfs:btrfs-progs nft:nftables ip:iproute2 busybox:busybox-static gcc:gcc setfattr:attr "$@"; do
  command -v "${pair%%:*}" >/dev/null || need+=("${pair##*:}")
done
[ ${#need[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ]; then echo "missing: ${need[*]} (run as root, or install them)" >&2; exit 1; fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${need[@]}" >/dev/null
