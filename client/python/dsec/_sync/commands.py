"""Commands and sessions in a sandbox."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Iterator, Optional, Type, Union

from .. import _ops as ops
from .._net import STREAM_TIME
from .._octets import JSON, Octets, encode
from ..errors import DsecError, NotFound, State, Unavailable
from ..model import Chunk, CommandInfo, Outcome, Result
from .transport import Transport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..options import RunOptions


class Process:
    """A started command. It outlives its client: `Sandbox.process(id)` takes it up again."""

    def __init__(self, transport: Transport, sandbox: str, id: str, taken: Optional[int] = None) -> None:
        self._t = transport
        self._sandbox = sandbox
        self._taken = taken  # octets of standard input; None: not known here
        self.id = id
        self.outcome: Optional[Outcome] = None  # once `output` or `wait` has met the end

    def output(
        self, *, stdout_offset: int = 0, stderr_offset: int = 0, late: bool = False, timeout: Optional[float] = None
    ) -> Iterator[Chunk]:
        """Output as it comes, from the given offsets, until the command ends; then `outcome` is set. A connection that breaks is taken up
        again at the offsets reached, so nothing is lost or told twice. With `late` it goes on while a child holds a stream open. After
        `timeout` seconds (24 h when None): DeadlineExceeded."""
        deadline = time.monotonic() + (STREAM_TIME if timeout is None else timeout)
        cursor = ops.OutputCursor(self._sandbox, self.id, stdout_offset, stderr_offset, late)
        while not cursor.done:
            try:
                with self._t.stream(cursor.procedure, cursor.body(), deadline, timeout is not None) as messages:
                    for m in messages:
                        yield from cursor.take(m)
                        self.outcome = cursor.outcome
                cursor.close()
            except Unavailable as e:
                if cursor.done:
                    return
                time.sleep(cursor.failed(e))

    def __iter__(self) -> Iterator[Chunk]:
        return self.output()

    def wait(self, timeout: Optional[float] = None) -> Result:
        """Waits for the end and answers up to 16 MiB of each stream. After `timeout` seconds: DeadlineExceeded; the command goes on."""
        result = self._t.run(ops.wait(self._sandbox, self.id, timeout))
        self.outcome = result.outcome
        return result

    def info(self) -> CommandInfo:
        """The command as the server knows it now."""
        return self._t.run(ops.command(self._sandbox, self.id))

    def write(self, data: Octets) -> None:
        """Sends standard input (the command must be started with `stdin_open` or a terminal); returns when the command's pipe took it."""
        self._taken = self._t.run(ops.write_stdin(self._sandbox, self.id, self._taken, encode(data, "data"), False))

    def close_stdin(self) -> None:
        """Sends the end of standard input."""
        self._taken = self._t.run(ops.write_stdin(self._sandbox, self.id, self._taken, b"", True))

    def signal(self, signal: Union[int, str]) -> None:
        """Sends a signal to the command's process group, by number or name ("TERM", "INT", ...)."""
        self._t.run(ops.call("CommandService/Signal", ops.signal_body(self._sandbox, self.id, signal)))

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.signal("KILL")

    def resize(self, rows: int, cols: int) -> None:
        """Changes the terminal's size."""
        body: JSON = {"sandbox": self._sandbox, "id": self.id, "size": {"rows": rows, "cols": cols}}
        self._t.run(ops.call("CommandService/Resize", body))


class Session:
    """One living shell: its folder, variables, functions, options and jobs stay from command to command. Closed by its context manager."""

    def __init__(self, transport: Transport, sandbox: str, name: str, joined: bool, restarted: bool) -> None:
        self._t = transport
        self._sandbox = sandbox
        self.name = name
        self.joined = joined  # it was open already
        self.restarted = restarted  # one of that name had ended; this is a new one

    def run(self, text: Octets, **options: Unpack[RunOptions]) -> Result:
        """Hands text to the shell and waits for its end. After "exit", or a timeout of a busy shell, `outcome.session_end` is set."""
        ops.check_keywords("Session.run", options)
        body = ops.start_body(self._sandbox, session=self.name, text=text, **options)
        return self._t.recorded.result(body) or self._t.run(ops.execute(body))

    def start(self, text: Octets, **options: Unpack[RunOptions]) -> Process:
        """Hands text to the shell and returns at once."""
        ops.check_keywords("Session.start", options)
        c = self._t.run(ops.start(ops.start_body(self._sandbox, session=self.name, text=text, **options)))
        return Process(self._t, self._sandbox, c.id)

    def close(self) -> None:
        """Ends the shell and all that it started; one that has ended is fine."""
        try:
            self._t.run(ops.call("CommandService/CloseSession", {"sandbox": self._sandbox, "name": self.name}, undo=True))
        except (NotFound, State):
            return

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        try:
            self.close()
        except DsecError:
            if kind is None:
                raise
