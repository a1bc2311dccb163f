#!/bin/sh
# Builds a program for one machine: build.sh amd64 OUTPUT [init|call], init being the default. The same compiler makes the same octets.
set -eu
case "$1" in
amd64) cc=${CC:-x86_64-linux-gnu-gcc} ;;
*) echo "build.sh: no process 1 for $1 yet" >&2; exit 2 ;;
esac
exec "$cc" -std=gnu11 -Os -Wall -Wextra -Werror -march=x86-64 -mno-red-zone -ffreestanding -fno-stack-protector \
	-fno-asynchronous-unwind-tables -fno-unwind-tables -fno-pie -fno-ident -fcf-protection=none -fno-strict-aliasing -fno-tree-loop-distribute-patterns \
	-static -no-pie -nostdlib -s -Wl,--build-id=none -Wl,-z,noseparate-code -Wl,-z,norelro -Wl,-z,noexecstack \
	-Wl,-z,max-page-size=4096 -I"${0%/*}" -o "$2" "${0%/*}/${3:-init}.c"
