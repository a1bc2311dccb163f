#!/usr/bin/env bash
# Makes the environment of the languages that come with dsec, with this machine's Go, once, or that of Java or Rust, and prints its file below the repository's root.
set -euo pipefail
cd "$(dirname "$0")/../.."
kind=${1:-go}  # go, java or rust: see scripts/fncall_env.sh
tar=bin/fncall/env-$(sha256sum scripts/fncall_env.sh | cut -c1-12)-$([ "$kind" = go ] && go env GOVERSION || echo "$kind").tar
mkdir -p bin/fncall
exec 9>bin/fncall/lock
flock 9
if [ ! -s "$tar" ]; then
  echo "making the environment of function calls from Debian's packages; a few minutes" >&2
  scripts/fncall_env.sh "$PWD/$tar.part" "$kind" >&2
  mv "$tar.part" "$tar"
fi
echo "$tar"
