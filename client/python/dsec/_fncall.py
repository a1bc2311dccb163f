"""Function calls: small programs that run to their end in namespaces of their own, with a judge's verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Collection, List, Mapping, Optional, Sequence, Union

from . import _ops as ops
from ._octets import JSON, Fields, Octets, base64_of, encode, env_vars, milliseconds, put, put_list, size
from .errors import Invalid
from .options import Env, Size



@dataclass(frozen=True)
class Kept:
    """A file that is kept already, by the SHA-256 that `put_call_file` or a result's `content` gave."""

    content: str


CallFiles = Mapping[str, Union[str, bytes, Kept]]  # path in the work folder -> content
CALL_TIME = 30 * 60.0  # seconds: a call's limits and its wait for a place have bounds of their own


@dataclass(frozen=True)
class CallLimits:
    """Bounds of one process tree; what is 0 or None is the language's default. Times are seconds, sizes octets or text such as "256m"."""

    cpu: Optional[float] = None  # of all processes together
    wall: Optional[float] = None  # from the start of the program
    memory: Size = 0  # with the files of the work folder
    processes: int = 0  # and threads
    output: Size = 0  # of each stream
    file_size: Size = 0
    disk: Size = 0
    files: int = 0
    stack: Size = 0
    open_files: int = 0

    def body(self) -> JSON:
        """What goes over the wire."""
        return ops.without_empty({
            "cpu_ms": milliseconds(self.cpu, "cpu"), "wall_ms": milliseconds(self.wall, "wall"), "memory": size(self.memory, "memory"),
            "processes": self.processes, "output": size(self.output, "output"), "file_size": size(self.file_size, "file_size"),
            "disk": size(self.disk, "disk"), "files": self.files, "stack": size(self.stack, "stack"), "open_files": self.open_files,
        })


@dataclass(frozen=True)
class CallFile:
    """A file that a call brought back: its octets, or with `keep` the SHA-256 under which it is kept."""

    path: str
    data: bytes
    content: str
    executable: bool


@dataclass(frozen=True)
class CallEvent:
    """A system call that was refused."""

    call: str
    count: int
    fatal: bool


@dataclass(frozen=True)
class CallResult:
    """How one process tree ended. `verdict`: OK, RE, SIG, TLE, MLE, OLE, SEC, CE, CANCELLED, or SYS, which is dsec's own fault alone."""

    verdict: str
    code: int  # exit code; 128+n for signal n
    signal: int
    limit: str  # of TLE: cpu | wall; of OLE: output | file_size
    error: str
    stdout: bytes
    stderr: bytes
    stdout_truncated: bool
    stderr_truncated: bool
    cpu: float  # seconds
    wall: float
    memory: int  # octets at the most; -1: not known
    memory_hit: bool
    processes_hit: bool
    leftover: int
    files: Sequence[CallFile]
    events: Sequence[CallEvent]
    cached: bool
    id: str
    warm: bool = False  # its interpreter was started before the call came

    @property
    def ok(self) -> bool:
        return self.verdict == "OK"

    @classmethod
    def of(cls, f: Fields) -> CallResult:
        return cls(
            f.text("verdict"), f.number("code"), f.number("signal"), f.text("limit"), f.text("error"), encode(f.octets("stdout")), encode(f.octets("stderr")),
            f.flag("stdoutTruncated"), f.flag("stderrTruncated"), f.number("cpuUs") / 1e6, f.number("wallUs") / 1e6, f.number("memory"), f.flag("memoryHit"),
            f.flag("processesHit"), f.number("leftover"),
            f.subs("files", lambda x: CallFile(x.octets("path"), x.raw("data"), x.text("content"), x.flag("executable"))),
            f.subs("events", lambda x: CallEvent(x.text("call"), x.number("count"), x.flag("fatal"))), f.flag("cached"), f.text("id"), f.flag("warm"),
        )


@dataclass(frozen=True)
class CallAnswer:
    """What a call came to; `result` is None when compiling failed."""

    verdict: str
    compile: Optional[CallResult]
    result: Optional[CallResult]
    key: str
    recorded: bool  # the answer was given before
    queued: float  # seconds

    @classmethod
    def of(cls, f: Fields) -> CallAnswer:
        return cls(f.text("verdict"), part(f, "compile"), part(f, "result"), f.text("key"), f.flag("recorded"), f.number("queueUs") / 1e6)


