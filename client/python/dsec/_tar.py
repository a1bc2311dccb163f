"""A folder as a tar (PAX), piece by piece; files are never held whole.

It carries what a sandbox needs to see the same tree: names of any octets, modes, times to the nanosecond, links, hard links, FIFOs, and the
extended attributes user.* and security.capability. Sockets and what can't be read are left out and told.
"""

from __future__ import annotations

import os
import stat
import tarfile
from typing import Dict, Iterator, List, Optional, Tuple

from ._octets import decode

PIECE = 256 << 10
END = b"\0" * 1024


def pack(root: str, at: str = "", skipped: Optional[List[str]] = None) -> Iterator[bytes]:
    """The tar of a folder, with names below `at` ("" is the tar's own root); of a file, under the name `at`."""
    notes: List[str] = [] if skipped is None else skipped
    seen: Dict[Tuple[int, int], str] = {}
    top = os.stat(root)
    prefix = at.strip("/")
    if not stat.S_ISDIR(top.st_mode):
        yield from _entry(root, prefix or os.path.basename(root), os.lstat(root) if not os.path.islink(root) else top, seen, notes)
        yield END
        return
    parts = prefix.split("/") if prefix else []
    for i in range(len(parts) - 1):
        yield _header("/".join(parts[: i + 1]) + "/", top, tarfile.DIRTYPE, mode=0o755)
    yield _header((prefix + "/") if prefix else "./", top, tarfile.DIRTYPE)
    yield from _folder(root, prefix, seen, notes)
    yield END


def _folder(path: str, name: str, seen: Dict[Tuple[int, int], str], skipped: List[str]) -> Iterator[bytes]:
    # A stack and not recursion: depth is the user's.
    stack: List[Iterator[Tuple[str, str, os.stat_result]]] = [iter(_entries(path, name, skipped))]
    while stack:
        for below, inner, st in stack[-1]:
            yield from _entry(below, inner, st, seen, skipped)
            if stat.S_ISDIR(st.st_mode):
                stack.append(iter(_entries(below, inner, skipped)))
                break
        else:
            stack.pop()


def _entries(path: str, name: str, skipped: List[str]) -> List[Tuple[str, str, os.stat_result]]:
    out = []
    try:
        for entry in sorted(os.listdir(path)):
            full = os.path.join(path, entry)
            try:
                out.append((full, f"{name}/{entry}" if name else entry, os.lstat(full)))
            except OSError as e:
                skipped.append(f"{full}: {e.strerror}")
    except OSError as e:
        skipped.append(f"{path}: {e.strerror}")
    return out


def _entry(path: str, name: str, st: os.stat_result, seen: Dict[Tuple[int, int], str], skipped: List[str]) -> Iterator[bytes]:
    mode = st.st_mode
    if stat.S_ISDIR(mode):
        yield _header(name + "/", st, tarfile.DIRTYPE, path=path)
    elif stat.S_ISLNK(mode):
        yield _header(name, st, tarfile.SYMTYPE, target=os.readlink(path))
    elif stat.S_ISFIFO(mode):
        yield _header(name, st, tarfile.FIFOTYPE)
    elif stat.S_ISREG(mode):
        first = seen.get((st.st_dev, st.st_ino))
        if first is not None:
            yield _header(name, st, tarfile.LNKTYPE, target=first)
            return
        try:
            file = open(path, "rb")
        except OSError as e:
            skipped.append(f"{path}: {e.strerror}")
            return
        with file:
            st = os.fstat(file.fileno())
            if st.st_nlink > 1:
                seen[(st.st_dev, st.st_ino)] = name
            yield _header(name, st, tarfile.REGTYPE, size=st.st_size, path=path)
            yield from _content(file.fileno(), st.st_size, path, skipped)
    else:
        skipped.append(f"{path}: sockets and devices are not sent")


def _content(fd: int, size: int, path: str, skipped: List[str]) -> Iterator[bytes]:
    """Exactly what the header announced: what grows is cut, what shrinks is filled with zeros and told."""
    left = size
    while left > 0:
        piece = os.read(fd, min(PIECE, left))
        if not piece:
            skipped.append(f"{path}: became shorter by {left} octets while it was sent; filled with zeros")
            while left > 0:
                n = min(PIECE, left)
                yield bytes(n)
                left -= n
            break
        left -= len(piece)
        yield piece
    if size % 512:
        yield bytes(512 - size % 512)


def _header(
    name: str, st: os.stat_result, kind: bytes, size: int = 0, target: str = "", path: str = "", mode: Optional[int] = None
) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, target
    info.mode = stat.S_IMODE(st.st_mode) if mode is None else mode
    info.uid, info.gid = st.st_uid, st.st_gid
    records: Dict[str, str] = {}
    seconds, nanos = divmod(st.st_mtime_ns, 10**9)
    info.mtime = max(0, seconds)
    if nanos and seconds >= 0:
        records["mtime"] = f"{seconds}.{nanos:09d}"
    elif seconds < 0:
        records["mtime"] = f"{st.st_mtime_ns / 10**9:.9f}"
    for attribute, value in _attributes(path):
        records["SCHILY.xattr." + attribute] = decode(value)
    info.pax_headers = records
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _attributes(path: str) -> Iterator[Tuple[str, bytes]]:
    if not path or not hasattr(os, "listxattr"):
        return
    try:
        for name in os.listxattr(path, follow_symlinks=False):
            if name.startswith("user.") or name == "security.capability":
                yield name, os.getxattr(path, name, follow_symlinks=False)
    except OSError:
        return  # a file system without them


def split(path: str) -> Tuple[str, str]:
    """Folder and name of an absolute path inside a sandbox."""
    folder, _, name = path.rstrip("/").rpartition("/")
    return folder or "/", name


