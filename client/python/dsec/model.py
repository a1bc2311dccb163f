"""What the server answers, as immutable values. Durations are seconds, sizes octets, times aware datetimes in UTC; texts that may be any
octets (paths, argv) are str with surrogate escapes, which can be given back unchanged."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Sequence

from ._octets import JSON, Fields
from .errors import CommandFailed, DsecError, Lost, from_code

Time = Optional[datetime.datetime]


@dataclass(frozen=True)
class Resources:
    """Limits of a sandbox; 0 where none is set."""

    memory: int = 0  # octets, swap included
    disk: int = 0  # octets of its own writes
    pids: int = 0  # processes and threads
    cpu: float = 0.0  # cap in CPUs; 0 is no cap
    cpu_weight: int = 0

    @classmethod
    def of(cls, f: Fields) -> Resources:
        return cls(f.number("memory"), f.number("disk"), f.number("pids"), f.number("cpuMilli") / 1000, f.number("cpuWeight"))


@dataclass(frozen=True)
class Lifetime:
    """Bounds in time, in seconds; a negative idle is none."""

    idle: float = 0.0
    total: float = 0.0
    on_idle: str = ""  # stop | pause
    on_total: str = ""

    @classmethod
    def of(cls, f: Fields) -> Lifetime:
        return cls(f.seconds("idleMs"), f.seconds("totalMs"), f.text("onIdle"), f.text("onTotal"))


@dataclass(frozen=True)
class Cause:
    """Why a sandbox ended: class none, client, limit, task or platform. Only "platform" is dsec's own fault."""

    cls: str = ""
    reason: str = ""  # "idle", "total", "lease", "memory", "host_lost", ...
    detail: str = ""

    @classmethod
    def of(cls, f: Fields) -> Cause:
        return cls(f.text("class"), f.text("reason"), f.text("detail"))


@dataclass(frozen=True)
class Summary:
    """What the steps of an ended sandbox add up to."""

    steps: int = 0
    commands: int = 0
    failed: int = 0  # commands that did not exit with 0
    unknown: int = 0  # steps whose end nobody saw
    retries: int = 0  # starts under a key that had been started before
    wall: float = 0.0  # seconds
    cpu: float = 0.0  # seconds
    memory_peak: int = -1  # octets; -1 unknown
    cls: str = ""  # of its cause

    @classmethod
    def of(cls, f: Fields) -> Summary:
        return cls(
            f.number("steps"), f.number("commands"), f.number("failed"), f.number("unknown"), f.number("retries"), f.seconds("wallMs"),
            f.number("cpuUs") / 1e6, f.number("memoryPeak"), f.text("class"),
        )


