#!/usr/bin/env bash
# Types, units and the run against a real server, in a venv of its own. The package is installed without network; mypy and pytest come
# from the index.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d -t dsec-python.XXXXXX)
trap 'rm -rf "$work"' EXIT
made=
for python in python3 /usr/bin/python3; do
  command -v "$python" >/dev/null || continue
  for make in "-m venv" "-m virtualenv"; do
    rm -rf "$work/venv"
    # shellcheck disable=SC2086
    if "$python" $make "$work/venv" >/dev/null 2>&1 && "$work/venv/bin/python" -m pip --version >/dev/null 2>&1; then made=1; break 2; fi
  done
done
[ -n "$made" ] || { echo "no python3 here can make a venv with pip (Debian: apt-get install python3-venv)" >&2; exit 1; }
py=$work/venv/bin/python
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
"$py" -m pip install --quiet mypy pytest
"$py" -m pip install --quiet --no-index --find-links /nonexistent .
cd "$work"   # the installed package is what is tested
"$py" -c 'import dsec, os, sys; assert "site-packages" in dsec.__file__ and os.path.exists(os.path.join(os.path.dirname(dsec.__file__), "py.typed"))'
"$py" -m mypy --strict --cache-dir "$work/mypy" -p dsec
"$py" -m mypy --strict --cache-dir "$work/mypy" "$OLDPWD/tests/typed_use.py"
exec_tests=("$OLDPWD/tests")
"$py" -m pytest --rootdir "$OLDPWD" -c "$OLDPWD/pyproject.toml" -rs --basetemp "$work/pytest" "${exec_tests[@]}" "$@"
