"""A tar from a sandbox onto this machine. What comes from a sandbox is hostile.

Every name is walked from the target folder with descriptors and without following a link, so nothing is made, changed or read outside it,
whatever the tar says and whatever lies there. Files lose setuid, setgid and sticky; owners are not taken; devices, FIFOs and links that
lead out are left out and told. Sizes are bounded. The parser is fed what arrives and holds at most one piece.
"""

from __future__ import annotations

import os
import posixpath
import stat
from typing import Dict, Generator, List, Optional, Tuple

from ._octets import decode
from .errors import Internal, Invalid

MAX_META = 1 << 20  # octets of a PAX record block or a long name
MAX_NAME = 4096
MAX_DEPTH = 1000
MAX_HOLES = 1 << 16

Take = Generator[int, bytes, bytes]
Done = Generator[int, bytes, None]


class Unpacker:
    """`feed` the tar, then `close`, which answers what was left out. `max_octets` bounds the sum of the files' sizes and `max_entries` their
    number; more is `Invalid`."""

    def __init__(self, folder: str, max_octets: int, max_entries: int) -> None:
        os.makedirs(folder, exist_ok=True)
        self.skipped: List[str] = []
        self._root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._octets, self._entries = max_octets, max_entries
        self._times: List[Tuple[List[bytes], int, int]] = []  # folders: mode and time, set at the end
        self._in = bytearray()
        self._parser = self._parse()
        self._ended = False
        self._want = next(self._parser)

    def feed(self, data: bytes) -> None:
        self._in += data
        at = 0
        try:
            while not self._ended and len(self._in) - at >= self._want:
                piece = bytes(self._in[at : at + self._want])
                at += self._want
                try:
                    self._want = self._parser.send(piece)
                except StopIteration:
                    self._ended = True
        finally:
            if self._ended:
                self._in.clear()
            else:
                del self._in[:at]

    def close(self) -> List[str]:
        try:
            if not self._ended:
                raise Internal("tree: the tar broke off")
            for parts, mode, mtime in reversed(self._times):
                fd = self._walk(parts, False)
                if fd is not None:
                    try:
                        os.fchmod(fd, mode)
                        os.utime(fd, ns=(mtime, mtime))
                    finally:
                        os.close(fd)
            return self.skipped
        finally:
            self.abort()

    def abort(self) -> None:
        self._parser.close()
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    # The format.

    def _parse(self) -> Done:
        zeros = 0
        pax: Dict[str, bytes] = {}
        while zeros < 2:
            block = yield 512
            if not any(block):
                zeros += 1
                continue
            zeros = 0
            if _number(block[148:156]) != sum(block[:148]) + 256 + sum(block[156:]):
                raise Internal("tree: a header's checksum is wrong")
            kind, size = block[156:157], _number(block[124:136])
            if kind in b"xgLK" and kind:
                if size > MAX_META:
                    raise Internal(f"tree: {size} octets of metadata")
                meta = yield from self._meta(size)
                if kind == b"x":
                    pax.update(_records(meta))
                elif kind == b"L":
                    pax["path"] = meta.split(b"\0")[0]
                elif kind == b"K":
                    pax["linkpath"] = meta.split(b"\0")[0]
                continue
            name = pax.get("GNU.sparse.name") or pax.get("path") or _name(block)
            link = pax.get("linkpath") or block[157:257].split(b"\0")[0]
            if "size" in pax:
                size = _decimal(pax["size"])
            mtime = _nanoseconds(pax["mtime"]) if "mtime" in pax else _number(block[136:148]) * 10**9
            sparse = _decimal(pax["GNU.sparse.realsize"]) if pax.get("GNU.sparse.major") == b"1" else None
            pax = {}
            self._entries -= 1
            if self._entries < 0:
                raise Invalid("tree: more entries than max_entries allows")
            yield from self._entry(kind, name, link, size, _number(block[100:108]) & 0o777, mtime, sparse)

    def _meta(self, size: int) -> Take:
        data = yield size + -size % 512 if size else 0
        return data[:size]

    def _entry(self, kind: bytes, name: bytes, link: bytes, size: int, mode: int, mtime: int, sparse: Optional[int]) -> Done:
        file = kind in (b"0", b"\0", b"7")
        parts = self._parts(name)
        try:
            if not parts:
                if kind == b"5":
                    self._times.append(([], mode, mtime))
                elif file:
                    raise Invalid(f"tree: {name!r} is no name of a file")
            elif file:
                yield from self._file(parts, size, mode, mtime, sparse)
                return
            elif kind == b"5":
                fd = self._walk(parts, True)
                if fd is None:
                    self._skip(name, "something else than a folder is in its way")
                else:
                    os.close(fd)
                    self._times.append((parts, mode, mtime))
            elif kind == b"2":
                self._link(parts, name, link)
            elif kind == b"1":
                self._hard(parts, name, link)
            else:
                self._skip(name, "devices, FIFOs and the like are not made")
        except OSError as e:
            raise OSError(e.errno, f"{e.strerror}: {decode(name)}") from None
        yield from self._drop(0 if kind in (b"1", b"2", b"3", b"4", b"5", b"6") else size)

    def _drop(self, size: int) -> Done:
        left = size + -size % 512
        while left > 0:
            left -= len((yield min(left, 64 << 10)))

    def _skip(self, name: bytes, why: str) -> None:
        if len(self.skipped) < 10_000:
            self.skipped.append(f"{decode(name)}: {why}")

    # The folder.

    def _parts(self, name: bytes) -> List[bytes]:
        if len(name) > MAX_NAME * 4 or b"\0" in name:
            raise Internal("tree: a name is too long or holds NUL")
        parts = [p for p in name.split(b"/") if p not in (b"", b".")]
        if b".." in parts or len(parts) > MAX_DEPTH:
            raise Invalid(f"tree: the entry {decode(name)!r} leads out of the folder")
        return parts

    def _walk(self, parts: List[bytes], make: bool) -> Optional[int]:
        """A descriptor of a folder below the root; None where there is none (a link is none)."""
        fd = os.dup(self._root)
        for p in parts:
            try:
                try:
                    below = os.open(p, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                except FileNotFoundError:
                    if not make:
                        return None
                    os.mkdir(p, 0o700, dir_fd=fd)
                    below = os.open(p, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                    os.fchmod(below, 0o755)
            except (NotADirectoryError, FileExistsError):
                return None
            except OSError as e:
                if e.errno in (20, 40):  # ENOTDIR, ELOOP: a link
                    return None
                raise
            finally:
                os.close(fd)
            fd = below
        return fd

    def _clear(self, folder: int, name: bytes) -> bool:
        """Makes way for a new entry; a folder that is there is left alone."""
        try:
            if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                return False
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass
        return True

    def _file(self, parts: List[bytes], size: int, mode: int, mtime: int, sparse: Optional[int]) -> Done:
        name = b"/".join(parts)
        self._octets -= max(size, sparse or 0)
        if self._octets < 0:
            raise Invalid("tree: more octets than max_octets allows")
        folder = self._walk(parts[:-1], True)
        if folder is None or not self._clear(folder, parts[-1]):
            if folder is not None:
                os.close(folder)
            self._skip(name, "something else is in its way")
            yield from self._drop(size)
            return
        try:
            fd = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            if sparse is None:
                yield from self._copy(fd, size)
            else:
                yield from self._sparse(fd, size, sparse)
            os.fchmod(fd, mode)
            os.utime(fd, ns=(mtime, mtime))
        finally:
            os.close(fd)

    def _copy(self, fd: int, size: int) -> Done:
        left = size
        while left > 0:
            piece = yield min(left, 64 << 10)
            _write(fd, piece)
            left -= len(piece)
        if size % 512:
            yield 512 - size % 512

    def _sparse(self, fd: int, size: int, real: int) -> Done:
        """GNU's form 1.0: the map of data, in decimal lines, padded to blocks, then the data."""
        text, used, want = b"", 0, 1
        numbers: List[int] = []
        while len(numbers) < want:
            if b"\n" not in text:
                used += 512
                if used > size or len(text) > 64:
                    raise Internal("tree: the map of a sparse file is broken")
                text += yield 512
                continue
            line, text = text.split(b"\n", 1)
            numbers.append(_decimal(line))
            if len(numbers) == 1:
                want = 1 + 2 * numbers[0]
                if numbers[0] > MAX_HOLES:
                    raise Internal("tree: too many holes in a sparse file")
        end, total = 0, used
        for offset, length in zip(numbers[1::2], numbers[2::2]):
            if offset < end or offset + length > real or total + length > size:
                raise Internal("tree: the map of a sparse file is broken")
            os.lseek(fd, offset, os.SEEK_SET)
            left = length
            while left > 0:
                piece = yield min(left, 64 << 10)
                _write(fd, piece)
                left -= len(piece)
            end, total = offset + length, total + length
        os.ftruncate(fd, real)
        if total != size:
            raise Internal("tree: the map of a sparse file is broken")
        if size % 512:
            yield 512 - size % 512

    def _link(self, parts: List[bytes], name: bytes, target: bytes) -> None:
        inside = posixpath.normpath(b"/".join(parts[:-1] + [target]))
        if target.startswith(b"/") or inside == b".." or inside.startswith(b"../") or not target or len(target) > MAX_NAME:
            self._skip(name, f"the link to {decode(target[:200])!r} leads out of the folder")
            return
        folder = self._walk(parts[:-1], True)
        if folder is None:
            self._skip(name, "something else is in its way")
            return
        try:
            if self._clear(folder, parts[-1]):
                os.symlink(target, parts[-1], dir_fd=folder)
            else:
                self._skip(name, "a folder is in its way")
        finally:
            os.close(folder)

    def _hard(self, parts: List[bytes], name: bytes, target: bytes) -> None:
        source = self._parts(target)
        if not source or source == parts:
            self._skip(name, "a hard link to nothing")
            return
        a, b = self._walk(source[:-1], False), self._walk(parts[:-1], True)
        try:
            if a is None or b is None:
                self._skip(name, "its hard link's target is not there")
                return
            if not stat.S_ISREG(os.lstat(source[-1], dir_fd=a).st_mode):
                self._skip(name, "its hard link's target is no file")
            elif not self._clear(b, parts[-1]):
                self._skip(name, "a folder is in its way")
            else:
                os.link(source[-1], parts[-1], src_dir_fd=a, dst_dir_fd=b, follow_symlinks=False)
        except FileNotFoundError:
            self._skip(name, "its hard link's target is not there")
        finally:
            for fd in (a, b):
                if fd is not None:
                    os.close(fd)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _number(field: bytes) -> int:
    """Octal, or base 256 for what octal can't hold."""
    if field[0] & 0x80:
        n = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        if field[0] & 0x40:  # negative, as a time before 1970
            return 0
    else:
        text = field.strip(b" \0")
        if text and not all(0x30 <= c <= 0x37 for c in text):
            raise Internal(f"tree: the number {text[:20]!r} is broken")
        n = int(text or b"0", 8)
    if n >= 1 << 62:
        raise Internal("tree: a number is too large")
    return n


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 18:
        raise Internal(f"tree: the number {text[:20]!r} is broken")
    return int(text)


def _nanoseconds(text: bytes) -> int:
    negative = text.startswith(b"-")
    whole, _, fraction = text.lstrip(b"-").partition(b".")
    n = _decimal(whole or b"0") * 10**9 + _decimal((fraction + b"000000000")[:9])
    if n >= 1 << 62:
        raise Internal("tree: a time is too large")
    return -n if negative else n


def _name(block: bytes) -> bytes:
    name, prefix = block[:100].split(b"\0")[0], block[345:500].split(b"\0")[0]
    return prefix + b"/" + name if prefix and block[257:263] == b"ustar\0" else name


def _records(data: bytes) -> Dict[str, bytes]:
    """PAX records: "<length> <key>=<value>\\n"."""
    out: Dict[str, bytes] = {}
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 10)
        if space < 0 or not data[at:space].isdigit():
            raise Internal("tree: PAX records are broken")
        end = at + int(data[at:space])
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if end <= space + 1 or end > len(data) or not equals or data[end - 1 : end] != b"\n":
            raise Internal("tree: PAX records are broken")
        out[decode(key)] = value
        at = end
    return out
