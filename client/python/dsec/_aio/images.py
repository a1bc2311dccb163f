"""OCI images."""

from __future__ import annotations

import time
from typing import List, Optional

from .. import _ops as ops
from .._net import STREAM_TIME
from ..errors import Unavailable
from ..model import Image
from .transport import Transport


class AsyncImages:
    """OCI images that became environments. A create that names one (`image=`) imports it by itself."""

    def __init__(self, transport: Transport) -> None:
        self._t = transport

    async def pull(self, ref: str, *, policy: str = "", username: str = "", secret: str = "", timeout: Optional[float] = None) -> Image:
        """Makes an environment of an image of a registry. `policy`: missing (default) or always ask what the tag means now. Username and
        secret are shown to the reference's own registry for this call alone; `login` keeps them."""
        body = ops.without_empty({"ref": ref, "policy": policy, "username": username, "secret": secret})
        deadline = time.monotonic() + (STREAM_TIME if timeout is None else timeout)
        found: Optional[Image] = None
        async with self._t.stream("ImageService/Pull", body, deadline, timeout is not None) as messages:
            async for m in messages:
                if m.has("image"):
                    found = Image.of(m.sub("image"))
        if found is None:
            raise Unavailable(f"pull of {ref}: the stream ended without an answer")
        return found

    async def get(self, ref: str) -> Image:
        """One that is there; no registry is asked."""
        return Image.of((await self._t.run(ops.call("ImageService/GetImage", {"ref": ref}))).sub("image"))

    async def list(self, prefix: str = "") -> List[Image]:
        """All whose full reference begins so."""
        return await self._t.run(ops.list_images(prefix))

    async def remove(self, ref: str) -> None:
        """Removes its environment, and the layers that nothing else uses."""
        await self._t.run(ops.call("ImageService/RemoveImage", {"ref": ref}, safe=False))

    async def login(self, host: str, username: str, secret: str) -> None:
        """Keeps what the project and those below it show to a registry."""
        await self._t.run(ops.call("ImageService/PutCredential", {"host": host, "username": username, "secret": secret}))

    async def logout(self, host: str) -> None:
        """Forgets it."""
        await self._t.run(ops.call("ImageService/RemoveCredential", {"host": host}, safe=False))