@dataclass(frozen=True)
class Verdict:
    """What a grader attached to a trajectory."""

    key: str = ""
    reward: Optional[float] = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    time: Time = None
    seq: int = 0

    @classmethod
    def of(cls, f: Fields) -> Verdict:
        reward = f.data.get("reward")
        value = float(reward) if isinstance(reward, (int, float, str)) else None
        return cls(f.text("key"), value, f.sub("metadata").data, f.time("time"), f.number("seq"))


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox as its host told it at one moment."""

    id: str
    name: str = ""
    project: str = ""
    job: str = ""  # "-" when none
    key: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    state: str = ""  # creating | running | pausing | paused | resuming | stopping | stopped | failed
    pause_level: str = ""
    cause: Cause = Cause()
    backend: str = ""
    environment: str = ""  # name@version that it was made from
    layers: Sequence[str] = ()
    resources: Resources = Resources()
    lifetime: Lifetime = Lifetime()
    network: str = ""
    user: str = ""
    cwd: str = ""
    hostname: str = ""
    created: Time = None
    ended: Time = None
    idle_deadline: Time = None  # None while active or paused
    total_deadline: Time = None
    host: str = ""
    durability: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)  # what the host does otherwise than asked
    no_new_privs: bool = False
    summary: Optional[Summary] = None  # once it has ended
    verdict: Optional[Verdict] = None  # the latest
    epoch: int = 0  # of its trajectory: grows by one with each restore
    next: str = ""  # ID of the sandbox that went on in its trajectory, once one has

    @classmethod
    def of(cls, f: Fields) -> SandboxInfo:
        return cls(
            id=f.text("id"), name=f.text("name"), project=f.text("project"), job=f.text("job"), key=f.text("key"),
            labels=f.texts_by_name("labels"), state=f.text("state"), pause_level=f.text("pauseLevel"), cause=Cause.of(f.sub("cause")),
            backend=f.text("backend"), environment=f.text("environment"), layers=f.texts("layers"),
            resources=Resources.of(f.sub("resources")), lifetime=Lifetime.of(f.sub("lifetime")), network=f.text("network"),
            user=f.text("user"), cwd=f.text("cwd"), hostname=f.text("hostname"), created=f.time("created"), ended=f.time("ended"),
            idle_deadline=f.time("idleDeadline"), total_deadline=f.time("totalDeadline"), host=f.text("host"),
            durability=f.text("durability"), notes=f.texts_by_name("notes"), no_new_privs=f.flag("noNewPrivs"),
            summary=Summary.of(f.sub("summary")) if f.has("summary") else None,
            verdict=Verdict.of(f.sub("verdict")) if f.has("verdict") else None, epoch=f.number("epoch"), next=f.text("next"),
        )


@dataclass(frozen=True)
class StreamEnd:
    """A stream at its command's end: the first `head` and the last `tail` octets of `total` are kept."""

    total: int = 0
    head: int = 0
    tail: int = 0
    truncated: bool = False
    sha256: str = ""

    @classmethod
    def of(cls, f: Fields) -> StreamEnd:
        return cls(f.number("total"), f.number("head"), f.number("tail"), f.flag("truncated"), f.text("sha256"))


@dataclass(frozen=True)
class Outcome:
    """How a command or other step ended."""

    kind: str = ""  # exited | signalled | timed_out | out_of_memory | start_failed | session_ended | killed | interrupted | unknown
    code: int = 0
    signal: int = 0
    error: str = ""  # of start_failed: program, cwd or user and the reason
    memory_hit: bool = False  # a limit was met although the command may have gone on
    pids_hit: bool = False
    disk_hit: bool = False
    output_open: bool = False  # a child still holds the output
    session_end: bool = False  # the session's shell ended with it
    shared: bool = False  # figures hold earlier jobs of the session too
    stdout: StreamEnd = StreamEnd()
    stderr: StreamEnd = StreamEnd()
    cpu: float = 0.0  # seconds
    memory_peak: int = -1  # octets; -1 unknown
    started: Time = None
    ended: Time = None
    applied: int = 0  # octets applied of an interrupted write, append or tree

    @classmethod
    def of(cls, f: Fields) -> Outcome:
        return cls(
            kind=f.text("kind"), code=f.number("code"), signal=f.number("signal"), error=f.text("error"), memory_hit=f.flag("memoryHit"),
            pids_hit=f.flag("pidsHit"), disk_hit=f.flag("diskHit"), output_open=f.flag("outputOpen"), session_end=f.flag("sessionEnd"),
            shared=f.flag("shared"), stdout=StreamEnd.of(f.sub("stdout")), stderr=StreamEnd.of(f.sub("stderr")),
            cpu=f.number("cpuUs") / 1e6, memory_peak=f.number("memoryPeak", -1), started=f.time("started"), ended=f.time("ended"),
            applied=f.number("applied"),
        )

    @property
    def ok(self) -> bool:
        """Exited with code 0."""
        return self.kind == "exited" and self.code == 0

    @property
    def lost(self) -> bool:
        """Nobody knows how it ended, since its host died: a fault of the platform, never of the task."""
        return self.kind == "unknown"

    @property
    def exit_code(self) -> int:
        """The code as a shell would tell it: 128+n for signal n, 124 for a timeout, 127 for a program that could not start, else 125."""
        if self.kind == "exited":
            return self.code
        if self.kind in ("signalled", "out_of_memory", "killed"):
            return 128 + self.signal
        return {"timed_out": 124, "start_failed": 127}.get(self.kind, 125)

    def describe(self) -> str:
        text = {"exited": f"exit code {self.code}", "signalled": f"signal {self.signal}"}.get(self.kind, self.kind.replace("_", " "))
        return f"{text}: {self.error}" if self.error else text


