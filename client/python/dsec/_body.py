"""Bodies of requests: octets, files, or pieces that come one after the other. Nothing is held whole but octets that the caller holds."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO, Callable, Iterable, Iterator, Optional, Tuple, Union

from ._octets import encode

PIECE = 256 << 10
Source = Union[str, bytes, BinaryIO, Iterable[bytes]]


class Body:
    """`open` gives the pieces. `size` is None when it is not known; only a `replayable` body can be sent twice."""

    def __init__(self, open: Callable[[], Iterator[bytes]], size: Optional[int], replayable: bool) -> None:
        self.open = open
        self.size = size
        self.replayable = replayable


def once(pieces: Iterable[bytes], size: Optional[int] = None) -> Body:
    return Body(lambda: (bytes(p) for p in pieces if p), size, False)


def again(make: Callable[[], Iterator[bytes]]) -> Body:
    """For what can be made anew, such as the tar of a folder."""
    return Body(make, None, True)


def body_of(data: Source) -> Body:
    """Text is sent as UTF-8; a file from where it stands, and again from there when the call is sent again."""
    if isinstance(data, (str, bytes, bytearray, memoryview)):
        octets = encode(data, "data") if isinstance(data, str) else bytes(data)
        return Body(lambda: (octets[i : i + PIECE] for i in range(0, len(octets), PIECE)), len(octets), True)
    read = getattr(data, "read", None)
    if read is None:
        return once(data)
    file: BinaryIO = data  # type: ignore[assignment]  # it has read()
    start, size = _position(file)

    def pieces() -> Iterator[bytes]:
        if start is not None:
            file.seek(start)
        left = size
        while left is None or left > 0:
            piece = file.read(PIECE if left is None else min(PIECE, left))
            if not isinstance(piece, bytes):
                raise TypeError("data: the file must be opened for octets ('rb')")
            if not piece:
                if left:
                    raise OSError(f"the file became shorter by {left} octets while it was sent")
                return
            if left is not None:
                left -= len(piece)
            yield piece

    return Body(pieces, size, start is not None)


def _position(file: BinaryIO) -> Tuple[Optional[int], Optional[int]]:
    """Where a file stands and how much follows; None where that can't be known."""
    try:
        start = file.tell() if file.seekable() else None
    except (OSError, AttributeError, ValueError):
        return None, None
    if start is None:
        return None, None
    try:
        st = os.fstat(file.fileno())
        if not stat.S_ISREG(st.st_mode) or st.st_size == 0:  # /proc says 0
            return start, None
        return start, max(0, st.st_size - start)
    except (OSError, AttributeError, ValueError):
        return start, None


class SourceError(Exception):
    """Carries an OSError of a body's source past the handling of the socket's."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error
