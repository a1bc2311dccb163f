"""Ports inside a sandbox: HTTP, WebSocket and other upgraded connections, through the gateway."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import Iterator, Mapping, Optional, Sequence, Tuple, Union

from .. import _http1 as http1
from .. import _ports as ports
from .. import _websocket as ws
from .._body import Body, Source, body_of
from .._ops import backoff_poll
from .._ports import HttpResponse
from ..errors import DeadlineExceeded, DsecError, Internal, State, Unavailable
from .transport import Connection, Response, Transport


class Port:
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

    def request(
        self, method: str, path: Union[str, bytes] = "/", *, headers: Optional[Mapping[str, str]] = None, body: Optional[Source] = None,
        timeout: Optional[float] = None,
    ) -> HttpResponse:
        """Sends a request and reads the whole answer (256 MiB at most). `path` may carry a query; `timeout` is in seconds."""
        with self.open(method, path, headers=headers, body=body, timeout=timeout) as r:
            return HttpResponse(r.head.status, r.head.reason, r.head.headers, r.read(ports.MAX_BODY))

    def get(self, path: Union[str, bytes] = "/", *, headers: Optional[Mapping[str, str]] = None, timeout: Optional[float] = None) -> HttpResponse:
        """A GET request."""
        return self.request("GET", path, headers=headers, timeout=timeout)

    @contextmanager
    def open(
        self, method: str, path: Union[str, bytes] = "/", *, headers: Optional[Mapping[str, str]] = None, body: Optional[Source] = None,
        timeout: Optional[float] = None,
    ) -> Iterator[Response]:
        """The same with the answer's body read piece by piece: `with port.open("GET", "/big") as r: for piece in r.pieces(): ...`."""
        target, merged = ports.target(self._t.config, self._base, path, headers or {})
        deadline = time.monotonic() + (self._t.config.timeout if timeout is None else timeout)
        sent: Optional[Body] = None if body is None else body_of(body)
        with self._t.request(method, target, merged, sent, deadline, fresh=True, bodyless=sent is None and method in ("GET", "HEAD")) as r:
            if r.head.get("dsec-error") is not None:
                raise ports.failure(r.head, r.read(1 << 20)) or Internal("no reason given")
            yield r

    def wait(self, path: Union[str, bytes] = "/", timeout: float = 30.0) -> HttpResponse:
        """Asks until a server inside answers anything; after `timeout` seconds: the last error."""
        until, attempt = time.monotonic() + timeout, 0
        while True:
            try:
                return self.get(path, timeout=max(0.05, until - time.monotonic()))
            except (State, Unavailable):
                pause = backoff_poll(attempt)
                if time.monotonic() + pause >= until:
                    raise
            attempt += 1
            time.sleep(pause)

    def upgrade(
        self, path: Union[str, bytes] = "/", protocol: str = "tcp", *, headers: Optional[Mapping[str, str]] = None, timeout: float = 30.0
    ) -> RawConnection:
        """Asks the server inside to upgrade the connection to `protocol` and gives it back as a plain stream of octets."""
        return self._upgrade(path, {"Connection": "Upgrade", "Upgrade": protocol, **(headers or {})}, timeout)[0]

    def websocket(
        self, path: Union[str, bytes] = "/", protocols: Sequence[str] = (), *, headers: Optional[Mapping[str, str]] = None, timeout: float = 30.0
    ) -> WebSocket:
        """Opens a WebSocket. `timeout` (seconds) is for the opening; messages of 64 MiB at most are taken."""
        key, needed = ws.handshake(protocols)
        raw, head = self._upgrade(path, {**(headers or {}), **needed}, timeout)
        try:
            ws.check(head, key)
        except http1.ProtocolError as e:
            raw.close()
            raise Unavailable(str(e)) from None
        return WebSocket(raw, head.get("sec-websocket-protocol") or "")

    def _upgrade(self, path: Union[str, bytes], headers: Mapping[str, str], timeout: float) -> Tuple[RawConnection, http1.Head]:
        target, merged = ports.target(self._t.config, self._base, path, headers)
        r = self._t.request("GET", target, merged, None, time.monotonic() + timeout, fresh=True, bodyless=True)
        if r.reader.upgraded:
            return RawConnection(r.detach(), r.reader.rest()), r.head
        with r:
            raise ports.not_upgraded(r.head, r.read(1 << 20))


