"""Jobs: groups of sandboxes that live and end together."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Collection, Dict, Iterator, Mapping, Optional, Type

from .. import _ops as ops, _restore as restoring
from .._octets import Fields, JSON
from ..errors import DsecError
from ..model import JobInfo, SelectorResult
from .log import export, fast_forward
from .sandbox import Batch, Sandbox
from .transport import Transport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..options import CreateOptions, RestoreOptions
    from .client import Client


class Job:
    """A group of sandboxes with a lease that a thread renews: when this process dies, the job ends within the lease. As a context manager it
    is stopped at the end of the block."""

    def __init__(self, client: Client, transport: Transport, name: str, lease: float) -> None:
        self._client = client
        self._t = transport
        self.name = name
        self._renewal = ops.Renewal(lease)
        self._stop = threading.Event()
        self._thread: Optional[threading.Thread] = None
        if lease > 0:
            self._thread = threading.Thread(target=self._renew, name=f"dsec-lease-{name}", daemon=True)
            self._thread.start()

    def _renew(self) -> None:
        while not self._stop.wait(self._renewal.every):
            try:
                self._t.run(ops.call("JobService/Renew", {"name": self.name}, timeout=self._renewal.every))
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
        return self._thread is not None and self._renewal.lost

    def run_container(self, **options: Unpack[CreateOptions]) -> Sandbox:
        """`Client.run_container` in this job."""
        options["job"] = self.name
        return self._client.run_container(**options)

    def run_containers(self, n: int, *, all: bool = False, **options: Unpack[CreateOptions]) -> Batch:
        """`Client.run_containers` in this job."""
        options["job"] = self.name
        return self._client.run_containers(n, all=all, **options)

    def _call(self, method: str, **more: str) -> Fields:
        body: JSON = {"name": self.name}
        body.update({k: v for k, v in more.items() if v})
        return self._t.run(ops.call("JobService/" + method, body, undo=method == "Stop"))

    def info(self) -> JobInfo:
        """Lease and counts."""
        return JobInfo.of(self._call("Get").sub("job"))

    def pause(self, level: str = "") -> SelectorResult:
        """Freezes its sandboxes."""
        return SelectorResult.of(self._call("Pause", level=level))

    def resume(self) -> SelectorResult:
        """Takes the job up again, as after the death of the process that drove it: wakes its sandboxes and learns their recorded steps, so
        that commands with a step key that were done are answered at once, what runs is joined, and the rest goes on."""
        woken = SelectorResult.of(self._call("Resume"))
        self.fast_forward()
        return woken

    def restore(self, key: str, **options: Unpack[RestoreOptions]) -> Sandbox:
        """`Client.restore` of the sandbox with a create key of this job. It also learns the recorded steps under the new ID, as `resume` does."""
        ops.check_keywords("restore", options)
        made = Sandbox.of(self._t, self._t.run(restoring.restore(restoring.body(job=self.name, key=key, **options))))
        self.fast_forward()
        return made

    def fast_forward(self, timeout: Optional[float] = None) -> int:
        """Learns the recorded steps of all its trajectories; answers how many."""
        return fast_forward(self._t, self.name, timeout)

    def export(
        self, *, rows: str = "steps", labels: Optional[Mapping[str, str]] = None, reward: str = "", ended: bool = False, output_limit: int = 0,
        without_labels: Collection[str] = (), timeout: Optional[float] = None,
    ) -> Iterator[Dict[str, object]]:
        """Its trajectories as rows (docs/format/export.md), one a step or with `rows="trajectories"` one a trajectory, as they come.
        `reward` is a condition such as ">0", "none" or "any"; `output_limit` octets of each stream are in a row (0: 64 KiB, -1: none).
        `without_labels` leaves out what has one of these labels, as "dsec-replay"."""
        which = ops.without_empty({"job": self.name, "labels": dict(labels or {}), "reward": reward, "ended": ended,
                                   "without_labels": list(without_labels)})
        return export(self._t, {"filter": which, "rows": rows, "output_limit": output_limit}, timeout)

    def stop(self) -> SelectorResult:
        """Ends its sandboxes; the lease goes on being renewed until `detach` or `close`."""
        return SelectorResult.of(self._call("Stop"))

    def detach(self) -> None:
        """Ends the renewing and leaves the sandboxes to the lease."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=self._renewal.every + 1)

    def close(self) -> None:
        """Stops the sandboxes and ends the renewing."""
        try:
            self.stop()
        finally:
            self._stop.set()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        try:
            self.close()
        except DsecError:
            if kind is None:
                raise
