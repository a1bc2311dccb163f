"""What a client knows of steps that were done before it came: their results are answered without asking the server.

A result stands for a request when the hash of the request is the recorded one (docs/format/records.md); whatever else is asked of the server,
which compares too and refuses another request under the same step key.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from typing import Dict, List, Optional

from ._octets import JSON, Fields
from .errors import Unavailable
from .model import Outcome, Result, StreamEnd

OUTPUT_LIMIT = 64 << 10  # octets of a stream that are learned
MOST = 1 << 30  # octets of all
ANSWER = 16 << 20  # octets of a stream in a result
DEFAULT_CAP = 16 << 20


def request_hash(body: JSON, cwd: str, user: str) -> str:
    """The hash of a StartRequest for a sandbox of that cwd and user; empty where only the server can compare."""
    f = Fields(body)
    if f.has("terminal"):
        return ""
    out: List[bytes] = []

    def put(value: bytes) -> None:
        out.append(b"%d:" % len(value) + value)

    def octets(fields: Fields, name: str) -> bytes:
        raw = fields.text(name + "_raw")
        return base64.b64decode(raw) if raw else fields.text(name).encode()

    put(b"dsec-request-1")
    argv = [base64.b64decode(a) for a in f.texts("argv_raw")] or [a.encode() for a in f.texts("argv")]
    put(b"%d" % len(argv))
    for a in argv:
        put(a)
    put(f.text("session").encode())
    put(octets(f, "text"))
    env = f.subs("env", lambda v: v)
    put(b"%d" % len(env))
    for v in env:
        if v.flag("secret"):
            return ""
        put(octets(v, "name") + b"=" + octets(v, "value"))
    own_cwd, own_user = octets(f, "cwd"), f.text("user")
    if not f.text("session"):
        own_cwd, own_user = own_cwd or cwd.encode(), own_user or user
    put(own_cwd)
    put(own_user.encode())
    stdin = f.raw("stdin")
    put(hashlib.sha256(stdin).hexdigest().encode() if stdin else b"")
    put(b"1" if f.flag("stdin_open") else b"0")
    put(b"%d" % f.number("timeout_ms"))
    put(b"%d" % (f.number("output_cap") or DEFAULT_CAP))
    return hashlib.sha256(b"".join(out)).hexdigest()


def _whole(data: bytes, end: StreamEnd) -> bool:
    return len(data) >= min(end.head if end.truncated else end.total, ANSWER)


class _Box:
    def __init__(self, f: Fields) -> None:
        self.cwd = f.text("cwd")
        self.user = f.text("user")
        self.steps: Dict[str, Fields] = {}


class Recorded:
    """Recorded steps of sandboxes, by sandbox and step key; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boxes: Dict[str, _Box] = {}
        self._at = ""
        self._size = 0
        self._missing: List[str] = []

    def begin(self) -> None:
        """A new stream of steps begins."""
        with self._lock:
            self._at, self._missing = "", []

    def take(self, f: Fields) -> int:
        """One message of the stream; answers how many steps were learned."""
        n = 0
        with self._lock:
            self._missing += f.subs("errors", lambda e: e.text("message"))
            if f.has("sandbox"):
                box = f.sub("sandbox")
                self._at = box.text("id")
                self._boxes[self._at] = _Box(box)
            for s in f.subs("steps", lambda s: s):
                steps = self._boxes[self._at].steps
                steps.pop(s.text("id"), None)  # the last end counts
                size = (len(s.text("stdout")) + len(s.text("stderr"))) * 3 // 4 + 1000
                if s.text("state") == "ended" and s.text("requestHash") and self._size + size <= MOST:
                    steps[s.text("id")] = s
                    self._size += size
                    n += 1
        return n

    def end(self) -> None:
        """The stream has ended: raises Unavailable when hosts did not answer."""
        if self._missing:
            raise Unavailable("fast-forward: part is missing: " + "; ".join(self._missing))

    def result(self, body: JSON) -> Optional[Result]:
        """The recorded result of a StartRequest, None where the server is to be asked."""
        with self._lock:
            box = self._boxes.get(str(body.get("sandbox")))
            s = box.steps.get(str(body.get("id"))) if box else None
        if box is None or s is None:
            return None
        if request_hash(body, box.cwd, box.user) != s.text("requestHash"):
            return None
        outcome = Outcome.of(s.sub("outcome"))
        stdout, stderr = s.raw("stdout"), s.raw("stderr")
        if outcome.kind == "interrupted" or not _whole(stdout, outcome.stdout) or not _whole(stderr, outcome.stderr):
            return None
        return Result(s.text("id"), stdout, stderr, outcome)
