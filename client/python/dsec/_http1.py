"""HTTP/1.1 as a client speaks it, without I/O: octets of requests, and a parser that is fed what arrives.

The peer is not trusted: heads are at most 64 KiB, chunk lines 1 KiB, and a body that ends early is an error, never a short body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Mapping, Optional, Tuple

MAX_HEAD = 64 << 10
MAX_LINE = 1 << 10


class ProtocolError(Exception):
    """The peer does not speak HTTP/1.1, or broke off."""


@dataclass(frozen=True)
class Head:
    """Status and headers of an answer."""

    status: int
    reason: str
    headers: Tuple[Tuple[str, str], ...]  # names in lower case

    def get(self, name: str) -> Optional[str]:
        for k, v in self.headers:
            if k == name:
                return v
        return None

    def has_token(self, name: str, token: str) -> bool:
        return any(k == name and token in (t.strip().lower() for t in v.split(",")) for k, v in self.headers)


def request_head(method: str, target: str, headers: Mapping[str, str], size: Optional[int]) -> bytes:
    """The head of a request. `size` is the body's length, None for one in chunks, -1 for no body and no length at all."""
    lines = [f"{method} {target} HTTP/1.1"]
    for name, value in headers.items():
        if not name or any(c in name for c in " :\r\n\0") or any(c in value for c in "\r\n\0"):
            raise ValueError(f"header {name!r}: must not hold line ends, and no colon or blank in its name")
        lines.append(f"{name}: {value}")
    if size is None:
        lines.append("Transfer-Encoding: chunked")
    elif size >= 0:
        lines.append(f"Content-Length: {size}")
    if any(c in target for c in " \r\n\0") or not target.isascii():
        raise ValueError(f"target {target!r}: must be percent-encoded")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def chunk(data: bytes) -> bytes:
    """A piece of a body in chunks; must not be empty."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


class Reader:
    """Parses one answer. `feed` what arrives (b"" at its end), then ask for `head` and `data`."""

    def __init__(self, method: str) -> None:
        self.head: Optional[Head] = None
        self.trailers: Tuple[Tuple[str, str], ...] = ()
        self.done = False  # the body is whole
        self._method = method
        self._in = bytearray()
        self._eof = False
        self._left = 0  # octets of the body or chunk; -1: until the end of the connection
        self._mode = "head"  # head | length | size | chunk | crlf | trailers | close | upgrade | done

    def feed(self, data: bytes) -> None:
        if data:
            self._in += data
        else:
            self._eof = True
        if self._mode == "head":
            self._read_head()

    @property
    def reusable(self) -> bool:
        """Whether another request may follow on the connection."""
        h = self.head
        return self._mode == "done" and h is not None and not self._in and not self._eof and not h.has_token("connection", "close")

    @property
    def upgraded(self) -> bool:
        return self._mode == "upgrade"

    def rest(self) -> bytes:
        """What followed the head of an upgrade."""
        out = bytes(self._in)
        self._in.clear()
        return out

    def _read_head(self) -> None:
        while self.head is None:
            end = self._in.find(b"\r\n\r\n")
            if end < 0:
                if len(self._in) > MAX_HEAD:
                    raise ProtocolError(f"head of more than {MAX_HEAD} octets")
                if self._eof:
                    raise ProtocolError("connection closed before the answer" if not self._in else "connection closed in the head")
                return
            if end > MAX_HEAD:
                raise ProtocolError(f"head of more than {MAX_HEAD} octets")
            head = _parse_head(bytes(self._in[:end]))
            del self._in[: end + 4]
            if 100 <= head.status < 200 and head.status != 101:
                continue
            self.head = head
        self._choose(self.head)

    def _choose(self, head: Head) -> None:
        length, coding = head.get("content-length"), head.get("transfer-encoding")
        if head.status == 101:
            self._mode = "upgrade"
        elif self._method == "HEAD" or head.status in (204, 304):
            self._finish()
        elif coding is not None:
            if coding.strip().lower() != "chunked":
                raise ProtocolError(f"transfer coding {coding!r}")
            self._mode = "size"
        elif length is not None:
            if not (length.isascii() and length.isdigit() and len(length) < 20):
                raise ProtocolError(f"content length {length!r}")
            self._left = int(length)
            self._mode = "length"
            if self._left == 0:
                self._finish()
        else:
            self._mode = "close"

    def _finish(self) -> None:
        self._mode, self.done = "done", True

    def data(self) -> bytes:
        """The next piece of the body; b"" when more must be fed, or `done`."""
        while True:
            if self._mode == "length" or self._mode == "chunk":
                if self._in:
                    out = self._take(self._left)
                    self._left -= len(out)
                    if self._left == 0:
                        if self._mode == "length":
                            self._finish()
                        else:
                            self._mode = "crlf"
                    return out
            elif self._mode == "close":
                if self._in:
                    return self._take(len(self._in))
                if self._eof:
                    self._finish()
                    return b""
            elif self._mode == "size" or self._mode == "crlf" or self._mode == "trailers":
                line = self._line()
                if line is not None:
                    self._control(line)
                    continue
            else:
                return b""
            if self._eof:
                raise ProtocolError("connection closed in the middle of the body")
            return b""

    def _take(self, n: int) -> bytes:
        out = bytes(self._in[:n]) if n < len(self._in) else bytes(self._in)
        del self._in[:n]
        return out

    def _line(self) -> Optional[bytes]:
        end = self._in.find(b"\r\n")
        if end > MAX_LINE or (end < 0 and len(self._in) > MAX_LINE):
            raise ProtocolError("chunk line too long")
        if end < 0:
            return None
        out = bytes(self._in[:end])
        del self._in[: end + 2]
        return out

    def _control(self, line: bytes) -> None:
        if self._mode == "crlf":
            if line:
                raise ProtocolError("chunk longer than its size")
            self._mode = "size"
        elif self._mode == "size":
            size = line.split(b";")[0].strip()
            try:
                self._left = int(size, 16)
            except ValueError:
                raise ProtocolError(f"chunk size {size[:20]!r}") from None
            if self._left < 0 or not size.isalnum():
                raise ProtocolError(f"chunk size {size[:20]!r}")
            self._mode = "chunk" if self._left else "trailers"
        elif line:
            if len(self.trailers) >= 64:
                raise ProtocolError("too many trailers")
            self.trailers += (_parse_field(line),)
        else:
            self._finish()


def _parse_head(data: bytes) -> Head:
    first, *lines = data.split(b"\r\n")
    parts = first.split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not (len(parts[1]) == 3 and parts[1].isdigit()):
        raise ProtocolError(f"not an HTTP answer: {first[:60]!r}")
    fields: List[Tuple[str, str]] = [_parse_field(line) for line in lines]
    if parts[0] == b"HTTP/1.0":
        fields.append(("connection", "close"))
    return Head(int(parts[1]), parts[2].decode("latin-1") if len(parts) > 2 else "", tuple(fields))


def _parse_field(line: bytes) -> Tuple[str, str]:
    name, colon, value = line.partition(b":")
    if not colon or not name or name != name.strip():
        raise ProtocolError(f"header line {line[:60]!r}")
    return name.decode("latin-1").lower(), value.strip().decode("latin-1")