@dataclass(frozen=True)
class BatchAnswer:
    """What a batch came to; `results` are in the order of the inputs, and none when compiling failed."""

    verdict: str
    compile: Optional[CallResult]
    results: Sequence[CallResult]
    key: str
    recorded: bool

    @classmethod
    def of(cls, f: Fields) -> BatchAnswer:
        return cls(f.text("verdict"), part(f, "compile"), f.subs("results", CallResult.of), f.text("key"), f.flag("recorded"))


def part(f: Fields, name: str) -> Optional[CallResult]:
    return CallResult.of(f.sub(name)) if f.has(name) else None


@dataclass(frozen=True)
class CallInput:
    """One input of a batch."""

    stdin: Union[Octets, Kept] = b""
    args: Sequence[Octets] = ()
    env: Optional[Env] = None
    files: Optional[CallFiles] = None
    id: str = ""

    def body(self, secret: Collection[Octets] = ()) -> JSON:
        """The input as it goes over the wire; names in secret mark entries of env that the log must not hold."""
        body = ops.without_empty({"id": self.id, "env": env_vars(self.env, secret), "files": file_list(self.files)})
        if isinstance(self.stdin, Kept):
            body["stdin_content"] = self.stdin.content
        else:
            put(body, "stdin", self.stdin)
        if self.args:
            put_list(body, "args", self.args)
        return body


def file_list(files: Optional[CallFiles]) -> List[JSON]:
    return [
        {"path": path, "content": data.content} if isinstance(data, Kept) else {"path": path, "data": base64_of(encode(data, path))}
        for path, data in sorted((files or {}).items())
    ]


def program_body(lang: str, cmd: Sequence[Octets], code: Octets, files: Optional[CallFiles], environment: str, compile_args: Sequence[str]) -> JSON:
    if isinstance(cmd, (str, bytes)) or isinstance(compile_args, str):
        raise Invalid("cmd and compile_args: want a list, not one string")
    body = ops.without_empty({"lang": lang, "files": file_list(files), "environment": environment, "compile_args": list(compile_args)})
    put(body, "code", code)
    if cmd:
        put_list(body, "cmd", cmd)
    return body


def mode_of(pooled: bool, warm: bool) -> str:
    if pooled and warm:
        raise Invalid("pooled and warm: want one of them")
    return "pooled" if pooled else "warm" if warm else ""


def common(
    lang: str, cmd: Sequence[Octets], code: Octets, files: Optional[CallFiles], environment: str, compile_args: Sequence[str], limits: Optional[CallLimits],
    compile_limits: Optional[CallLimits], outputs: Sequence[str], keep: Sequence[str], job: str, key: str, hash_only: bool, mode: str, gpu: str,
    queue: Optional[float],
) -> JSON:
    return ops.without_empty({
        "program": program_body(lang, cmd, code, files, environment, compile_args), "limits": limits.body() if limits else {},
        "compile_limits": compile_limits.body() if compile_limits else {},
        "outputs": [{"path": p} for p in outputs] + [{"path": p, "keep": True} for p in keep], "job": job, "key": key,
        "hash_only": hash_only, "mode": mode, "gpu": gpu, "queue_ms": milliseconds(queue, "queue"),
    })


def call_body(
    lang: str = "", *, cmd: Sequence[Octets] = (), code: Octets = "", files: Optional[CallFiles] = None, stdin: Union[Octets, Kept] = b"", args: Sequence[Octets] = (),
    env: Optional[Env] = None, secret_env: Collection[Octets] = (), environment: str = "", compile_args: Sequence[str] = (),
    limits: Optional[CallLimits] = None, compile_limits: Optional[CallLimits] = None, outputs: Sequence[str] = (), keep: Sequence[str] = (),
    job: str = "", key: str = "", hash_only: bool = False, pooled: bool = False, warm: bool = False, gpu: str = "", queue: Optional[float] = None,
) -> JSON:
    body = common(lang, cmd, code, files, environment, compile_args, limits, compile_limits, outputs, keep, job, key, hash_only, mode_of(pooled, warm), gpu, queue)
    body["input"] = CallInput(stdin, args, env).body(secret_env)
    return body


