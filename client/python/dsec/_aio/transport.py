"""HTTP/1.1 on asyncio streams with a pool of kept connections, and the driver of the calls. Belongs to one event loop at a time; on
another one it starts with an empty pool. No proxy is ever used."""

from __future__ import annotations

import asyncio
import os
import time
from types import TracebackType
from typing import AsyncIterator, Awaitable, Callable, Dict, Iterator, List, Mapping, Optional, Set, Tuple, Type, TypeVar, Union

from .. import _connect as connect
from .. import _http1 as http1
from .._body import Body, SourceError
from .._config import Config
from .._net import CONNECT_TIME, IDLE_TIME, MAX_IDLE, READ, STREAM_TIME, keep_alive
from .._octets import JSON, Fields
from .._ops import Attempts, Call, Op, Sleep
from .._recorded import Recorded
from ..errors import DeadlineExceeded, DsecError, Unavailable, unsent

T = TypeVar("T")


async def within(seconds: float, what: Awaitable[T], drop: Callable[[T], object] = lambda _: None) -> T:
    """`asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes in the moment of the result: a task that was cancelled
    went on. What comes when nobody waits any more is dropped."""
    task = asyncio.ensure_future(what)

    def late(t: asyncio.Future[T]) -> None:
        if not t.cancelled() and t.exception() is None:
            drop(t.result())

    done = False
    try:
        await asyncio.wait([task], timeout=seconds)
        done = task.done()
    finally:
        if not done:
            task.cancel()
            task.add_done_callback(late)
    if not done:
        raise asyncio.TimeoutError()
    return task.result()


