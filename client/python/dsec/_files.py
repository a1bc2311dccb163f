"""File calls without I/O: paths, routes of the plain HTTP endpoints, bodies."""

from __future__ import annotations

import ast
import os
import tempfile
from types import TracebackType
from typing import BinaryIO, Dict, Iterable, List, Optional, Type, Union
from urllib.parse import quote

from ._http1 import Reader
from ._octets import JSON, Octets, encode, put
from ._ops import Op, call, new_key, without_empty
from .errors import Invalid
from .model import FileInfo

MAX_OCTETS = 64 << 30  # default bound of what a tree from a sandbox may hold
MAX_ENTRIES = 1_000_000
_DECIMAL_SLIPS = (400, 440, 444, 500, 550, 555, 600, 640, 644, 660, 664, 666, 700, 750, 755, 770, 775, 777)

Mode = Union[int, str, None]


def path_of(path: Octets) -> bytes:
    data = encode(os.fspath(path), "path")
    if not data.startswith(b"/"):
        raise Invalid(f"path {path!r}: must be absolute")
    if b"\0" in data:
        raise Invalid(f"path {path!r}: holds NUL")
    return data


def at(sandbox: str, path: Octets, user: str) -> JSON:
    out: JSON = {"sandbox": sandbox}
    put(out, "path", path_of(path))
    if user:
        out["user"] = user
    return out


def mode_of(mode: Mode) -> int:
    """A mode as a number (0o755) or as octal text ("0755"). Decimal slips such as 755 are refused: they would mean 0o1363."""
    if mode is None:
        return 0
    if isinstance(mode, str):
        try:
            number = int(mode, 8)
        except ValueError:
            raise Invalid(f"mode {mode!r}: want octal digits") from None
    else:
        number = mode
        if number in _DECIMAL_SLIPS:
            raise Invalid(f"mode {mode}: a decimal number; write 0o{mode}")
    if not 0 < number <= 0o7777:
        raise Invalid(f"mode {mode!r}: want 0o1 to 0o7777")
    return number


def route(kind: str, sandbox: str, path: Octets, **more: Union[str, int, bool, None, Iterable[str]]) -> str:
    """The target of a plain HTTP call; parameters that are None, "" or False are left out."""
    parts: Dict[str, str] = {"path": quote(path_of(path), safe="/")}
    for name, value in more.items():
        if value is None or value == "" or value is False:
            continue
        parts[name] = quote("true" if value is True else str(value), safe=",:")
    return f"/v1/{kind}/{quote(sandbox, safe='')}?" + "&".join(f"{k}={v}" for k, v in parts.items())


def write_route(
    sandbox: str, path: Octets, user: str, step: str, mode: Mode, parents: bool, append: bool = False, start: Optional[int] = None
) -> str:
    number = mode_of(mode)
    return route(
        "files", sandbox, path, user=user, step=step or new_key(), mode=f"{number:o}" if number else None, parents=parents,
        append=append, start_offset=str(start) if append and start is not None else None,
    )


def upload_route(sandbox: str, path: Octets, user: str, step: str, parents: bool, keep_owner: bool) -> str:
    return route("trees", sandbox, path, user=user, step=step or new_key(), parents=parents, keep_owner=keep_owner)


def download_route(sandbox: str, path: Octets, user: str, exclude: Iterable[str]) -> str:
    patterns = list(exclude)
    if any("," in p for p in patterns):
        raise Invalid("exclude: a pattern must not hold a comma")
    return route("trees", sandbox, path, user=user, exclude=",".join(patterns))


def skipped_by_server(reader: Reader) -> List[str]:
    """What the server could not put into a tar, from the trailer (a quoted string)."""
    for name, value in reader.trailers:
        if name == "dsec-skipped":
            try:
                return [str(ast.literal_eval(value))]
            except (ValueError, SyntaxError):
                return [value]
    return []


def stat(sandbox: str, path: Octets, user: str, follow: bool) -> Op[FileInfo]:
    body: JSON = {"at": at(sandbox, path, user), "follow": follow}
    return FileInfo.of((yield from call("FileService/Stat", body)).sub("info"))


def make_dir(sandbox: str, path: Octets, user: str, parents: bool, mode: Mode, step: str) -> Op[FileInfo]:
    body = without_empty({"at": at(sandbox, path, user), "parents": parents, "mode": mode_of(mode), "step": step or new_key()})
    return FileInfo.of((yield from call("FileService/MakeDir", body)).sub("info"))


def move(sandbox: str, source: Octets, target: Octets, user: str, replace: bool, step: str) -> Op[None]:
    body = without_empty({"from": at(sandbox, source, user), "replace": replace, "step": step or new_key()})
    put(body, "to", path_of(target))
    yield from call("FileService/Move", body)


def remove(sandbox: str, path: Octets, user: str, recursive: bool, missing_ok: bool, step: str) -> Op[None]:
    body = without_empty({"at": at(sandbox, path, user), "recursive": recursive, "missing_ok": missing_ok, "step": step or new_key()})
    yield from call("FileService/Remove", body)


class NewFile:
    """A local file that appears under its name only when it is whole."""

    def __init__(self, path: str, info: FileInfo) -> None:
        self._path = os.path.abspath(path)
        self._info = info

    def __enter__(self) -> BinaryIO:
        fd, self._temporary = tempfile.mkstemp(prefix=".dsec-", dir=os.path.dirname(self._path))
        self._file = os.fdopen(fd, "wb")
        return self._file

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        try:
            self._file.close()
            if kind is None:
                os.chmod(self._temporary, self._info.mode & 0o777)
                if self._info.modified is not None:
                    when = self._info.modified.timestamp()
                    os.utime(self._temporary, (when, when))
                os.replace(self._temporary, self._path)
                return
        except BaseException:
            os.unlink(self._temporary)
            raise
        os.unlink(self._temporary)
