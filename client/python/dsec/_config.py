"""Where the server is and how to show who is calling."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from typing import Dict, Optional, Tuple
from urllib.parse import urlsplit

from .errors import Invalid

PROTOCOL = 1  # the version of the wire that this client speaks
DEFAULT_SOCKET = "/run/dsec/dsec.sock"
DEFAULT_KEY_FILE = "/run/dsec/key"


@dataclass(frozen=True)
class Config:
    """A checked address with its key."""

    url: str  # as given
    base: str  # http://authority, for URLs
    host: str  # of the Host header
    prefix: str  # path before every route
    socket: Optional[str]  # path of a Unix socket, or
    address: Optional[Tuple[str, int]]  # TCP
    tls: Optional[ssl.SSLContext]
    key: str
    timeout: float

    def headers(self) -> Dict[str, str]:
        """What every call carries."""
        out = {"Host": self.host, "User-Agent": "dsec-python", "Dsec-Protocol": str(PROTOCOL)}
        if self.key:
            out["Authorization"] = "Bearer " + self.key
        return out


def resolve(url: Optional[str], key: Optional[str], key_file: Optional[str], timeout: float, tls: Optional[ssl.SSLContext]) -> Config:
    """Fills in what is absent from DSEC_URL, DSEC_KEY and DSEC_KEY_FILE, then from where `dsec up` leaves its socket and key."""
    if not timeout > 0:
        raise Invalid(f"timeout {timeout}: want seconds above 0")
    url = url or os.environ.get("DSEC_URL") or "unix:" + DEFAULT_SOCKET
    if not key and not key_file:
        key, key_file = os.environ.get("DSEC_KEY"), os.environ.get("DSEC_KEY_FILE")
    if url.startswith("unix:"):
        path = url[len("unix:"):]
        path = path[2:] if path.startswith("//") else path
        if not path:
            raise Invalid(f"url {url!r}: want unix:/path")
        secret = _key(key, key_file, os.path.join(os.path.dirname(path), "key"))
        return Config(url, "http://dsec", "dsec", "", path, None, None, secret, timeout)
    try:
        u = urlsplit(url)
        secure = u.scheme == "https"
        port = u.port or (443 if secure else 80)
    except ValueError as e:
        raise Invalid(f"url {url!r}: {e}") from None
    if u.scheme not in ("http", "https") or not u.hostname or u.query or u.fragment or u.username:
        raise Invalid(f"url {url!r}: want http://host:port, https://host:port or unix:/path")
    context = (tls or ssl.create_default_context()) if secure else None
    prefix = u.path.rstrip("/")
    secret = _key(key, key_file, DEFAULT_KEY_FILE)
    return Config(url, f"{u.scheme}://{u.netloc}{prefix}", u.netloc, prefix, None, (u.hostname, port), context, secret, timeout)


def _key(key: Optional[str], stated: Optional[str], default: str) -> str:
    if not key:
        try:
            with open(stated or default, encoding="ascii") as f:
                key = f.read()
        except (OSError, UnicodeDecodeError) as e:
            if stated:
                raise Invalid(f"key file {stated}: {e}") from None
            return ""  # the server will say that a key is missing
    key = key.strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise Invalid("key: must be printable ASCII without blanks")
    return key
