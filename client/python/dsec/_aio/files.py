"""Files inside a sandbox."""

from __future__ import annotations

import asyncio
import os
import time
from typing import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, List, Optional, Union

from .. import _files as files
from .._body import Body, Source, again, body_of
from .._files import Mode
from .._net import STREAM_TIME
from .._octets import JSON, Fields, Octets, decode
from .._tar import pack, split
from .._unpack import Unpacker
from ..errors import NotFound
from ..model import FileEvent, FileInfo, UploadResult, WriteResult
from .transport import AsyncBody, Transport

LocalPath = Union[str, "os.PathLike[str]"]
AsyncSource = Union[Source, AsyncIterable[bytes]]


class AsyncFiles:
    """File calls as one user of the sandbox. Paths are absolute, str or bytes; links are followed inside, as a command would.

    Calls that change something take `step`, a key: the same step is never applied twice. `timeout` is in seconds; None means the client's,
    and 24 h for bodies and streams."""

    def __init__(self, transport: Transport, sandbox: str, user: str = "") -> None:
        self._t = transport
        self._id = sandbox
        self._user = user

    async def stat(self, path: Octets, *, follow: bool = False) -> FileInfo:
        """Describes a path; with `follow`, what a link at its end points to. Raises NotFound."""
        return await self._t.run(files.stat(self._id, path, self._user, follow))

    async def exists(self, path: Octets) -> bool:
        """Whether something is there, be it a dangling link."""
        try:
            await self.stat(path)
        except NotFound:
            return False
        return True

    async def list(self, path: Octets, *, depth: int = 1, timeout: Optional[float] = None) -> List[FileInfo]:
        """The entries of a folder, down to `depth`; one that can't be read carries its `error`."""
        body: JSON = {"at": files.at(self._id, path, self._user), "depth": depth}
        out: List[FileInfo] = []
        deadline = time.monotonic() + (self._t.config.timeout if timeout is None else timeout)
        async with self._t.stream("FileService/List", body, deadline, True) as messages:
            async for m in messages:
                out += m.subs("entries", FileInfo.of)
        return out

    async def read(self, path: Octets, *, offset: int = 0, length: Optional[int] = None, timeout: Optional[float] = None) -> bytes:
        """A file, or `length` octets of it from `offset`, held in memory."""
        if length == 0:
            return b""
        return b"".join([piece async for piece in self.read_stream(path, offset=offset, length=length, timeout=timeout)])

    async def read_text(self, path: Octets) -> str:
        """A UTF-8 file as text; UnicodeDecodeError when it is none."""
        return (await self.read(path)).decode("utf-8")

    async def read_stream(
        self, path: Octets, *, offset: int = 0, length: Optional[int] = None, timeout: Optional[float] = None
    ) -> AsyncIterator[bytes]:
        """The same piece by piece. A connection that breaks raises Unavailable: what came so far is not all."""
        if length == 0:
            return
        target = files.route("files", self._id, path, user=self._user, offset=str(offset) if offset else None, length=length)
        async with await self._t.download(target, timeout) as r:
            async for piece in r.pieces():
                yield piece

    async def write(
        self, path: Octets, data: AsyncSource, *, mode: Mode = None, parents: bool = True, step: str = "", timeout: Optional[float] = None
    ) -> WriteResult:
        """Creates or replaces a file. `data` is str (as UTF-8), bytes, a file opened for octets, or an iterable (plain or async) of bytes;
        the last can't be sent again when the connection breaks. `mode` is 0o644 for a new file, or as given, also for one that exists."""
        return await self._write(path, data, mode, parents, step, False, None, timeout)

    async def append(
        self, path: Octets, data: AsyncSource, *, start: Optional[int] = None, parents: bool = False, step: str = "", timeout: Optional[float] = None
    ) -> WriteResult:
        """Adds at the end. With `start`, the file must have that size (else State)."""
        return await self._write(path, data, None, parents, step, True, start, timeout)

    async def _write(
        self, path: Octets, data: AsyncSource, mode: Mode, parents: bool, step: str, append: bool, start: Optional[int], timeout: Optional[float]
    ) -> WriteResult:
        target = files.write_route(self._id, path, self._user, step, mode, parents, append, start)
        body: Union[Body, AsyncBody] = AsyncBody(data.__aiter__()) if isinstance(data, AsyncIterable) else body_of(data)
        return WriteResult.of(Fields(await self._t.upload("PUT", target, {"Content-Type": "application/octet-stream"}, body, timeout)))

    async def make_dir(self, path: Octets, *, parents: bool = True, mode: Mode = None, step: str = "") -> FileInfo:
        """Makes a folder; with `parents` also those above it, and one that is there is no error."""
        return await self._t.run(files.make_dir(self._id, path, self._user, parents, mode, step))

    async def move(self, source: Octets, target: Octets, *, replace: bool = True, step: str = "") -> None:
        """Renames a file or folder; Unsupported between file systems."""
        await self._t.run(files.move(self._id, source, target, self._user, replace, step))

    async def remove(self, path: Octets, *, recursive: bool = False, missing_ok: bool = False, step: str = "") -> None:
        """Removes a file or link, or a folder, with all in it when `recursive`."""
        await self._t.run(files.remove(self._id, path, self._user, recursive, missing_ok, step))

    async def watch(self, path: Octets, *, recursive: bool = False, timeout: Optional[float] = None) -> AsyncIterator[FileEvent]:
        """Changes below a path, from the event "ready" on. Not taken up again when the connection breaks (Unavailable), since changes
        would be missing. Close the iterator to end it."""
        body: JSON = {"at": files.at(self._id, path, self._user), "recursive": recursive}
        deadline = time.monotonic() + (STREAM_TIME if timeout is None else timeout)
        async with self._t.stream("FileService/Watch", body, deadline, timeout is not None) as messages:
            async for m in messages:
                yield FileEvent.of(m)

    async def upload(
        self, local: LocalPath, path: Octets, *, keep_owner: bool = False, step: str = "", skipped: Optional[List[str]] = None,
        timeout: Optional[float] = None,
    ) -> UploadResult:
        """Sends a local file to `path` with its mode and time, or lays a local folder into the folder `path`. Parents are made. Owners are
        the user's unless `keep_owner` (root only). What can't be sent (sockets, unreadable files) is added to `skipped`."""
        source = os.fspath(local)
        if os.path.isdir(source):
            return await self.upload_tar(lambda: pack(source, "", skipped), path, keep_owner=keep_owner, step=step, timeout=timeout)
        os.stat(source)  # before anything is sent
        folder, name = split(decode(files.path_of(path)))
        return await self.upload_tar(lambda: pack(source, name, skipped), folder, keep_owner=keep_owner, step=step, timeout=timeout)

    upload_tree = upload

    async def upload_tar(
        self, tar: Union[AsyncSource, Callable[[], Iterator[bytes]]], path: Octets, *, parents: bool = True, keep_owner: bool = False,
        step: str = "", timeout: Optional[float] = None,
    ) -> UploadResult:
        """Lays a tar (uncompressed) into a folder: bytes, a file, an iterable of bytes, or a callable that makes one anew."""
        body: Union[Body, AsyncBody]
        if isinstance(tar, AsyncIterable):
            body = AsyncBody(tar.__aiter__())
        else:
            body = again(tar) if callable(tar) else body_of(tar)
        target = files.upload_route(self._id, path, self._user, step, parents, keep_owner)
        return UploadResult.of(Fields(await self._t.upload("PUT", target, {"Content-Type": "application/x-tar"}, body, timeout)))

    async def download(self, path: Octets, local: LocalPath, *, timeout: Optional[float] = None) -> FileInfo:
        """Brings one file here, with its mode and time. It appears under its name when it is whole."""
        info = await self.stat(path, follow=True)
        with files.NewFile(os.fspath(local), info) as f:
            async for piece in self.read_stream(path, timeout=timeout):
                f.write(piece)
        return info

    async def download_tree(
        self, path: Octets, local: LocalPath, *, exclude: Iterable[str] = (), max_octets: int = files.MAX_OCTETS,
        max_entries: int = files.MAX_ENTRIES, timeout: Optional[float] = None,
    ) -> List[str]:
        """Brings a folder's content into a local folder and answers what was left out: what a tar can't hold, devices, links that lead out.
        Nothing outside the local folder is touched, whatever the sandbox sends; owners, setuid and setgid bits are not taken. More than
        `max_octets` or `max_entries` raises Invalid."""
        unpacker = Unpacker(os.fspath(local), max_octets, max_entries)
        try:
            async with await self._t.download(files.download_route(self._id, path, self._user, exclude), timeout) as r:
                async for piece in r.pieces():
                    await asyncio.get_running_loop().run_in_executor(None, unpacker.feed, piece)
                return unpacker.close() + files.skipped_by_server(r.reader)
        finally:
            unpacker.abort()

    async def download_tar(self, path: Octets, *, exclude: Iterable[str] = (), timeout: Optional[float] = None) -> AsyncIterator[bytes]:
        """A folder as a tar (PAX), piece by piece. Its names and links are the sandbox's: unpack it with care."""
        async with await self._t.download(files.download_route(self._id, path, self._user, exclude), timeout) as r:
            async for piece in r.pieces():
                yield piece


