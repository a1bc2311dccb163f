"""Reading trajectories."""

from __future__ import annotations

import asyncio
import json
import time
from typing import AsyncIterator, Dict, List, Optional, cast

from .._net import STREAM_TIME
from .._octets import JSON
from .._ops import LogCursor
from .._recorded import OUTPUT_LIMIT
from .._trace import Trace
from ..errors import Unavailable
from ..model import LogRecord
from .transport import Transport


async def read_log(
    t: Transport, which: JSON, from_seq: int, follow: bool, output: bool, timeout: Optional[float]
) -> AsyncIterator[LogRecord]:
    deadline = time.monotonic() + (STREAM_TIME if timeout is None else timeout)
    cursor = LogCursor(which, from_seq, follow, output)
    while not cursor.done:
        try:
            async with t.stream(cursor.procedure, cursor.body(), deadline, timeout is not None) as messages:
                async for m in messages:
                    for record in cursor.take(m):
                        yield record
            cursor.close()
        except Unavailable as e:
            await asyncio.sleep(cursor.failed(e))


async def fast_forward(t: Transport, job: str, timeout: Optional[float]) -> int:
    """Learns the recorded steps of a job. A stream that breaks off is an error: what was learned stays."""
    deadline = time.monotonic() + (STREAM_TIME if timeout is None else timeout)
    t.recorded.begin()
    n = 0
    body: JSON = {"filter": {"job": job}, "output_limit": OUTPUT_LIMIT}
    async with t.stream("LogService/Steps", body, deadline, timeout is not None) as messages:
        async for m in messages:
            n += t.recorded.take(m)
    t.recorded.end()
    return n


async def export(t: Transport, body: JSON, timeout: Optional[float]) -> AsyncIterator[Dict[str, object]]:
    deadline = time.monotonic() + (STREAM_TIME if timeout is None else timeout)
    missing: List[str] = []
    async with t.stream("LogService/Export", body, deadline, timeout is not None) as messages:
        async for m in messages:
            for row in m.texts("rows"):
                yield cast(Dict[str, object], json.loads(row))
            missing += m.subs("errors", lambda e: e.text("message"))
    if missing:
        raise Unavailable("export: part is missing: " + "; ".join(missing))


async def read_trace(t: Transport, body: JSON, timeout: Optional[float]) -> Trace:
    deadline = time.monotonic() + (STREAM_TIME if timeout is None else timeout)
    out = Trace()
    async with t.stream("LogService/Trace", body, deadline, timeout is not None) as messages:
        async for m in messages:
            out.take(m)
    return out
