"""WebSocket (RFC 6455) as a client speaks it, without I/O."""

from __future__ import annotations

import base64
import hashlib
import os
import struct
from typing import Dict, Iterator, List, Optional, Sequence, Tuple, Union

from ._http1 import Head, ProtocolError

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
_CONTINUE = 0
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Closed(Exception):
    """The peer closed the connection: with a code (1005: it gave none, 1006: it just went away) and a reason."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(f"closed with {code} {reason}".rstrip())
        self.code = code
        self.reason = reason


Message = Union[str, bytes]


def handshake(protocols: Sequence[str]) -> Tuple[str, Dict[str, str]]:
    """A key and the headers that carry it."""
    key = base64.b64encode(os.urandom(16)).decode("ascii")
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key}
    if protocols:
        headers["Sec-WebSocket-Protocol"] = ", ".join(protocols)
    return key, headers


def check(head: Head, key: str) -> None:
    want = base64.b64encode(hashlib.sha1(key.encode("ascii") + _GUID).digest()).decode("ascii")
    if head.get("sec-websocket-accept") != want:
        raise ProtocolError("the server inside does not speak WebSocket")


def _mask(data: bytes, key: bytes) -> bytes:
    n = len(data)
    mask = (key * (n // 4 + 1))[:n]
    return (int.from_bytes(data, "little") ^ int.from_bytes(mask, "little")).to_bytes(n, "little")


def frame(opcode: int, data: bytes) -> bytes:
    n = len(data)
    head = struct.pack(">BB", 0x80 | opcode, 0x80 | n) if n < 126 else (
        struct.pack(">BBH", 0x80 | opcode, 0xFE, n) if n < 65536 else struct.pack(">BBQ", 0x80 | opcode, 0xFF, n)
    )
    key = os.urandom(4)
    return head + key + _mask(data, key)


def close_frame(code: Optional[int], reason: str) -> bytes:
    if code is None:
        return frame(CLOSE, b"")
    if not (1000 <= code < 5000) or code in (1004, 1005, 1006, 1015):
        raise ValueError(f"close code {code}: can't be sent")
    return frame(CLOSE, struct.pack(">H", code) + reason.encode("utf-8")[:123])


class Parser:
    """Feed what arrives; `events` gives whole messages and control frames as (opcode, octets)."""

    def __init__(self, limit: int) -> None:
        self._in = bytearray()
        self._limit = limit
        self._kind = 0
        self._parts: List[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> None:
        self._in += data

    def events(self) -> Iterator[Tuple[int, bytes]]:
        while True:
            one = self._frame()
            if one is None:
                return
            last, opcode, data = one
            if opcode >= CLOSE:
                if not last or len(data) > 125:
                    raise ProtocolError("broken control frame")
                yield opcode, data
                continue
            if (opcode == _CONTINUE) != bool(self._kind) or opcode not in (_CONTINUE, TEXT, BINARY):
                raise ProtocolError("frames out of order")
            self._kind = self._kind or opcode
            self._parts.append(data)
            if last:
                kind, whole = self._kind, b"".join(self._parts)
                self._kind, self._parts, self._size = 0, [], 0
                yield kind, whole

    def _frame(self) -> Optional[Tuple[bool, int, bytes]]:
        if len(self._in) < 2:
            return None
        first, second = self._in[0], self._in[1]
        if first & 0x70 or second & 0x80:
            raise ProtocolError("frame with reserved bits or a mask")
        n, at = second & 0x7F, 2
        if n >= 126:
            at = 4 if n == 126 else 10
            if len(self._in) < at:
                return None
            n = int.from_bytes(self._in[2:at], "big")
        if self._size + n > self._limit:
            raise ProtocolError(f"message of more than {self._limit} octets")
        if len(self._in) < at + n:
            return None
        data = bytes(self._in[at : at + n])
        del self._in[: at + n]
        if first & 0x0F < CLOSE:
            self._size += n
        return bool(first & 0x80), first & 0x0F, data


def closed(data: bytes) -> Closed:
    if len(data) < 2:
        return Closed(1005)
    return Closed(int.from_bytes(data[:2], "big"), data[2:].decode("utf-8", "replace"))


def message(opcode: int, data: bytes) -> Message:
    if opcode == BINARY:
        return data
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ProtocolError("text message that is not UTF-8") from None
