"""Jobs: groups of sandboxes that live and end together."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, AsyncIterator, Collection, Dict, Mapping, Optional, Type

from .. import _ops as ops, _restore as restoring
from .._octets import Fields, JSON
from ..errors import DsecError
from ..model import JobInfo, SelectorResult
from .log import export, fast_forward
from .sandbox import AsyncBatch, AsyncSandbox
from .pending import Pending
from .transport import Transport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..options import CreateOptions, RestoreOptions
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
        """Takes the job up again, as after the death of the process that drove it: wakes its sandboxes and learns their recorded steps, so
        that commands with a step key that were done are answered at once, what runs is joined, and the rest goes on."""
        woken = SelectorResult.of(await self._call("Resume"))
        await self.fast_forward()
        return woken

    async def restore(self, key: str, **options: Unpack[RestoreOptions]) -> AsyncSandbox:
        """`Client.restore` of the sandbox with a create key of this job. It also learns the recorded steps under the new ID, as `resume` does."""
        ops.check_keywords("restore", options)
        made = AsyncSandbox.of(self._t, await self._t.run(restoring.restore(restoring.body(job=self.name, key=key, **options))))
        await self.fast_forward()
        return made

    async def fast_forward(self, timeout: Optional[float] = None) -> int:
        """Learns the recorded steps of all its trajectories; answers how many."""
        return await fast_forward(self._t, self.name, timeout)

    def export(
        self, *, rows: str = "steps", labels: Optional[Mapping[str, str]] = None, reward: str = "", ended: bool = False, output_limit: int = 0,
        without_labels: Collection[str] = (), timeout: Optional[float] = None,
    ) -> AsyncIterator[Dict[str, object]]:
        """Its trajectories as rows (docs/format/export.md), one a step or with `rows="trajectories"` one a trajectory, as they come.
        `reward` is a condition such as ">0", "none" or "any"; `output_limit` octets of each stream are in a row (0: 64 KiB, -1: none).
        `without_labels` leaves out what has one of these labels, as "dsec-replay"."""
        which = ops.without_empty({"job": self.name, "labels": dict(labels or {}), "reward": reward, "ended": ended,
                                   "without_labels": list(without_labels)})
        return export(self._t, {"filter": which, "rows": rows, "output_limit": output_limit}, timeout)

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