def hang_up(pair: Tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    pair[1].transport.abort()


class Connection:
    """One connection. At the deadline that is armed it is cut, which ends every wait on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.idle_since = 0.0
        self.spent = False  # not for another request
        self.expired = False
        self._timer: Optional[asyncio.TimerHandle] = None

    def arm(self, deadline: float) -> None:
        self.disarm()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - time.monotonic()), self._expire)

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self.expired = True
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def recv(self) -> bytes:
        data = await self.reader.read(READ)
        if not data and self.expired:
            raise asyncio.TimeoutError()
        return data

    @property
    def alive(self) -> bool:
        return not (self.reader.at_eof() or self.writer.is_closing())

    def close(self) -> None:
        self.disarm()
        self.writer.transport.abort()


class Response:
    """An answer whose body is read piece by piece. Must be closed; one that was read to its end leaves its connection for others."""

    def __init__(self, transport: Transport, connection: Connection, reader: http1.Reader) -> None:
        self._transport = transport
        self.connection = connection
        self.reader = reader
        assert reader.head is not None
        self.head = reader.head
        self._open = True

    async def piece(self) -> bytes:
        """The next piece of the body, b"" at its end."""
        try:
            while True:
                data = self.reader.data()
                if data or self.reader.done:
                    return data
                self.reader.feed(await self.connection.recv())
        except (OSError, EOFError, http1.ProtocolError, asyncio.TimeoutError) as e:
            raise self._transport.failure(self.connection, e) from None

    async def pieces(self) -> AsyncIterator[bytes]:
        while True:
            data = await self.piece()
            if not data:
                return
            yield data

    async def read(self, limit: int = connect.MAX_MESSAGE) -> bytes:
        out = bytearray()
        while True:
            piece = await self.piece()
            if not piece:
                return bytes(out)
            out += piece
            if len(out) > limit:
                self.close()
                raise Unavailable(f"answer of more than {limit} octets")

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
        self.connection.disarm()
        return self.connection

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Stream:
    """A server stream: `async for` gives its messages. What ends it badly is raised."""

    def __init__(self, transport: Transport, procedure: str, body: JSON, deadline: float, stated: bool) -> None:
        self._transport = transport
        self._procedure = procedure
        self._body = connect.envelope(body)
        self._deadline, self._stated = deadline, stated
        self._response: Optional[Response] = None

    async def __aenter__(self) -> AsyncIterator[Fields]:
        headers = connect.stream_headers(self._deadline - time.monotonic() if self._stated else None)
        body = Body(lambda: iter((self._body,)), len(self._body), True)
        r = await self._transport.request("POST", connect.target(self._procedure), headers, body, self._deadline)
        self._response = r
        if r.head.status != 200:
            try:
                raise connect.failure(r.head, await r.read(1 << 20))
            finally:
                r.close()
        return self._messages(r)

    async def _messages(self, r: Response) -> AsyncIterator[Fields]:
        messages = connect.Messages()
        while True:
            piece = await r.piece()
            if not piece:
                break
            for m in messages.feed(piece):
                yield Fields(m)
        messages.finish()

    async def __aexit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        if self._response is not None:
            self._response.close()


class Transport:
    """Connections to one server."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.recorded = Recorded()
        self._idle: List[Connection] = []
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._pid = os.getpid()
        self._closed = False
        self._undoing: Set["asyncio.Task[JSON]"] = set()

    async def close(self) -> None:
        """Waits for what is being undone, then closes the kept connections."""
        if self._undoing and self._loop is asyncio.get_running_loop():
            await asyncio.gather(*self._undoing, return_exceptions=True)
        self._closed = True
        idle, self._idle = self._idle, []
        for c in idle:
            c.close()

    # Connections.

    async def _take(self, deadline: float, fresh: bool) -> Connection:
        loop = asyncio.get_running_loop()
        if loop is not self._loop or os.getpid() != self._pid:
            self._loop, self._idle, self._pid, self._undoing = loop, [], os.getpid(), set()
        while self._idle and not fresh:
            c = self._idle.pop()
            if c.alive and time.monotonic() - c.idle_since < IDLE_TIME:
                return c
            c.close()
        return await self._dial(deadline)

    def put(self, c: Connection) -> None:
        c.disarm()
        c.idle_since = time.monotonic()
        if not self._closed and c.alive and len(self._idle) < MAX_IDLE:
            self._idle.append(c)
        else:
            c.close()

    async def _dial(self, deadline: float) -> Connection:
        cfg = self.config
        left = min(CONNECT_TIME, deadline - time.monotonic())
        if left <= 0:
            raise DeadlineExceeded(f"{cfg.url}: the call's deadline has passed")
        try:
            if cfg.socket is not None:
                pair = await within(left, asyncio.open_unix_connection(cfg.socket, limit=READ), hang_up)
            else:
                assert cfg.address is not None
                name = cfg.address[0] if cfg.tls is not None else None
                opened = asyncio.open_connection(*cfg.address, limit=READ, ssl=cfg.tls, server_hostname=name)
                pair = await within(left, opened, hang_up)
                keep_alive(pair[1].get_extra_info("socket"))
        except asyncio.TimeoutError:
            raise unsent(f"{cfg.url}: no connection within {left:.0f} s") from None
        except OSError as e:
            raise unsent(f"{cfg.url}: {e} (is `dsec up` running?)") from None
        return Connection(*pair)

    def failure(self, c: Connection, e: BaseException) -> DsecError:
        """Gives a failure of the socket or of HTTP the client's type."""
        if c.expired:
            return DeadlineExceeded(f"{self.config.url}: no answer within the call's deadline")
        return Unavailable(f"{self.config.url}: connection broke off: {e}")

    # Requests.

    async def request(
        self, method: str, target: str, headers: Mapping[str, str], body: Optional[Union[Body, AsyncBody]], deadline: float,
        fresh: bool = False, bodyless: bool = False,
    ) -> Response:
        """Sends a request and returns when the head of its answer is there. `bodyless` leaves out even the length."""
        size = -1 if bodyless else 0 if body is None else body.size
        lower = {k.lower() for k in headers}
        merged: Dict[str, str] = {k: v for k, v in self.config.headers().items() if k.lower() not in lower}
        merged.update(headers)
        head = http1.request_head(method, self.config.prefix + target, merged, size)
        c = await self._take(deadline, fresh)
        early: Optional["asyncio.Future[None]"] = None
        try:
            c.arm(deadline)
            reader = http1.Reader(method)
            if body is None or (isinstance(body, Body) and size is not None and size <= READ):
                await c.send(head + (_whole(body) if isinstance(body, Body) else b""))
            else:
                await c.send(head)
                early = asyncio.ensure_future(_read_head(c, reader))
                c.spent = await self._send(c, body, early)
                await early
            await _read_head(c, reader)
            return Response(self, c, reader)
        except SourceError as e:
            c.close()
            raise e.error from None
        except (OSError, EOFError, http1.ProtocolError, asyncio.TimeoutError) as e:
            c.close()
            raise self.failure(c, e) from None
        except BaseException:
            c.close()
            raise
        finally:
            if early is not None and not early.cancel() and not early.cancelled():
                early.exception()  # is told already

    async def _send(self, c: Connection, body: Union[Body, AsyncBody], early: "asyncio.Future[None]") -> bool:
        """Sends a body; True when the server answered before it had read all, so that the rest was not sent. A body's source may block
        (a file), so it is read in a thread."""
        pieces = body.open() if isinstance(body, Body) else None
        more = body.open() if isinstance(body, AsyncBody) else None
        try:
            while True:
                piece: Optional[bytes]
                try:  # a failure of the source is the caller's and must not look like one of the socket
                    if pieces is not None:
                        piece = await asyncio.get_running_loop().run_in_executor(None, _next, pieces)
                    else:
                        assert more is not None
                        piece = await _anext(more)
                        await asyncio.sleep(0)  # so that an early answer is seen
                except OSError as e:
                    raise SourceError(e) from e
                data = b""
                if piece is not None:
                    data = http1.chunk(piece) if body.size is None else piece
                elif body.size is None:
                    data = http1.LAST_CHUNK
                if early.done():
                    return bool(data)
                try:
                    await c.send(data)
                except (BrokenPipeError, ConnectionResetError):
                    if c.expired or not early.done() or early.exception() is not None:
                        raise
                    return True
                if piece is None:
                    return False
        finally:
            if more is not None:
                close = getattr(more, "aclose", None)
                if close is not None:
                    await close()

    # Calls.

    async def run(self, op: Op[T]) -> T:
        """Drives an operation to its result."""
        try:
            step = next(op)
            while True:
                try:
                    answer: JSON = {}
                    if isinstance(step, Sleep):
                        await asyncio.sleep(step.seconds)
                    elif step.undo:
                        answer = await self._undo(step)
                    else:
                        answer = await self._call(step)
                except BaseException as e:
                    step = op.throw(e)
                else:
                    step = op.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _undo(self, call: Call) -> JSON:
        """Goes on when the caller is cancelled; `close` waits for it."""
        task = asyncio.ensure_future(self._call(call))
        self._undoing.add(task)
        task.add_done_callback(self._undone)
        return await asyncio.shield(task)

    def _undone(self, task: "asyncio.Task[JSON]") -> None:
        self._undoing.discard(task)
        if not task.cancelled():
            task.exception()  # was told to the caller, if there still is one

    async def _call(self, call: Call) -> JSON:
        attempts = Attempts(self.config.timeout if call.timeout is None else call.timeout, call.safe)
        while True:
            try:
                return await self._unary(call, attempts.deadline)
            except Unavailable as e:
                delay = attempts.again(e)
            await asyncio.sleep(delay)

    async def _unary(self, call: Call, deadline: float) -> JSON:
        data = connect.dump(call.body)
        body = Body(lambda: iter((data,)), len(data), True)
        headers = connect.unary_headers(deadline - time.monotonic())
        async with await self.request("POST", connect.target(call.procedure), headers, body, deadline, fresh=not call.safe) as r:
            answer = await r.read()
            if r.head.status != 200:
                raise connect.failure(r.head, answer)
            return connect.load(answer)

    async def upload(
        self, method: str, target: str, headers: Mapping[str, str], body: Union[Body, AsyncBody], timeout: Optional[float], safe: bool = True
    ) -> JSON:
        """A request with a large body and a small answer; sent again when that is safe and the body can be had again."""
        attempts = Attempts(STREAM_TIME if timeout is None else timeout, safe and body.replayable)
        while True:
            try:
                async with await self.request(
                    method, target, headers, body, attempts.deadline, fresh=not safe or not body.replayable
                ) as r:
                    answer = await r.read()
                    if r.head.status != 200:
                        raise connect.failure(r.head, answer)
                    return connect.load(answer)
            except Unavailable as e:
                delay = attempts.again(e)
            await asyncio.sleep(delay)

    async def download(self, target: str, timeout: Optional[float]) -> Response:
        """A GET whose body the caller reads."""
        attempts = Attempts(STREAM_TIME if timeout is None else timeout, True)
        while True:
            try:
                r = await self.request("GET", target, {}, None, attempts.deadline, bodyless=True)
                if r.head.status == 200:
                    return r
                async with r:
                    raise connect.failure(r.head, await r.read(1 << 20))
            except Unavailable as e:
                delay = attempts.again(e)
            await asyncio.sleep(delay)

    def stream(self, procedure: str, body: JSON, deadline: float, stated: bool) -> Stream:
        return Stream(self, procedure, body, deadline, stated)


class AsyncBody:
    """A body whose pieces come from an async iterator; it can't be sent twice."""

    replayable = False
    size: Optional[int] = None

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces

    def open(self) -> AsyncIterator[bytes]:
        return self._pieces


async def _read_head(c: Connection, reader: http1.Reader) -> None:
    while reader.head is None:
        reader.feed(await c.recv())


def _next(pieces: Iterator[bytes]) -> Optional[bytes]:
    return next(pieces, None)


def _whole(body: Body) -> bytes:
    try:
        return b"".join(body.open())
    except OSError as e:
        raise SourceError(e) from e


async def _anext(pieces: AsyncIterator[bytes]) -> Optional[bytes]:
    while True:
        try:
            piece = await pieces.__anext__()
        except StopAsyncIteration:
            return None
        if piece:
            return bytes(piece)
