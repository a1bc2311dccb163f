"""Reading trajectories."""

from __future__ import annotations

import time
from typing import Iterator, Optional

from .._net import STREAM_TIME
from .._octets import JSON
from .._ops import LogCursor
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
