"""Jobs: groups of sandboxes that live and end together."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Optional, Type

from .. import _ops as ops
from .._octets import Fields, JSON
from ..errors import DsecError
from ..model import JobInfo, SelectorResult
from .sandbox import AsyncBatch, AsyncSandbox
from .pending import Pending
from .transport import Transport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..options import CreateOptions
    from .client import AsyncClient


class AsyncJob:
    """A group of sandboxes with a lease that a task renews: when this process or its event loop ends, the job ends within the lease. As a
    context manager it is stopped at the end of the block."""

    def __init__(self, client: AsyncClient, transport: Transport, name: str, lease: float) -> None:
        self._client = client
        self._t = transport
        self.name = name
        self._renewal = ops.Renewal(lease)
        self._task: Optional[asyncio.Task[None]] = asyncio.ensure_future(self._renew()) if lease > 0 else None

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._renewal.every)
            try:
                await self._t.run(ops.call("JobService/Renew", {"name": self.name}, timeout=self._renewal.every))
                self._renewal.renewed()
            except DsecError as e:  # tried again at the next third
                self._renewal.failed(e)

    @property
    def error(self) -> Optional[DsecError]:
        """Why the last renewal failed, None when it did not."""
        return self._renewal.error

    @property
    def lost(self) -> bool:
        """Whether a whole lease has passed without a renewal, so that its end has come."""
        return self._task is not None and self._renewal.lost

    def run_container(self, **options: Unpack[CreateOptions]) -> Pending[AsyncSandbox]:
        """`Client.run_container` in this job."""
        options["job"] = self.name
        return self._client.run_container(**options)

    def run_containers(self, n: int, *, all: bool = False, **options: Unpack[CreateOptions]) -> Pending[AsyncBatch]:
        """`Client.run_containers` in this job."""
        options["job"] = self.name
        return self._client.run_containers(n, all=all, **options)

    async def _call(self, method: str, **more: str) -> Fields:
        body: JSON = {"name": self.name}
        body.update({k: v for k, v in more.items() if v})
        return await self._t.run(ops.call("JobService/" + method, body, undo=method == "Stop"))

    async def info(self) -> JobInfo:
        """Lease and counts."""
        return JobInfo.of((await self._call("Get")).sub("job"))

    async def pause(self, level: str = "") -> SelectorResult:
        """Freezes its sandboxes."""
        return SelectorResult.of(await self._call("Pause", level=level))

    async def resume(self) -> SelectorResult:
        """Wakes its sandboxes."""
        return SelectorResult.of(await self._call("Resume"))

    async def stop(self) -> SelectorResult:
        """Ends its sandboxes; the lease goes on being renewed until `detach` or `close`."""
        return SelectorResult.of(await self._call("Stop"))

    async def detach(self) -> None:
        """Ends the renewing and leaves the sandboxes to the lease."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        """Stops the sandboxes and ends the renewing."""
        try:
            await self.stop()
        finally:
            await self.detach()

    async def __aenter__(self) -> AsyncJob:
        return self

    async def __aexit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        try:
            await self.close()
        except DsecError:
            if kind is None:
                raise
