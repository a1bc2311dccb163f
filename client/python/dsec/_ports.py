"""Requests to a port inside, without I/O."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Dict, Mapping, Optional, Tuple, Union
from urllib.parse import quote

from ._config import Config
from ._http1 import Head
from ._octets import encode
from .errors import DsecError, Invalid, Unavailable, from_code

MAX_BODY = 256 << 20  # octets of an answer that is read as a whole
MAX_MESSAGE = 64 << 20  # octets of a WebSocket message


@dataclass(frozen=True)
class HttpResponse:
    """What the server inside answered."""

    status: int
    reason: str
    headers: Tuple[Tuple[str, str], ...]  # names in lower case
    body: bytes

    @property
    def text(self) -> str:
        """The body as text; what is not UTF-8 is replaced."""
        return self.body.decode("utf-8", "replace")

    def json(self) -> object:
        """The body as JSON; ValueError when it is none."""
        return json.loads(self.body)

    def header(self, name: str) -> Optional[str]:
        """The first header of that name, None when there is none."""
        for k, v in self.headers:
            if k == name.lower():
                return v
        return None


def prefix(sandbox: str, port: int) -> str:
    if not 1 <= port <= 65535:
        raise Invalid(f"port {port}: want 1 to 65535")
    return f"/v1/ports/{quote(sandbox, safe='')}/{port}"


def target(config: Config, base: str, path: Union[str, bytes], headers: Mapping[str, str]) -> Tuple[str, Dict[str, str]]:
    """Path and headers of a request. The key travels where the application does not need the place itself; the gateway takes it out."""
    data = encode(path, "path")
    if not data.startswith(b"/"):
        data = b"/" + data
    out = base + quote(data, safe="/?[]@!$&'()*+,;=%:~-._|")
    lower = {k.lower() for k in headers}
    merged = dict(headers)
    if "authorization" in lower and config.key:
        if "x-api-key" in lower:
            out += ("&" if "?" in out else "?") + "dsec_key=" + quote(config.key, safe="")
        else:
            merged["X-API-Key"] = config.key
    return out, merged


def failure(head: Head, body: bytes) -> Optional[DsecError]:
    """The error when it was not the application that answered."""
    code = head.get("dsec-error")
    if code is None:
        return None
    text = body.decode("utf-8", "replace").strip()
    return from_code(code, text[6:] if text.startswith("dsec: ") else text)


def not_upgraded(head: Head, body: bytes) -> DsecError:
    return failure(head, body) or Unavailable(f"the server inside answered {head.status} {head.reason} and did not upgrade: {body[:200]!r}")
