"""Blocking HTTP/1.1 with a pool of kept connections, and the driver of the calls. Safe for use by many threads; a process that forks gets
a pool of its own. No proxy is ever used."""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from contextlib import contextmanager
from typing import Dict, Iterator, List, Mapping, Optional, TypeVar

from .. import _connect as connect
from .. import _http1 as http1
from .._body import Body, SourceError
from .._config import Config
from .._net import CONNECT_TIME, IDLE_TIME, MAX_IDLE, READ, STREAM_TIME, keep_alive
from .._octets import JSON, Fields
from .._ops import Attempts, Call, Op, Sleep
from .._recorded import Recorded
from ..errors import DeadlineExceeded, Unavailable, unsent

T = TypeVar("T")


class Connection:
    """One socket; every wait ends at a deadline of time.monotonic."""

    def __init__(self, sock: socket.socket, where: str) -> None:
        self.sock = sock
        self.where = where
        self.idle_since = 0.0
        self.spent = False  # not for another request

    def _arm(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise socket.timeout()
        self.sock.settimeout(left)

    def send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._arm(deadline)
            view = view[self.sock.send(view[: 1 << 20]) :]

    def recv(self, deadline: float) -> bytes:
        self._arm(deadline)
        return self.sock.recv(READ)

    def readable(self, timeout: float = 0.0) -> bool:
        """Whether something (or the end) has arrived, or does within so many seconds."""
        if isinstance(self.sock, ssl.SSLSocket) and self.sock.pending():
            return True
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def close(self) -> None:
        try:
            self.sock.close()
        except OSError:
            pass


class Response:
    """An answer whose body is read piece by piece. Must be closed; one that was read to its end leaves its connection for others."""

    def __init__(self, transport: Transport, connection: Connection, reader: http1.Reader, deadline: float) -> None:
        self._transport = transport
        self.connection = connection
        self.reader = reader
        self._deadline = deadline
        assert reader.head is not None
        self.head = reader.head
        self._open = True

    def pieces(self) -> Iterator[bytes]:
        with self._transport.errors(self._deadline):
            while True:
                data = self.reader.data()
                if data:
                    yield data
                elif self.reader.done:
                    return
                else:
                    self.reader.feed(self.connection.recv(self._deadline))

    def read(self, limit: int = connect.MAX_MESSAGE) -> bytes:
        out = bytearray()
        for piece in self.pieces():
            out += piece
            if len(out) > limit:
                self.close()
                raise Unavailable(f"answer of more than {limit} octets")
        return bytes(out)

    def close(self) -> None:
        if self._open:
            self._open = False
            if self.reader.reusable and not self.connection.spent:
                self._transport.put(self.connection)
            else:
                self.connection.close()

    def detach(self) -> Connection:
        """Takes the connection over, after an upgrade."""
        self._open = False
        return self.connection

    def __enter__(self) -> Response:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Transport:
    """Connections to one server. `_idle` is the only state that is shared, under `_lock`; no I/O happens under it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.recorded = Recorded()
        self._lock = threading.Lock()
        self._idle: List[Connection] = []
        self._pid = os.getpid()
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for c in idle:
            c.close()

    # Connections.

    def _take(self, deadline: float, fresh: bool) -> Connection:
        if os.getpid() != self._pid:  # forked: the parent goes on using these sockets
            self._lock, self._idle, self._pid = threading.Lock(), [], os.getpid()
        while not fresh:
            with self._lock:
                if not self._idle:
                    break
                c = self._idle.pop()
            if time.monotonic() - c.idle_since < IDLE_TIME and not c.readable():
                return c
            c.close()
        return self._dial(deadline)

    def put(self, c: Connection) -> None:
        c.idle_since = time.monotonic()
        with self._lock:
            if not self._closed and len(self._idle) < MAX_IDLE and os.getpid() == self._pid:
                self._idle.append(c)
                return
        c.close()

    def _dial(self, deadline: float) -> Connection:
        cfg = self.config
        left = min(CONNECT_TIME, deadline - time.monotonic())
        if left <= 0:
            raise DeadlineExceeded(f"{cfg.url}: the call's deadline has passed")
        sock: Optional[socket.socket] = None
        try:
            if cfg.socket is not None:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.settimeout(left)
                sock.connect(cfg.socket)
            else:
                assert cfg.address is not None
                sock = socket.create_connection(cfg.address, left)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(sock)
                if cfg.tls is not None:
                    sock.settimeout(left)
                    sock = cfg.tls.wrap_socket(sock, server_hostname=cfg.address[0])
        except BaseException as e:
            if sock is not None:
                sock.close()
            if isinstance(e, OSError):
                raise unsent(f"{cfg.url}: {e or 'timed out'} (is `dsec up` running?)") from None
            raise
        return Connection(sock, cfg.url)

    @contextmanager
    def errors(self, deadline: float) -> Iterator[None]:
        """Gives failures of the socket and of HTTP the client's types."""
        try:
            yield
        except socket.timeout:
            raise DeadlineExceeded(f"{self.config.url}: no answer within the call's deadline") from None
        except (OSError, http1.ProtocolError) as e:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{self.config.url}: no answer within the call's deadline") from None
            raise Unavailable(f"{self.config.url}: connection broke off: {e}") from None

    # Requests.

    def request(
        self, method: str, target: str, headers: Mapping[str, str], body: Optional[Body], deadline: float, fresh: bool = False, bodyless: bool = False
    ) -> Response:
        """Sends a request and returns when the head of its answer is there. `bodyless` leaves out even the length."""
        size = -1 if bodyless else 0 if body is None else body.size
        merged: Dict[str, str] = self.config.headers()
        lower = {k.lower() for k in headers}
        merged = {k: v for k, v in merged.items() if k.lower() not in lower}
        merged.update(headers)
        head = http1.request_head(method, self.config.prefix + target, merged, size)
        pieces = body.open() if body is not None else iter(())
        c = self._take(deadline, fresh)
        try:
            with self.errors(deadline):
                self._send(c, head, pieces, size, deadline)
                reader = http1.Reader(method)
                while reader.head is None:
                    reader.feed(c.recv(deadline))
            return Response(self, c, reader, deadline)
        except SourceError as e:
            c.close()
            raise e.error from None
        except BaseException:
            c.close()
            raise

    def _send(self, c: Connection, head: bytes, pieces: Iterator[bytes], size: Optional[int], deadline: float) -> None:
        """A server may answer before it has read all: what it says then counts, and the rest is not sent."""
        pending, first = head, True
        while True:
            try:  # a failure of the source is the caller's and must not look like one of the socket
                piece = next(pieces, None)
            except OSError as e:
                raise SourceError(e) from e
            if piece is not None:
                pending += http1.chunk(piece) if size is None else piece
            elif size is None:
                pending += http1.LAST_CHUNK
            if pending and not first and c.readable():
                c.spent = True
                return
            try:
                c.send(pending, deadline)
            except (BrokenPipeError, ConnectionResetError):
                if not c.readable():
                    raise
                c.spent = True
                return
            if piece is None:
                return
            pending, first = b"", False

    # Calls.

    def run(self, op: Op[T]) -> T:
        """Drives an operation to its result."""
        try:
            step = next(op)
            while True:
                try:
                    answer: JSON = {}
                    if isinstance(step, Sleep):
                        time.sleep(step.seconds)
                    else:
                        answer = self._call(step)
                except BaseException as e:
                    step = op.throw(e)
                else:
                    step = op.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _call(self, call: Call) -> JSON:
        attempts = Attempts(self.config.timeout if call.timeout is None else call.timeout, call.safe)
        while True:
            try:
                return self._unary(call, attempts.deadline)
            except Unavailable as e:
                delay = attempts.again(e)
            time.sleep(delay)

    def _unary(self, call: Call, deadline: float) -> JSON:
        data = connect.dump(call.body)
        body = Body(lambda: iter((data,)), len(data), True)
        headers = connect.unary_headers(deadline - time.monotonic())
        with self.request("POST", connect.target(call.procedure), headers, body, deadline, fresh=not call.safe) as r:
            answer = r.read()
            if r.head.status != 200:
                raise connect.failure(r.head, answer)
            return connect.load(answer)

    def upload(self, method: str, target: str, headers: Mapping[str, str], body: Body, timeout: Optional[float], safe: bool = True) -> JSON:
        """A request with a large body and a small answer; sent again when that is safe and the body can be had again."""
        attempts = Attempts(STREAM_TIME if timeout is None else timeout, safe and body.replayable)
        while True:
            try:
                with self.request(method, target, headers, body, attempts.deadline, fresh=not safe or not body.replayable) as r:
                    answer = r.read()
                    if r.head.status != 200:
                        raise connect.failure(r.head, answer)
                    return connect.load(answer)
            except Unavailable as e:
                delay = attempts.again(e)
            time.sleep(delay)

    def download(self, target: str, timeout: Optional[float]) -> Response:
        """A GET whose body the caller reads."""
        attempts = Attempts(STREAM_TIME if timeout is None else timeout, True)
        while True:
            try:
                r = self.request("GET", target, {}, None, attempts.deadline, bodyless=True)
                if r.head.status == 200:
                    return r
                with r:
                    raise connect.failure(r.head, r.read(1 << 20))
            except Unavailable as e:
                delay = attempts.again(e)
            time.sleep(delay)

    @contextmanager
    def stream(self, procedure: str, body: JSON, deadline: float, stated: bool) -> Iterator[Iterator[Fields]]:
        """A server stream: its messages, one by one. What ends it badly is raised."""
        data = connect.envelope(body)
        headers = connect.stream_headers(deadline - time.monotonic() if stated else None)
        r = self.request("POST", connect.target(procedure), headers, Body(lambda: iter((data,)), len(data), True), deadline)
        with r:
            if r.head.status != 200:
                raise connect.failure(r.head, r.read(1 << 20))
            yield self._messages(r)

    def _messages(self, r: Response) -> Iterator[Fields]:
        messages = connect.Messages()
        for piece in r.pieces():
            for m in messages.feed(piece):
                yield Fields(m)
        messages.finish()
