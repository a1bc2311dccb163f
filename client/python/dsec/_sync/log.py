"""Reading trajectories."""

from __future__ import annotations

import json
import time
from typing import Iterator, Dict, List, Optional, cast

from .._net import STREAM_TIME
from .._octets import JSON
from .._ops import LogCursor
from .._recorded import OUTPUT_LIMIT
from .._trace import Trace
from ..errors import Unavailable
from ..model import LogRecord
from .transport import Transport


def read_log(t: Transport, which: JSON, from_seq: int, follow: bool, output: bool, timeout: Optional[float]) -> Iterator[LogRecord]:
    deadline = time.monotonic() + (STREAM_TIME if timeout is None else timeout)
    cursor = LogCursor(which, from_seq, follow, output)
    while not cursor.done:
        try:
            with t.stream(cursor.procedure, cursor.body(), deadline, timeout is not None) as messages:
                for m in messages:
                    yield from cursor.take(m)
            cursor.close()
        except Unavailable as e:
            time.sleep(cursor.failed(e))


def fast_forward(t: Transport, job: str, timeout: Optional[float]) -> int:
    """Learns the recorded steps of a job. A stream that breaks off is an error: what was learned stays."""
    deadline = time.monotonic() + (STREAM_TIME if timeout is None else timeout)
    t.recorded.begin()
    n = 0
    body: JSON = {"filter": {"job": job}, "output_limit": OUTPUT_LIMIT}
    with t.stream("LogService/Steps", body, deadline, timeout is not None) as messages:
        for m in messages:
            n += t.recorded.take(m)
    t.recorded.end()
    return n


def export(t: Transport, body: JSON, timeout: Optional[float]) -> Iterator[Dict[str, object]]:
    deadline = time.monotonic() + (STREAM_TIME if timeout is None else timeout)
    missing: List[str] = []
    with t.stream("LogService/Export", body, deadline, timeout is not None) as messages:
        for m in messages:
            for row in m.texts("rows"):
                yield cast(Dict[str, object], json.loads(row))
            missing += m.subs("errors", lambda e: e.text("message"))
    if missing:
        raise Unavailable("export: part is missing: " + "; ".join(missing))


def read_trace(t: Transport, body: JSON, timeout: Optional[float]) -> Trace:
    deadline = time.monotonic() + (STREAM_TIME if timeout is None else timeout)
    out = Trace()
    with t.stream("LogService/Trace", body, deadline, timeout is not None) as messages:
        for m in messages:
            out.take(m)
    return out