@dataclass(frozen=True)
class Result:
    """How a command ended, with its output: up to 16 MiB of each stream from its start. `outcome.stdout.truncated` tells of a cut; the
    rest is read by `Process.output`."""

    id: str
    stdout: bytes
    stderr: bytes
    outcome: Outcome

    @property
    def ok(self) -> bool:
        """Exited with code 0."""
        return self.outcome.ok

    @property
    def exit_code(self) -> int:
        """See `Outcome.exit_code`."""
        return self.outcome.exit_code

    @property
    def text(self) -> str:
        """Standard output as text; what is not UTF-8 is replaced."""
        return self.stdout.decode("utf-8", "replace")

    def check(self) -> Result:
        """Returns itself when `ok`. Raises `Lost` when the platform lost the outcome, else `CommandFailed`."""
        if self.outcome.lost:
            raise Lost(f"command {self.id}: its outcome is unknown, since its host died")
        if not self.ok:
            raise CommandFailed(self)
        return self

    def describe(self) -> str:
        """One line for a person, with the end of standard error."""
        tail = self.stderr[-400:].decode("utf-8", "replace").strip()
        return f"command {self.id}: {self.outcome.describe()}" + (f": {tail}" if tail else "")


@dataclass(frozen=True)
class Chunk:
    """A piece of output. `missing` octets at `offset` were not kept (then `data` is empty)."""

    stream: str  # stdout | stderr
    offset: int
    data: bytes
    late: bool = False  # after the command's end, by a child that holds the stream
    missing: int = 0


@dataclass(frozen=True)
class CommandInfo:
    """A command of a sandbox."""

    id: str
    seq: int
    state: str  # running | ended | unknown
    outcome: Optional[Outcome]
    argv: Sequence[str]
    session: str
    text: str
    started: Time
    terminal: bool
    stdin_taken: int

    @classmethod
    def of(cls, f: Fields) -> CommandInfo:
        return cls(
            id=f.text("id"), seq=f.number("seq"), state=f.text("state"), outcome=Outcome.of(f.sub("outcome")) if f.has("outcome") else None,
            argv=f.octet_list("argv"), session=f.text("session"), text=f.octets("text"), started=f.time("started"),
            terminal=f.flag("terminal"), stdin_taken=f.number("stdinTaken"),
        )


@dataclass(frozen=True)
class SessionInfo:
    """A session of a sandbox."""

    name: str
    state: str  # open | ended
    shell: str
    user: str
    opened: Time
    end: Optional[Outcome]

    @classmethod
    def of(cls, f: Fields) -> SessionInfo:
        return cls(f.text("name"), f.text("state"), f.text("shell"), f.text("user"), f.time("opened"),
                   Outcome.of(f.sub("end")) if f.has("end") else None)


@dataclass(frozen=True)
class FileInfo:
    """A file inside a sandbox."""

    path: str  # whole in stat, relative to the listed folder in list
    type: str  # file | dir | link | fifo | socket | char | block
    mode: int  # permission bits with setuid, setgid and sticky
    uid: int
    gid: int
    size: int
    modified: Time
    target: str  # of a link
    nlink: int
    inode: int
    owner: str
    group: str
    error: str  # the entry could not be read; the listing went on

    @classmethod
    def of(cls, f: Fields) -> FileInfo:
        return cls(
            path=f.octets("path"), type=f.text("type"), mode=f.number("mode"), uid=f.number("uid"), gid=f.number("gid"), size=f.number("size"),
            modified=f.time("modified"), target=f.octets("target"), nlink=f.number("nlink"), inode=f.number("inode"), owner=f.text("owner"),
            group=f.text("group"), error=f.text("error"),
        )


@dataclass(frozen=True)
class WriteResult:
    """Of a write or append."""

    info: FileInfo
    written: int  # octets
    existed: bool  # the step was done before: nothing was touched

    @classmethod
    def of(cls, f: Fields) -> WriteResult:
        return cls(FileInfo.of(f.sub("info")), f.number("written"), f.flag("existed"))


@dataclass(frozen=True)
class UploadResult:
    """Of a tree that was laid into a sandbox."""

    entries: int
    applied: int  # octets of the tar stream
    existed: bool
    skipped: Sequence[str] = ()  # what could not be laid down: path and reason

    @classmethod
    def of(cls, f: Fields) -> UploadResult:
        return cls(f.number("entries"), f.number("applied"), f.flag("existed"), f.texts("skipped"))