def batch_body(
    inputs: Sequence[CallInput], lang: str = "", *, cmd: Sequence[Octets] = (), code: Octets = "", files: Optional[CallFiles] = None, environment: str = "",
    compile_args: Sequence[str] = (), limits: Optional[CallLimits] = None, compile_limits: Optional[CallLimits] = None, outputs: Sequence[str] = (),
    keep: Sequence[str] = (), job: str = "", key: str = "", hash_only: bool = False, pooled: bool = False, warm: bool = False, gpu: str = "", queue: Optional[float] = None,
    stop_early: bool = False,
) -> JSON:
    body = common(lang, cmd, code, files, environment, compile_args, limits, compile_limits, outputs, keep, job, key, hash_only, mode_of(pooled, warm), gpu, queue)
    body["inputs"] = [i.body() for i in inputs]
    body["stop_early"] = stop_early
    return body


@dataclass(frozen=True)
class CallSide:
    """A program of a pair; its standard input is the other's output."""

    lang: str = ""
    cmd: Sequence[Octets] = ()
    code: Octets = ""
    files: Optional[CallFiles] = None
    args: Sequence[Octets] = ()
    env: Optional[Env] = None
    environment: str = ""
    compile_args: Sequence[str] = ()
    limits: Optional[CallLimits] = None
    compile_limits: Optional[CallLimits] = None
    outputs: Sequence[str] = ()

    def body(self) -> JSON:
        """What goes over the wire."""
        return ops.without_empty({
            "program": program_body(self.lang, self.cmd, self.code, self.files, self.environment, self.compile_args),
            "input": CallInput(args=self.args, env=self.env).body(), "limits": self.limits.body() if self.limits else {},
            "compile_limits": self.compile_limits.body() if self.compile_limits else {}, "outputs": [{"path": p} for p in self.outputs],
        })


@dataclass(frozen=True)
class PairAnswer:
    """What a program and its interactor came to; results are None when compiling failed."""

    program_compile: Optional[CallResult]
    interactor_compile: Optional[CallResult]
    program: Optional[CallResult]
    interactor: Optional[CallResult]
    first_ended: str  # program | interactor
    key: str
    recorded: bool

    @classmethod
    def of(cls, f: Fields) -> PairAnswer:
        return cls(part(f, "programCompile"), part(f, "interactorCompile"), part(f, "program"), part(f, "interactor"), f.text("firstEnded"),
                   f.text("key"), f.flag("recorded"))


def run_pair(program: CallSide, interactor: CallSide, job: str, key: str, hash_only: bool, pooled: bool, queue: Optional[float]) -> ops.Op[PairAnswer]:
    body = ops.without_empty({
        "program": program.body(), "interactor": interactor.body(), "job": job, "key": key, "hash_only": hash_only, "mode": "pooled" if pooled else "",
        "queue_ms": milliseconds(queue, "queue"),
    })
    return PairAnswer.of((yield from ops.call("FnCallService/RunPair", body, timeout=CALL_TIME)))


def run(body: JSON) -> ops.Op[CallAnswer]:
    return CallAnswer.of((yield from ops.call("FnCallService/Run", body, timeout=CALL_TIME)))


def run_batch(body: JSON) -> ops.Op[BatchAnswer]:
    return BatchAnswer.of((yield from ops.call("FnCallService/RunBatch", body, timeout=CALL_TIME)))


def cancel(job: str, key: str) -> ops.Op[None]:
    yield from ops.call("FnCallService/Cancel", ops.without_empty({"job": job, "key": key}))


def put_file(data: bytes) -> ops.Op[str]:
    return (yield from ops.call("FnCallService/PutFile", {"data": base64_of(data)})).text("content")


def get_file(content: str) -> ops.Op[bytes]:
    return (yield from ops.call("FnCallService/GetFile", {"content": content})).raw("data")


def languages() -> ops.Op[Mapping[str, str]]:
    found = (yield from ops.call("FnCallService/Languages", {})).subs("languages", lambda x: (x.text("name"), x.text("missing")))
    return dict(found)
