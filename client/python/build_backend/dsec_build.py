"""The build backend of this package alone (PEP 517, PEP 660), so that `pip install` works without network: it needs nothing but Python.

It reads the `[project]` table of pyproject.toml, whose values are strings and lists of strings, packs `dsec/` and makes the same octets
from the same tree every time.
"""

import ast
import base64
import hashlib
import io
import os
import re
import tarfile
import zipfile

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STAMP = (2026, 1, 1, 0, 0, 0)


def project():
    out, inside = {}, False
    with open(os.path.join(HERE, "pyproject.toml"), encoding="utf-8") as f:
        for line in f:
            if line.startswith("["):
                inside = line.strip() == "[project]"
            elif inside and "=" in line:
                name, value = line.split("=", 1)
                out[name.strip()] = ast.literal_eval(value.strip())
    return out


def metadata():
    p = project()
    lines = ["Metadata-Version: 2.1", f"Name: {p['name']}", f"Version: {p['version']}", f"Summary: {p['description']}"]
    lines += [f"License: {p['license']}", f"Keywords: {','.join(p['keywords'])}", f"Requires-Python: {p['requires-python']}"]
    lines += [f"Classifier: {c}" for c in p["classifiers"]]
    lines += [f"Requires-Dist: {d}" for d in p["dependencies"]]
    with open(os.path.join(HERE, p["readme"]), encoding="utf-8") as f:
        return "\n".join(lines) + "\nDescription-Content-Type: text/markdown\n\n" + f.read()


def sources():
    found = []
    for folder, dirs, names in os.walk(os.path.join(HERE, "dsec")):
        dirs[:] = sorted(d for d in dirs if d != "__pycache__")
        found += [os.path.relpath(os.path.join(folder, n), HERE) for n in names if n.endswith((".py", ".typed"))]
    return sorted(found)


def read(path):
    with open(os.path.join(HERE, path), "rb") as f:
        return f.read()


def wheel(folder, files):
    p = project()
    base = f"{p['name']}-{p['version']}"
    info = f"{base}.dist-info"
    files = dict(files)
    files[f"{info}/METADATA"] = metadata().encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: dsec_build\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    name = f"{base}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w", zipfile.ZIP_DEFLATED) as z:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, STAMP)
            entry.external_attr, entry.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            z.writestr(entry, data)
    return name


def get_requires_for_build_wheel(config_settings=None):
    return []


get_requires_for_build_sdist = get_requires_for_build_editable = get_requires_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return wheel(wheel_directory, {path.replace(os.sep, "/"): read(path) for path in sources()})


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return wheel(wheel_directory, {"dsec_editable.pth": (HERE + "\n").encode()})


def build_sdist(sdist_directory, config_settings=None):
    p = project()
    base = f"{re.sub('[^A-Za-z0-9]+', '_', p['name'])}-{p['version']}"
    files = {path: read(path) for path in sources() + ["pyproject.toml", "README.md", os.path.join("build_backend", "dsec_build.py")]}
    files["PKG-INFO"] = metadata().encode()
    with tarfile.open(os.path.join(sdist_directory, base + ".tar.gz"), "w:gz", format=tarfile.PAX_FORMAT) as t:
        for path, data in sorted(files.items()):
            entry = tarfile.TarInfo(f"{base}/{path}")
            entry.size, entry.mode = len(data), 0o644
            t.addfile(entry, io.BytesIO(data))
    return base + ".tar.gz"