@dataclass(frozen=True)
class FileEvent:
    """A change below a watched folder."""

    kind: str  # ready | created | modified | removed | moved_from | moved_to | attrib | overflow
    path: str

    @classmethod
    def of(cls, f: Fields) -> FileEvent:
        return cls(f.text("kind"), f.octets("path"))


@dataclass(frozen=True)
class ItemError:
    """Why one of many could not be done."""

    id: str  # of the sandbox, its key, or the host that did not answer
    code: str
    message: str
    index: int = 0  # of a batch, from 0

    @classmethod
    def of(cls, f: Fields) -> ItemError:
        return cls(f.text("id"), f.text("code"), f.text("message"), f.number("index"))

    def error(self) -> DsecError:
        """The same as an error that can be raised."""
        return from_code(self.code, self.message)


@dataclass(frozen=True)
class SelectorResult:
    """Sandboxes as they are after a group call, and those that it failed for."""

    sandboxes: Sequence[SandboxInfo]
    errors: Sequence[ItemError]

    @classmethod
    def of(cls, f: Fields) -> SelectorResult:
        return cls(f.subs("sandboxes", SandboxInfo.of), f.subs("errors", ItemError.of))

    def check(self) -> SelectorResult:
        """Returns itself when nothing failed, else raises the first error."""
        for e in self.errors:
            raise e.error()
        return self


@dataclass(frozen=True)
class RestoredStep:
    """A step that a restore asks about, or that came to something else."""

    step: str
    seq: int = 0  # of its start, in the trajectory
    kind: str = ""
    restore: str = ""  # its class: repeat | verify | never
    why: str = ""  # of the class, or how it differs
    can_repeat: bool = False  # else only skip is an answer

    @classmethod
    def of(cls, f: Fields) -> RestoredStep:
        return cls(f.text("step"), f.number("seq"), f.text("kind"), f.text("class"), f.text("why"), f.flag("canRepeat"))


@dataclass(frozen=True)
class Restored:
    """What a restore came to."""

    state: str  # restored | asks | diverged
    sandbox: Optional[SandboxInfo] = None
    epoch: int = 0
    base: str = ""  # "environment", or the layer of the snapshot that it began from
    last_seq: int = 0  # the last record that is there
    last_time: Time = None
    asks: Sequence[RestoredStep] = ()  # what only the caller can decide, by skip or repeat; the first 1,000
    asked: int = 0  # how many there are
    secrets: Sequence[str] = ()  # names of secrets that are missing
    diverged: Sequence[RestoredStep] = ()  # the first 1,000
    differing: int = 0
    repeated: int = 0
    skipped: int = 0
    running: Sequence[str] = ()  # steps that had no end and run again
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, f: Fields) -> Restored:
        return cls(
            f.text("state"), SandboxInfo.of(f.sub("sandbox")) if f.has("sandbox") else None, f.number("epoch"), f.text("base"), f.number("lastSeq"),
            f.time("lastTime"), f.subs("asks", RestoredStep.of), f.number("asked"), f.texts("secrets"), f.subs("diverged", RestoredStep.of),
            f.number("differing"), f.number("repeatedSteps"), f.number("skippedSteps"), f.texts("running"), f.texts("notes"),
        )

    def __str__(self) -> str:
        if self.state == "asks":
            why = [f"step {s.step} ({s.why})" for s in self.asks[:3]]
            if self.asked > len(why):
                why.append(f"{self.asked - len(why)} more steps")
            why += [f"the value of secret {s}" for s in self.secrets]
            return "restore needs an answer: " + ", ".join(why)
        return f"restore {self.state}" + "".join(f": step {s.step}: {s.why}" for s in self.diverged[:1])


@dataclass(frozen=True)
class Selector:
    """Picks sandboxes of the caller's project; all that is set must match, and a change needs at least one field."""

    ids: Sequence[str] = ()  # IDs or names
    job: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    states: Sequence[str] = ()
    include_ended: bool = False

    def body(self) -> JSON:
        out: JSON = {"ids": list(self.ids), "job": self.job, "labels": dict(self.labels), "states": list(self.states)}
        if self.include_ended:
            out["include_ended"] = True
        return {k: v for k, v in out.items() if v}


