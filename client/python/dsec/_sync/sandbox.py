"""A handle to one sandbox."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Collection, Iterator, List, Mapping, Optional, Sequence, Type, Union

from .. import _ops as ops
from .._octets import JSON, Octets, put
from .._restore import info_of as restored_info
from .._trace import Trace
from ..errors import DsecError
from ..model import CommandInfo, ItemError, LogRecord, Restored, Result, SandboxInfo, SessionInfo, Snapshot, Stats, Verdict
from .commands import Process, Session
from .files import Files
from .log import read_log, read_trace
from .ports import Port
from .screen import Screen
from .transport import Transport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..options import CommandOptions, Env, SessionOptions, StartOptions

Argument = Union[str, bytes, Sequence[Octets]]


class Sandbox:
    """A sandbox. As a context manager it is stopped at the end of the block, whatever ends the block.

    `info` is what the server told last, None for a handle made from an ID alone."""

    def __init__(self, transport: Transport, id: str, info: Optional[SandboxInfo] = None, existed: bool = False) -> None:
        self._t = transport
        self.id = id
        self.info = info
        self.existed = existed  # its create key was known: nothing was made
        self.restored: Optional[Restored] = None  # of one that a restore made
        self.files = Files(transport, id)

    @classmethod
    def of(cls, transport: Transport, done: Restored) -> Sandbox:
        """The sandbox that a restore made."""
        info = restored_info(done)
        made = cls(transport, info.id, info)
        made.restored = done
        return made

    def __repr__(self) -> str:
        return f"<Sandbox {self.id}>"

    def files_as(self, user: str) -> Files:
        """File calls as another user: a name, uid or uid:gid."""
        return Files(self._t, self.id, user)

    # Commands.

    def exec(self, *argv: Argument, **options: Unpack[CommandOptions]) -> Result:
        """Runs a command and waits for its end: `exec("ls", "-l")` or `exec(["ls", "-l"])`. Options: see `CommandOptions`. How it ended is
        in the result; errors are the platform's alone. When the waiting is interrupted, the command goes on."""
        ops.check_keywords("exec", options)
        body = ops.start_body(self.id, argv=ops.argv_of(argv), **options)
        return self._t.recorded.result(body) or self._t.run(ops.execute(body))

    def sh(self, text: Octets, **options: Unpack[CommandOptions]) -> Result:
        """Runs `/bin/sh -c text`. For state that stays between commands see `session`."""
        return self.exec("/bin/sh", "-c", text, **options)

    def start(self, *argv: Argument, **options: Unpack[StartOptions]) -> Process:
        """Starts a command and returns when it runs. Options: see `StartOptions`. That it could not start is told by its outcome."""
        ops.check_keywords("start", options)
        c = self._t.run(ops.start(ops.start_body(self.id, argv=ops.argv_of(argv), **options)))
        return Process(self._t, self.id, c.id, None if options.get("stdin") or options.get("id") else 0)

    def process(self, id: str) -> Process:
        """A handle to a command by its ID, without asking the server."""
        return Process(self._t, self.id, id)

    def commands(self, *, running_only: bool = False) -> List[CommandInfo]:
        """Its commands in the order of their starts."""
        return self._t.run(ops.list_commands(self.id, running_only))

    def session(self, **options: Unpack[SessionOptions]) -> Session:
        """Opens a shell whose state stays, or joins the living one of that name. Options: see `SessionOptions`."""
        ops.check_keywords("session", options)
        f = self._t.run(ops.call("CommandService/OpenSession", ops.session_body(self.id, **options)))
        return Session(self._t, self.id, f.sub("session").text("name"), f.flag("joined"), f.flag("restarted"))

    def sessions(self) -> List[SessionInfo]:
        """Its sessions, also ended ones."""
        return self._t.run(ops.call("CommandService/ListSessions", {"sandbox": self.id})).subs("sessions", SessionInfo.of)

    def port(self, port: int) -> Port:
        """The way to a TCP port inside, 1 to 65535."""
        return Port(self._t, self.id, port)

    def console(self) -> bytes:
        """What its machine (`microvm`, `vm`) wrote on its serial console: the last MiB, also of a sandbox that has ended."""
        return (self._t.run(ops.call("DisplayService/Console", {"sandbox": self.id}))).raw("text")

    def screen(self, port: int = 0) -> Screen:
        """Its screen. Port 0 takes the machine's own where it has one, else the display server at 5900 inside."""
        return Screen(self._t, self.id, port)

    # Life.

    def refresh(self) -> SandboxInfo:
        """Asks for its present state, without waking it."""
        self.info = self._t.run(ops.get(self.id))
        return self.info

    def pause(self, level: str = "") -> None:
        """Freezes it; any request that needs it wakes it."""
        self._t.run(ops.one("Pause", self.id, level=level))

    def resume(self) -> None:
        """Wakes it."""
        self._t.run(ops.one("Resume", self.id))

    def snapshot(self, publish: str = "", *, step: str = "") -> Snapshot:
        """Makes its changes a new layer, and publishes it when a name is given."""
        return Snapshot.of(self._t.run(ops.call("SandboxService/Snapshot", ops.snapshot_body(self.id, publish, step), timeout=900)))

    def fork(
        self, n: int = 1, *, key: str = "", job: str = "", labels: Optional[Mapping[str, str]] = None, env: Optional[Env] = None,
        secret_env: Collection[Octets] = (), idle: Optional[float] = None, total: Optional[float] = None,
    ) -> Batch:
        """Makes `n` sandboxes (1 to 1,000) that begin with the files of this one, on its host, under the keys K/1 to K/n; processes and
        sessions are not copied. What is not given is as it is here. `errors` says why the others are missing."""
        body = ops.fork_body(self.id, n, key, job, labels, env, secret_env, idle, total)
        of = job or (self.info or SandboxInfo.of(self._t.run(ops.call("SandboxService/Get", {"id": self.id})).sub("sandbox"))).job
        made, errors = self._t.run(ops.fork(body, n, of, self._t.config.timeout))
        return Batch(self._t, [Sandbox(self._t, i.id, i) for i in made], errors)

    def migrate(self, to: str = "") -> SandboxInfo:
        """Moves it to another host, or to one that fits: machines (`microvm`, `vm`) alone. It goes on there under its ID, with its processes,
        sessions and commands. The call may be made again."""
        self.info = SandboxInfo.of((self._t.run(ops.call("SandboxService/Migrate", ops.without_empty({"id": self.id, "to": to}), timeout=900))).sub("sandbox"))
        return self.info

    def set_lifetime(self, *, idle: Optional[float] = None, total: Optional[float] = None, on_idle: str = "") -> SandboxInfo:
        """Changes TTLs, in seconds; None leaves one as it is. `total` counts from now."""
        body: JSON = {"id": self.id, "lifetime": ops.lifetime_body(idle, total, on_idle)}
        self.info = SandboxInfo.of(self._t.run(ops.call("SandboxService/SetLifetime", body)).sub("sandbox"))
        return self.info

    def stats(self) -> Stats:
        """What it uses now."""
        return Stats.of(self._t.run(ops.call("SandboxService/Stats", {"id": self.id})))

    def verdict(self, reward: Optional[float] = None, metadata: Optional[Mapping[str, object]] = None, *, key: str = "") -> Verdict:
        """Attaches a reward and free metadata (what JSON can hold) to its trajectory, before or after its end. The same again changes
        nothing; another under the same key raises Exists, and under a new key it replaces the one before."""
        return Verdict.of((self._t.run(ops.call("LogService/SetVerdict", ops.verdict_body(self.id, reward, metadata, key)))).sub("verdict"))

    def log(self, *, from_seq: int = 1, follow: bool = False, output: bool = True, timeout: Optional[float] = None) -> Iterator[LogRecord]:
        """Its trajectory; see `Client.log`."""
        return read_log(self._t, {"sandbox": self.id}, from_seq, follow, output, timeout)

    def trace(self, *, step: str = "", file: Octets = "", timeout: Optional[float] = None) -> Trace:
        """What its steps did beside their outcomes: of one step (its key, or its number from 1), or around one file. It may have ended."""
        body: JSON = ops.without_empty({"sandbox": self.id, "step": step})
        put(body, "file", file)
        return read_trace(self._t, body, timeout)

    def stop(self) -> None:
        """Ends it and returns when nothing is left but its record and log. Stopping twice is fine."""
        self._t.run(ops.close(self.id))

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        try:
            self.stop()
        except DsecError:
            if kind is None:
                raise


class Batch:
    """Sandboxes made as one. As a context manager all are stopped at the end of the block. `errors` says why the others are missing."""

    def __init__(self, transport: Transport, sandboxes: Sequence[Sandbox], errors: Sequence[ItemError]) -> None:
        self._t = transport
        self.sandboxes = sandboxes
        self.errors = errors

    def __len__(self) -> int:
        return len(self.sandboxes)

    def __getitem__(self, i: int) -> Sandbox:
        return self.sandboxes[i]

    def __iter__(self) -> Iterator[Sandbox]:
        return iter(self.sandboxes)

    def stop(self) -> None:
        """Stops all of them."""
        self._t.run(ops.close_all([s.id for s in self.sandboxes]))

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        try:
            self.stop()
        except DsecError:
            if kind is None:
                raise
