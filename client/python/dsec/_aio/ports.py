"""Ports inside a sandbox: HTTP, WebSocket and other upgraded connections, through the gateway."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import AsyncIterator, Mapping, Optional, Sequence, Tuple, Union

from .. import _http1 as http1
from .. import _ports as ports
from .. import _websocket as ws
from .._body import Body, Source, body_of
from .._ops import backoff_poll
from .._ports import HttpResponse
from ..errors import DeadlineExceeded, DsecError, Internal, State, Unavailable
from .transport import Connection, Response, Transport, within


class AsyncPort:
    """A TCP port inside. `DsecError` is raised when the application was not reached; what it answers, also 500, is its answer."""

    def __init__(self, transport: Transport, sandbox: str, port: int) -> None:
        self._t = transport
        self._base = ports.prefix(sandbox, port)
        self.port = port

    @property
    def url(self) -> str:
        """Base URL of the port, without a slash at its end. Requests need the key (`Authorization: Bearer`, or `X-API-Key`). Through a
        Unix socket only the methods here reach it."""
        return self._t.config.base + self._base

    async def request(
        self, method: str, path: Union[str, bytes] = "/", *, headers: Optional[Mapping[str, str]] = None, body: Optional[Source] = None,
        timeout: Optional[float] = None,
    ) -> HttpResponse:
        """Sends a request and reads the whole answer (256 MiB at most). `path` may carry a query; `timeout` is in seconds."""
        async with self.open(method, path, headers=headers, body=body, timeout=timeout) as r:
            return HttpResponse(r.head.status, r.head.reason, r.head.headers, await r.read(ports.MAX_BODY))

    async def get(
        self, path: Union[str, bytes] = "/", *, headers: Optional[Mapping[str, str]] = None, timeout: Optional[float] = None
    ) -> HttpResponse:
        """A GET request."""
        return await self.request("GET", path, headers=headers, timeout=timeout)

    @asynccontextmanager
    async def open(
        self, method: str, path: Union[str, bytes] = "/", *, headers: Optional[Mapping[str, str]] = None, body: Optional[Source] = None,
        timeout: Optional[float] = None,
    ) -> AsyncIterator[Response]:
        """The same with the answer's body read piece by piece: `async with port.open("GET", "/big") as r: async for piece in r.pieces()`."""
        target, merged = ports.target(self._t.config, self._base, path, headers or {})
        deadline = time.monotonic() + (self._t.config.timeout if timeout is None else timeout)
        sent: Optional[Body] = None if body is None else body_of(body)
        plain = sent is None and method in ("GET", "HEAD")
        async with await self._t.request(method, target, merged, sent, deadline, fresh=True, bodyless=plain) as r:
            if r.head.get("dsec-error") is not None:
                raise ports.failure(r.head, await r.read(1 << 20)) or Internal("no reason given")
            yield r

    async def wait(self, path: Union[str, bytes] = "/", timeout: float = 30.0) -> HttpResponse:
        """Asks until a server inside answers anything; after `timeout` seconds: the last error."""
        until, attempt = time.monotonic() + timeout, 0
        while True:
            try:
                return await self.get(path, timeout=max(0.05, until - time.monotonic()))
            except (State, Unavailable):
                pause = backoff_poll(attempt)
                if time.monotonic() + pause >= until:
                    raise
            attempt += 1
            await asyncio.sleep(pause)

    async def upgrade(
        self, path: Union[str, bytes] = "/", protocol: str = "tcp", *, headers: Optional[Mapping[str, str]] = None, timeout: float = 30.0
    ) -> AsyncConnection:
        """Asks the server inside to upgrade the connection to `protocol` and gives it back as a plain stream of octets."""
        return (await self._upgrade(path, {"Connection": "Upgrade", "Upgrade": protocol, **(headers or {})}, timeout))[0]

    async def websocket(
        self, path: Union[str, bytes] = "/", protocols: Sequence[str] = (), *, headers: Optional[Mapping[str, str]] = None, timeout: float = 30.0
    ) -> AsyncWebSocket:
        """Opens a WebSocket. `timeout` (seconds) is for the opening; messages of 64 MiB at most are taken."""
        key, needed = ws.handshake(protocols)
        raw, head = await self._upgrade(path, {**(headers or {}), **needed}, timeout)
        try:
            ws.check(head, key)
        except http1.ProtocolError as e:
            await raw.close()
            raise Unavailable(str(e)) from None
        return AsyncWebSocket(raw, head.get("sec-websocket-protocol") or "")

    async def _upgrade(self, path: Union[str, bytes], headers: Mapping[str, str], timeout: float) -> Tuple[AsyncConnection, http1.Head]:
        target, merged = ports.target(self._t.config, self._base, path, headers)
        r = await self._t.request("GET", target, merged, None, time.monotonic() + timeout, fresh=True, bodyless=True)
        if r.reader.upgraded:
            return AsyncConnection(r.detach(), r.reader.rest()), r.head
        async with r:
            raise ports.not_upgraded(r.head, await r.read(1 << 20))