@dataclass(frozen=True)
class Stats:
    """What a sandbox uses."""

    memory: int  # octets
    memory_peak: int
    cpu: float  # seconds
    pids: int
    disk: int  # octets
    oom_kills: int
    host_memory: int = 0  # octets that a machine holds of its host's memory; 0 where there is none

    @classmethod
    def of(cls, f: Fields) -> Stats:
        return cls(f.number("memory"), f.number("memoryPeak"), f.number("cpuUs") / 1e6, f.number("pids"), f.number("disk"), f.number("oomKills"), f.number("hostMemory"))


@dataclass(frozen=True)
class Screenshot:
    """A picture of a screen."""

    png: bytes
    width: int  # pixels
    height: int
    sha256: str  # of the PNG, in hexadecimal

    @classmethod
    def of(cls, f: Fields) -> Screenshot:
        return cls(f.raw("png"), f.number("width"), f.number("height"), f.text("sha256"))


@dataclass(frozen=True)
class Snapshot:
    """A sandbox's changes as a layer."""

    layer: str  # its ID
    published: str  # name@version; "" when no name was given

    @property
    def ref(self) -> str:
        """What to give as a layer: the name, else the ID."""
        return self.published or self.layer

    @classmethod
    def of(cls, f: Fields) -> Snapshot:
        return cls(f.text("layer"), f.text("published"))


@dataclass(frozen=True)
class JobInfo:
    """A job and the states of its sandboxes."""

    name: str
    project: str
    lease: float  # seconds; 0 is none
    on_lease_end: str  # stop | pause | keep
    lease_until: Time
    retention: float  # seconds
    running: int
    paused: int
    ended: int

    @classmethod
    def of(cls, f: Fields) -> JobInfo:
        return cls(f.text("name"), f.text("project"), f.seconds("leaseMs"), f.text("onLeaseEnd"), f.time("leaseUntil"),
                   f.seconds("retentionMs"), f.number("running"), f.number("paused"), f.number("ended"))


@dataclass(frozen=True)
class Layer:
    """An immutable tree, named by its content."""

    id: str
    arch: str
    parents: Sequence[str]  # of a snapshot: the layers it is stacked on
    created: Time
    source: str
    entries: int
    octets: int
    names: Sequence[str]  # name@version that point here
    size: int  # octets of its stored form

    @classmethod
    def of(cls, f: Fields) -> Layer:
        sizes = f.subs("forms", lambda x: x.number("size"))
        return cls(f.text("id"), f.text("arch"), f.texts("parents"), f.time("created"), f.text("source"), f.number("entries"),
                   f.number("octets"), f.texts("names"), max(sizes, default=0))


@dataclass(frozen=True)
class ImportedLayer:
    """A layer that was made from a tar or folder."""

    layer: Layer
    published: str  # name@version
    existed: bool  # the same tree was there already

    @classmethod
    def of(cls, f: Fields) -> ImportedLayer:
        return cls(Layer.of(f.sub("layer")), f.text("published"), f.flag("existed"))


@dataclass(frozen=True)
class LayerName:
    """A name with its versions, as {version: layer ID}."""

    name: str
    versions: Mapping[int, str]
    current: int

    @classmethod
    def of(cls, f: Fields) -> LayerName:
        pairs = f.subs("versions", lambda v: (v.number("version"), v.text("layer")))
        return cls(f.text("name"), dict(pairs), f.number("current"))


@dataclass(frozen=True)
class Environment:
    """Base, workspace and tool kits with defaults; published as name@version."""

    name: str
    version: int
    base: str
    workspace: str
    kits: Sequence[str]
    layers: Sequence[str]  # resolved IDs, lowest first
    env: Mapping[str, str]
    user: str
    cwd: str
    resources: Resources
    created: Time
    current: bool
    volatile_paths: Sequence[str] = ()  # caches and the like: replay does not compare them

    @property
    def ref(self) -> str:
        return f"{self.name}@{self.version}"

    @classmethod
    def of(cls, f: Fields) -> Environment:
        env: List[Dict[str, str]] = f.subs("env", lambda v: {v.octets("name"): v.octets("value")})
        return cls(
            name=f.text("name"), version=f.number("version"), base=f.text("base"), workspace=f.text("workspace"), kits=f.texts("kits"),
            layers=f.texts("layers"), env={k: v for one in env for k, v in one.items()}, user=f.text("user"), cwd=f.text("cwd"),
            resources=Resources.of(f.sub("resources")), created=f.time("created"), current=f.flag("current"),
            volatile_paths=f.texts("volatilePaths"),
        )


