"""The Connect protocol with JSON, without I/O: bodies of calls, answers, errors, and the envelopes of streams."""

from __future__ import annotations

import json
import struct
from typing import Dict, List, Mapping, Optional

from ._config import PROTOCOL
from ._http1 import Head
from ._octets import JSON
from .errors import DsecError, Internal, Unavailable, VersionMismatch, from_code

MAX_MESSAGE = 256 << 20  # octets; the server's largest answer is 192 MiB
_END, _COMPRESSED = 2, 1
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False).encode


def target(procedure: str) -> str:
    """The path of "SandboxService/Create"."""
    return "/dsec.v1." + procedure


def unary_headers(timeout: float) -> Dict[str, str]:
    return {"Content-Type": "application/json", "Connect-Protocol-Version": "1", "Connect-Timeout-Ms": str(max(1, int(timeout * 1000)))}


def stream_headers(timeout: Optional[float]) -> Dict[str, str]:
    out = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
    if timeout is not None:
        out["Connect-Timeout-Ms"] = str(max(1, int(timeout * 1000)))
    return out


def dump(body: Mapping[str, object]) -> bytes:
    return _encode(body).encode("utf-8")


def load(data: bytes) -> JSON:
    try:
        out = json.loads(data)
    except ValueError:
        raise Internal(f"the server's answer is no JSON: {data[:80]!r}") from None
    if not isinstance(out, dict):
        raise Internal(f"the server's answer is no JSON object: {data[:80]!r}")
    return out


def failure(head: Head, body: bytes) -> DsecError:
    """The error of an answer whose status is not 200, for calls and plain HTTP alike."""
    try:
        told = json.loads(body)
        code, message = told["code"], told.get("message", "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Unavailable(f"status {head.status} from what is not a dsec server (a proxy?): {body[:200]!r}")
    return _typed(str(code), str(message), head.get("dsec-protocol"))


def _typed(code: str, message: str, protocol: Optional[str]) -> DsecError:
    if code == "failed_precondition" and (protocol not in (None, str(PROTOCOL)) or message.startswith("client speaks protocol")):
        return VersionMismatch(message, code)
    return from_code(code, message)


def check_version(version: str, protocol: int, oldest: int) -> None:
    """Raises VersionMismatch unless the server serves this client's protocol."""
    if oldest <= PROTOCOL <= protocol:
        return
    side = "the server" if PROTOCOL > protocol else "this client"
    raise VersionMismatch(f"server {version} speaks protocols {oldest} to {protocol}, this client {PROTOCOL}: upgrade {side}")


def envelope(body: Mapping[str, object]) -> bytes:
    data = dump(body)
    return struct.pack(">BI", 0, len(data)) + data


class Messages:
    """Cuts a stream's body into messages. `ended` once the server said how the stream ended; its failure is raised."""

    def __init__(self) -> None:
        self._in = bytearray()
        self.ended = False

    def feed(self, data: bytes) -> List[JSON]:
        self._in += data
        out: List[JSON] = []
        while len(self._in) >= 5:
            flags, size = struct.unpack_from(">BI", self._in)
            if size > MAX_MESSAGE or flags & _COMPRESSED or self.ended:
                raise Internal(f"stream: message of {size} octets with flags {flags}")
            if len(self._in) < 5 + size:
                break
            body = load(bytes(self._in[5 : 5 + size]) or b"{}")
            del self._in[: 5 + size]
            if not flags & _END:
                out.append(body)
                continue
            self.ended = True
            told = body.get("error")
            if isinstance(told, dict):
                self._failure = _typed(str(told.get("code", "unknown")), str(told.get("message", "")), None)
        return out

    _failure: Optional[DsecError] = None

    def finish(self) -> None:
        """To call when the body has ended, or `ended`: raises what the server told, or that it told nothing."""
        if self._failure is not None:
            raise self._failure
        if not self.ended:
            raise Unavailable("the stream broke off")
