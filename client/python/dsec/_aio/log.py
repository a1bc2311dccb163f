"""Reading trajectories."""

from __future__ import annotations

import asyncio
import time
from typing import AsyncIterator, Optional

from .._net import STREAM_TIME
from .._octets import JSON
from .._ops import LogCursor
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