@dataclass(frozen=True)
class Image:
    """An OCI image that became an environment."""

    ref: str  # in full, as docker.io/library/python:3.12
    digest: str  # of the manifest; of the config where there was none
    environment: str  # name@version
    layers: Sequence[str]  # IDs, lowest first
    entrypoint: Sequence[str]  # started only when asked for
    cmd: Sequence[str]
    labels: Mapping[str, str]
    checked: Time  # when the registry was last asked what the tag means
    size: int  # octets of file contents

    @classmethod
    def of(cls, f: Fields) -> Image:
        c = f.sub("config")
        return cls(
            ref=f.text("ref"), digest=f.text("digest"), environment=f.text("environment"), layers=f.texts("layers"),
            entrypoint=c.texts("entrypoint"), cmd=c.texts("cmd"), labels=c.texts_by_name("labels"), checked=f.time("checked"),
            size=f.number("octets"),
        )


@dataclass(frozen=True)
class LogRecord:
    """One record of a trajectory."""

    epoch: int
    seq: int
    time: Time
    kind: str  # create, state, command, output, end, write, session, stdin, snapshot, ...
    step: str
    stream: str
    offset: int
    data: bytes
    length: int
    outcome: Optional[Outcome]
    cause: Optional[Cause]
    state: str
    request: str  # the canonical request as JSON, enough to do the step again
    sha256: str
    late: bool

    @classmethod
    def of(cls, f: Fields) -> LogRecord:
        return cls(
            epoch=f.number("epoch"), seq=f.number("seq"), time=f.time("time"), kind=f.text("kind"), step=f.text("step"),
            stream=f.text("stream"), offset=f.number("offset"), data=f.raw("data"), length=f.number("length"),
            outcome=Outcome.of(f.sub("outcome")) if f.has("outcome") else None, cause=Cause.of(f.sub("cause")) if f.has("cause") else None,
            state=f.text("state"), request=f.text("requestJson"), sha256=f.text("sha256"), late=f.flag("late"),
        )


@dataclass(frozen=True)
class Capabilities:
    """What a backend of a host can do."""

    backend: str
    isolation: str
    pause_levels: Sequence[str]
    networks: Sequence[str]
    fork: str
    snapshot: bool
    terminal: bool
    sessions: bool
    ports: bool
    features: Mapping[str, str]
    host: str

    @classmethod
    def of(cls, f: Fields) -> Capabilities:
        return cls(
            f.text("backend"), f.text("isolation"), f.texts("pauseLevels"), f.texts("networks"), f.text("fork"), f.flag("snapshot"),
            f.flag("terminal"), f.flag("sessions"), f.flag("ports"), f.texts_by_name("features"), f.text("host"),
        )


@dataclass(frozen=True)
class ServerInfo:
    """Versions of the server."""

    version: str
    protocol: int
    protocol_min: int
    role: str

    @classmethod
    def of(cls, f: Fields) -> ServerInfo:
        return cls(f.text("version"), f.number("protocol"), f.number("protocolMin"), f.text("role"))


@dataclass(frozen=True)
class ApiKey:
    """An API key, without its text."""

    id: str
    project: str
    note: str
    created: Time
    expires: Time

    @classmethod
    def of(cls, f: Fields) -> ApiKey:
        return cls(f.text("id"), f.text("project"), f.text("note"), f.time("created"), f.time("expires"))


@dataclass(frozen=True)
class NewApiKey:
    """A new key; `key` is the only copy of its text."""

    info: ApiKey
    key: str

    @classmethod
    def of(cls, f: Fields) -> NewApiKey:
        return cls(ApiKey.of(f.sub("info")), f.text("key"))