class RawConnection:
    """An upgraded connection: octets in both directions. One thread may send while another receives."""

    def __init__(self, connection: Connection, rest: bytes) -> None:
        self._c = connection
        self._rest = rest
        self._c.sock.settimeout(None)

    def send(self, data: bytes) -> None:
        """Sends all of it."""
        try:
            self._c.sock.sendall(data)
        except OSError as e:
            raise Unavailable(f"connection to the port broke off: {e}") from None

    def recv(self, timeout: Optional[float] = None) -> bytes:
        """The next octets, b"" at the end. After `timeout` seconds without any: DeadlineExceeded."""
        if self._rest:
            out, self._rest = self._rest, b""
            return out
        try:
            if timeout is None:
                return self._c.sock.recv(256 << 10)
            # Not the socket's own timeout, which a thread that sends would share.
            if not self._c.readable(timeout):
                raise DeadlineExceeded(f"nothing came within {timeout} s")
            return self._c.sock.recv(256 << 10)
        except DsecError:
            raise
        except OSError as e:
            raise Unavailable(f"connection to the port broke off: {e}") from None

    def close(self) -> None:
        """Closes it."""
        self._c.close()

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WebSocket:
    """A WebSocket to a server inside. One thread may send while another receives."""

    def __init__(self, raw: RawConnection, protocol: str) -> None:
        self.protocol = protocol  # the sub-protocol that the server chose
        self._raw = raw
        self._parser = ws.Parser(ports.MAX_MESSAGE)
        self._sending = threading.Lock()
        self._closing = False

    def send(self, data: ws.Message) -> None:
        """Sends a text (str) or binary (bytes) message."""
        self._frame(ws.frame(ws.TEXT, data.encode("utf-8")) if isinstance(data, str) else ws.frame(ws.BINARY, data))

    def ping(self, data: bytes = b"") -> None:
        """Sends a ping; the answer is swallowed by `recv`."""
        self._frame(ws.frame(ws.PING, data[:125]))

    def _frame(self, data: bytes) -> None:
        with self._sending:
            self._raw.send(data)

    def recv(self, timeout: Optional[float] = None) -> ws.Message:
        """The next message. Raises `WebSocketClosed` when the peer has closed, DeadlineExceeded after `timeout` seconds without octets."""
        while True:
            try:
                for opcode, data in self._parser.events():
                    if opcode == ws.PING:
                        self._frame(ws.frame(ws.PONG, data))
                    elif opcode == ws.CLOSE:
                        if not self._closing:
                            self._closing = True
                            self._frame(ws.frame(ws.CLOSE, data[:2]))
                        raise ws.closed(data)
                    elif opcode != ws.PONG:
                        return ws.message(opcode, data)
            except http1.ProtocolError as e:
                self._raw.close()
                raise Unavailable(f"WebSocket: {e}") from None
            data = self._raw.recv(timeout)
            if not data:
                raise ws.Closed(1006)
            self._parser.feed(data)

    def __iter__(self) -> Iterator[ws.Message]:
        """Messages until the peer closes."""
        while True:
            try:
                yield self.recv()
            except ws.Closed:
                return

    def close(self, code: Optional[int] = 1000, reason: str = "", timeout: float = 5.0) -> None:
        """Says goodbye (code None: without a code) and waits up to `timeout` seconds for the peer's."""
        try:
            if not self._closing:
                self._closing = True
                self._frame(ws.close_frame(code, reason))
                until = time.monotonic() + timeout
                while time.monotonic() < until:
                    self.recv(max(0.01, until - time.monotonic()))
        except (ws.Closed, DsecError):
            pass
        finally:
            self._raw.close()

    def __enter__(self) -> WebSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
