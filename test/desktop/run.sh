#!/usr/bin/env bash
# A desktop from Debian's packages in a sandbox: opens an editor, clicks, types, saves, and compares the file and the pictures. The last
# picture stays in bin/desktop/after.png. Needs root; docs/ops/desktop.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p bin/desktop
tar=bin/desktop/env-$(sha256sum test/desktop/run.sh | cut -c1-12).tar
if [ ! -s "$tar" ]; then
  echo "making a desktop from Debian's packages; a minute" >&2
  mmdebstrap --quiet --variant=minbase --skip=output/dev --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --include=tigervnc-standalone-server,mousepad,dbus-x11,fonts-dejavu-core "${DSEC_SUITE:-bookworm}" "${tar%.tar}.part.tar" ${DSEC_MIRROR:+"$DSEC_MIRROR"}
  mv "${tar%.tar}.part.tar" "$tar"
fi
dir=$(mktemp -d /var/tmp/dsec-desktop.XXXXXX) run=$(mktemp -d /run/dsec-desktop.XXXXXX) up=
cleanup() {
  [ -n "$up" ] && kill -TERM "$up" 2>/dev/null && wait "$up" 2>/dev/null || true
  rm -rf "$run" "$dir"
}
trap cleanup EXIT
bin/dsec up --state "$dir" --run "$run" --listen "" --pool-size 3g >"$dir/up.log" 2>&1 &
up=$!
for _ in $(seq 300); do [ -S "$run/dsec.sock" ] && [ -s "$run/key" ] && break; kill -0 "$up" 2>/dev/null || { cat "$dir/up.log" >&2; exit 1; }; sleep 0.1; done
export DSEC_URL="unix:$run/dsec.sock" DSEC_KEY_FILE="$run/key"
bin/dsec layer build desktop --tar "$tar"
bin/dsec env create desktop --base desktop
id=$(bin/dsec create -e desktop -m 1g)
bin/dsec exec "$id" -- sh -c 'Xvnc :1 -rfbport 5900 -localhost -SecurityTypes None -geometry 800x600 >/tmp/x.log 2>&1 & DISPLAY=:1 HOME=/root
  export DISPLAY HOME; for i in $(seq 100); do [ -S /tmp/.X11-unix/X1 ] && break; sleep 0.1; done; mousepad /root/note.txt >/tmp/editor.log 2>&1 &'
text=$'Typed by an agent: 3 * 4 = 12.\nSecond line: ÄÖ€'
shot() { bin/dsec screen shot "$id" "bin/desktop/$1.png" >/dev/null; }
# The editor is there when the picture is another than that of an empty screen, and stays the same.
shot empty
for _ in $(seq 60); do sleep 0.5; shot before; cmp -s bin/desktop/empty.png bin/desktop/before.png || break; done
sleep 2; shot before
bin/dsec screen click "$id" 300 250
bin/dsec screen type "$id" "$text"
sleep 1; shot after
bin/dsec screen key "$id" ctrl s
saved=
for _ in $(seq 50); do saved=$(bin/dsec exec "$id" -- cat /root/note.txt 2>/dev/null || true); [ "$saved" = "$text" ] && break; sleep 0.2; done
[ "$saved" = "$text" ] || { echo "the editor saved ${saved@Q}, want ${text@Q}" >&2; exit 1; }
cmp -s bin/desktop/before.png bin/desktop/after.png && { echo "the picture does not show what was typed" >&2; exit 1; }
bin/dsec stop "$id" >/dev/null
echo "an editor in a sandbox took what was typed; see bin/desktop/after.png"
