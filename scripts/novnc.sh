#!/usr/bin/env bash
# Fetches noVNC, which shows screens in a browser (docs/ops/desktop.md), from its npm package. A gateway finds it where this leaves it, by
# `[gateway] novnc`, or in STATE/novnc.
#
#   scripts/novnc.sh [folder]     (default: ${XDG_CACHE_HOME:-~/.cache}/dsec/novnc)
set -euo pipefail
out=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/dsec/novnc}
version=1.7.0
if [ "$(cat "$out/version" 2>/dev/null)" = "$version" ]; then
  echo "noVNC is there: $out ($version)"; exit 0
fi
command -v npm >/dev/null || { echo "missing: npm (package npm)" >&2; exit 1; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
(cd "$dir" && npm pack --silent "@novnc/novnc@$version" >/dev/null && tar -xzf ./*.tgz)
[ -s "$dir/package/core/rfb.js" ] || { echo "the package has no core/rfb.js" >&2; exit 1; }
echo "$version" >"$dir/package/version"
mkdir -p "$(dirname "$out")"
rm -rf "$out"
cp -r "$dir/package" "$out"
chmod -R a+rX "$out"
echo "$out ($version)"
