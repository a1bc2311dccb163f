#!/usr/bin/env bash
# Builds the small kernel for guests of microvm and vm: everything that a guest needs is built in, so no module is loaded at its start,
# and as an ELF file it is entered directly (PVH). From Debian's kernel source and scripts/kernel/guest.config; no network but the
# package mirror. The result is <folder>/{vmlinux,config,release}; a host takes it by `[vm] kernel` or from STATE/vm/kernel.
#
#   scripts/guest-kernel.sh [folder]     (default: ${XDG_CACHE_HOME:-~/.cache}/dsec/guest-kernel)
#
# JOBS sets the number of compilers (default: all processors). About 9 minutes on two processors.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/dsec/guest-kernel}
config=$PWD/scripts/kernel/guest.config
sum=$(sha256sum "$config" | cut -c1-16)
if [ -e "$out/vmlinux" ] && [ "$(cat "$out/made-from" 2>/dev/null)" = "$sum" ]; then
  echo "guest kernel is there: $out ($(cat "$out/release"))"; exit 0
fi
scripts/deps.sh gcc:gcc make:make flex:flex bison:bison bc:bc xz:xz-utils strip:binutils
if ! [ -e /usr/include/libelf.h ] || ! ls /usr/src/linux-source-*.tar.xz >/dev/null 2>&1; then
  [ "$(id -u)" -eq 0 ] || { echo "missing: libelf-dev linux-source (run as root, or install them)" >&2; exit 1; }
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libelf-dev linux-source >/dev/null
fi
tree=$(mktemp -d "${TMPDIR:-/var/tmp}/dsec-kernel.XXXXXX")
trap 'rm -rf "$tree"' EXIT
tar -C "$tree" --strip-components=1 -xf "$(ls /usr/src/linux-source-*.tar.xz | sort -V | tail -1)"
cd "$tree"
make -s tinyconfig
scripts/kconfig/merge_config.sh -m .config "$config" >/dev/null
make -s olddefconfig
# What the config asks for and the kernel did not take is told: a dependency has changed.
while IFS== read -r name value; do
  grep -qx "$name=$value" .config || echo "not taken: $name=$value"
done < <(grep '^CONFIG' "$config")
make -s -j"${JOBS:-$(nproc)}" vmlinux
mkdir -p "$out"
strip --strip-all -o "$out/vmlinux.new" vmlinux
cp .config "$out/config"
make -s kernelrelease >"$out/release"
echo "$sum" >"$out/made-from"
mv "$out/vmlinux.new" "$out/vmlinux"
echo "guest kernel: $out ($(cat "$out/release"), $(stat -c %s "$out/vmlinux") octets)"
