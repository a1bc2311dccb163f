"""Bounds of connections, for both clients."""

from __future__ import annotations

import socket

CONNECT_TIME = 10.0  # seconds
IDLE_TIME = 60.0  # seconds that an idle connection is kept; the server closes after 300
MAX_IDLE = 256  # idle connections kept
STREAM_TIME = 24 * 3600.0  # seconds, as the server's
READ = 256 << 10  # octets


def keep_alive(sock: socket.socket) -> None:
    """Finds out within about a minute and a half that the peer's machine is gone, also while a stream is silent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 45), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 3)):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