class AsyncConnection:
    """An upgraded connection: octets in both directions."""

    def __init__(self, connection: Connection, rest: bytes) -> None:
        self._c = connection
        self._rest = rest

    async def send(self, data: bytes) -> None:
        """Sends all of it."""
        try:
            await self._c.send(data)
        except OSError as e:
            raise Unavailable(f"connection to the port broke off: {e}") from None

    async def recv(self, timeout: Optional[float] = None) -> bytes:
        """The next octets, b"" at the end. After `timeout` seconds without any: DeadlineExceeded."""
        if self._rest:
            out, self._rest = self._rest, b""
            return out
        try:
            if timeout is None:
                return await self._c.recv()
            return await within(timeout, self._c.recv())
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"nothing came within {timeout} s") from None
        except OSError as e:
            raise Unavailable(f"connection to the port broke off: {e}") from None

    async def close(self) -> None:
        """Closes it, after what was sent has left."""
        try:
            self._c.writer.close()
            await within(5, self._c.writer.wait_closed())
        except (OSError, asyncio.TimeoutError):
            self._c.close()

    async def __aenter__(self) -> AsyncConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncWebSocket:
    """A WebSocket to a server inside."""

    def __init__(self, raw: AsyncConnection, protocol: str) -> None:
        self.protocol = protocol  # the sub-protocol that the server chose
        self._raw = raw
        self._parser = ws.Parser(ports.MAX_MESSAGE)
        self._closing = False

    async def send(self, data: ws.Message) -> None:
        """Sends a text (str) or binary (bytes) message."""
        await self._raw.send(ws.frame(ws.TEXT, data.encode("utf-8")) if isinstance(data, str) else ws.frame(ws.BINARY, data))

    async def ping(self, data: bytes = b"") -> None:
        """Sends a ping; the answer is swallowed by `recv`."""
        await self._raw.send(ws.frame(ws.PING, data[:125]))

    async def recv(self, timeout: Optional[float] = None) -> ws.Message:
        """The next message. Raises `WebSocketClosed` when the peer has closed, DeadlineExceeded after `timeout` seconds without octets."""
        while True:
            try:
                for opcode, data in self._parser.events():
                    if opcode == ws.PING:
                        await self._raw.send(ws.frame(ws.PONG, data))
                    elif opcode == ws.CLOSE:
                        if not self._closing:
                            self._closing = True
                            await self._raw.send(ws.frame(ws.CLOSE, data[:2]))
                        raise ws.closed(data)
                    elif opcode != ws.PONG:
                        return ws.message(opcode, data)
            except http1.ProtocolError as e:
                await self._raw.close()
                raise Unavailable(f"WebSocket: {e}") from None
            data = await self._raw.recv(timeout)
            if not data:
                raise ws.Closed(1006)
            self._parser.feed(data)

    async def __aiter__(self) -> AsyncIterator[ws.Message]:
        """Messages until the peer closes."""
        while True:
            try:
                message = await self.recv()
            except ws.Closed:
                return
            yield message

    async def close(self, code: Optional[int] = 1000, reason: str = "", timeout: float = 5.0) -> None:
        """Says goodbye (code None: without a code) and waits up to `timeout` seconds for the peer's."""
        try:
            if not self._closing:
                self._closing = True
                await self._raw.send(ws.close_frame(code, reason))
                until = time.monotonic() + timeout
                while time.monotonic() < until:
                    await self.recv(max(0.01, until - time.monotonic()))
        except (ws.Closed, DsecError):
            pass
        finally:
            await self._raw.close()

    async def __aenter__(self) -> AsyncWebSocket:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
