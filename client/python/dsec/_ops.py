"""What the calls do, without I/O and without a clock of their own: generators that yield a `Call` (or a `Sleep`), are sent its answer and
return a result. The two clients drive the same generators, one with blocking sockets, one with asyncio.

Every call that changes something carries a key that is made here when the caller gave none, so that it is safe to send again.
"""

from __future__ import annotations

import difflib
import random
import secrets
import time
from dataclasses import dataclass
from typing import Collection, Generator, Iterator, List, Mapping, Optional, Sequence, Tuple, TypeVar, Union
from urllib.parse import urlencode

from ._octets import JSON, Fields, Octets, base64_of, encode, env_vars, milliseconds, put, put_list, size, text_of
from .errors import DeadlineExceeded, DsecError, Invalid, NotFound, Unavailable, unclear
from .model import (
    Chunk, CommandInfo, Environment, Image, ItemError, LayerName, LogRecord, Outcome, Result, SandboxInfo, Selector, SelectorResult,
)
from .options import CommandOptions, CreateOptions, Env, EnvironmentOptions, RestoreOptions, RunOptions, SessionOptions, Size, StartOptions

T = TypeVar("T")

LONG_POLL = 60.0  # seconds, the server's longest
OUTPUT_LIMIT = 16 << 20  # octets of each stream in an answer
STOP_TIME = 60.0  # seconds that a context manager gives a stop
PIECE = 256 << 10  # octets of standard input in one call


@dataclass(frozen=True)
class Call:
    """A unary call. `safe` ones are sent again when the connection breaks; `undo` ones run to their end even when the caller is
    cancelled meanwhile."""

    procedure: str
    body: JSON
    safe: bool = True
    timeout: Optional[float] = None  # seconds, all attempts together; None is the client's
    undo: bool = False


@dataclass(frozen=True)
class Sleep:
    """Not a call but a pause, in seconds."""

    seconds: float


Op = Generator[Union[Call, Sleep], JSON, T]


class Attempts:
    """How often and how long a call is tried."""

    DELAYS = (0.02, 0.1, 0.3, 1.0, 2.0, 3.0, 4.0, 5.0)  # seconds between attempts, each stretched by up to a half

    def __init__(self, timeout: float, safe: bool) -> None:
        self.deadline = time.monotonic() + timeout
        self._safe = safe
        self._made = 0

    def again(self, e: Unavailable) -> float:
        """How long to wait before the next attempt; raises `e` when there is none."""
        if not (self._safe or e.unsent) or self._made >= len(self.DELAYS):
            raise e
        delay = self.DELAYS[self._made] * (1 + random.random() / 2)
        if time.monotonic() + delay >= self.deadline:
            raise e
        self._made += 1
        return delay


def new_key() -> str:
    """A key that nobody else makes."""
    return "k-" + secrets.token_hex(12)


def call(procedure: str, body: JSON, safe: bool = True, timeout: Optional[float] = None, undo: bool = False) -> Op[Fields]:
    return Fields((yield Call(procedure, body, safe, timeout, undo)))


def without_empty(body: JSON) -> JSON:
    return {k: v for k, v in body.items() if v not in (None, "", 0, False, [], {})}


_KEYWORDS: Mapping[str, Collection[str]] = {
    "run_container": CreateOptions.__annotations__, "run_containers": [*CreateOptions.__annotations__, "all"],
    "exec": CommandOptions.__annotations__, "start": StartOptions.__annotations__,
    "session": SessionOptions.__annotations__, "restore": RestoreOptions.__annotations__, "Session.run": RunOptions.__annotations__, "Session.start": RunOptions.__annotations__,
    "environments.publish": EnvironmentOptions.__annotations__,
}


def check_keywords(method: str, given: Mapping[str, object]) -> None:
    """Refuses a keyword that the method does not have, in the method's name and with the one that was probably meant."""
    known = _KEYWORDS[method]
    for word in given:
        if word not in known:
            near = difflib.get_close_matches(word, known, 1)
            hint = f". Did you mean '{near[0]}'?" if near else ""
            raise TypeError(f"{method}() got an unexpected keyword argument '{word}'{hint}")


# Sandboxes.


def create_body(
    *, environment: str = "", layers: Sequence[str] = (), image: str = "", pull: str = "", image_entrypoint: bool = False,
    backend: str = "container", job: str = "", key: str = "", name: str = "",
    labels: Optional[Mapping[str, str]] = None, memory: Size = 0, disk: Size = 0, pids: int = 0, cpu: float = 0, cpu_weight: int = 0,
    idle: Optional[float] = None, total: Optional[float] = None, on_idle: str = "", network: str = "", user: str = "", cwd: Octets = "",
    env: Optional[Env] = None, secret_env: Collection[Octets] = (), hostname: str = "", entrypoint: Sequence[Octets] = (),
    best_effort: bool = False, no_new_privs: bool = False, durability: str = "", deadline: Optional[float] = None,
    volumes: Optional[Mapping[str, str]] = None, allow_degraded: bool = False, runtime: str = "",
    trace: str = "", volatile: Sequence[str] = (),
) -> JSON:
    if isinstance(layers, (str, bytes)) or isinstance(entrypoint, (str, bytes)) or isinstance(volatile, (str, bytes)):
        raise Invalid("layers, entrypoint and volatile: want a list, not one string")
    body = without_empty({
        "environment": environment, "layers": list(layers), "image": image, "pull": pull, "image_entrypoint": image_entrypoint, "backend": backend, "runtime": runtime, "job": job, "key": key, "name": name,
        "labels": dict(labels or {}), "network": network, "user": user, "env": env_vars(env, secret_env), "hostname": hostname,
        "entrypoint": [text_of(e, f"entrypoint[{i}]") for i, e in enumerate(entrypoint)], "best_effort": best_effort, "allow_degraded": allow_degraded,
        "no_new_privs": no_new_privs, "durability": durability, "deadline_ms": milliseconds(deadline, "deadline"),
        "trace": trace, "volatile_paths": list(volatile),
        "volumes": [{"layer": layer, "path": at} for at, layer in sorted((volumes or {}).items())],
        "resources": resources_body(memory, disk, pids, cpu, cpu_weight), "lifetime": lifetime_body(idle, total, on_idle),
    })
    put(body, "cwd", cwd)
    return body


def resources_body(memory: Size, disk: Size, pids: int, cpu: float, cpu_weight: int) -> JSON:
    milli = int(cpu * 1000)
    if cpu > 0 and milli == 0:
        raise Invalid(f"cpu {cpu}: want 0.001 CPUs or more")
    return without_empty({"memory": size(memory, "memory"), "disk": size(disk, "disk"), "pids": pids, "cpu_milli": milli, "cpu_weight": cpu_weight})


def lifetime_body(idle: Optional[float], total: Optional[float], on_idle: str) -> JSON:
    return without_empty({"idle_ms": milliseconds(idle, "idle"), "total_ms": milliseconds(total, "total"), "on_idle": on_idle})


def create(body: JSON, timeout: float) -> Op[Tuple[SandboxInfo, bool]]:
    """One sandbox. A create that is cancelled midway, or whose effect is unknown and that nobody else could repeat, is stopped by its key."""
    own = "key" not in body
    body = dict(body, key=body.get("key") or new_key())
    stop = without_empty({"key": body["key"], "job": body.get("job"), "name": body.get("name")})
    wait = _create_time(body, timeout)
    try:
        f = Fields((yield Call("SandboxService/Create", body, timeout=wait)))
    except GeneratorExit:
        raise
    except DsecError as e:
        if own and unclear(e):
            yield from _best_effort([stop])
        raise
    except BaseException:
        yield from _best_effort([stop])
        raise
    return SandboxInfo.of(f.sub("sandbox")), f.flag("existed")


def _create_time(body: JSON, timeout: float) -> float:
    """Longer than the server's own deadline when one is stated."""
    deadline = body.get("deadline_ms")
    return deadline / 1000 + 30 if isinstance(deadline, int) else timeout


def create_batch(body: JSON, n: int, all_or_none: bool, timeout: float) -> Op[Tuple[List[SandboxInfo], List[ItemError]]]:
    """N sandboxes under the keys K/1 to K/N, with the same promise for a cancelled one as `create`."""
    own = "key" not in body
    key = body.get("key") or new_key()
    stops = [without_empty({"key": f"{key}/{i + 1}", "job": body.get("job")}) for i in range(min(n, 10_000))]
    wait = max(_create_time(body, timeout), n / 20)
    try:
        f = Fields((yield Call("SandboxService/CreateBatch", {"request": dict(body, key=key), "count": n, "all": all_or_none}, timeout=wait)))
    except GeneratorExit:
        raise
    except DsecError as e:
        if own and unclear(e):
            yield from _best_effort(stops)
        raise
    except BaseException:
        yield from _best_effort(stops)
        raise
    return f.subs("sandboxes", SandboxInfo.of), f.subs("errors", ItemError.of)


def _best_effort(bodies: Sequence[JSON]) -> Op[None]:
    """Stops within a minute what can be stopped; the caller has an error to tell already. Leases and TTLs take what is left."""
    until = time.monotonic() + STOP_TIME
    for body in bodies:
        left = until - time.monotonic()
        if left <= 0:
            return
        try:
            yield Call("SandboxService/Stop", body, timeout=min(left, 20.0), undo=True)
        except DsecError:
            continue


def get(ref: str) -> Op[SandboxInfo]:
    return SandboxInfo.of((yield from call("SandboxService/Get", {"id": ref})).sub("sandbox"))


def list_sandboxes(selector: Selector) -> Op[Tuple[List[SandboxInfo], List[ItemError]]]:
    out: List[SandboxInfo] = []
    errors: List[ItemError] = []
    token = ""
    while True:
        f = yield from call("SandboxService/List", without_empty({"selector": selector.body(), "page_size": 1000, "page_token": token}))
        out += f.subs("sandboxes", SandboxInfo.of)
        errors += f.subs("errors", ItemError.of)
        token = f.text("nextPageToken")
        if not token:
            return out, errors


def select(method: str, target: Union[str, Selector], **more: str) -> Op[SelectorResult]:
    """Stop, Pause or Resume of one sandbox or of all that a selector matches."""
    body: JSON = {"selector": target.body()} if isinstance(target, Selector) else {"id": target}
    body.update(without_empty(dict(more)))
    return SelectorResult.of((yield from call("SandboxService/" + method, body)))


def stop_key(key: str, job: str, name: str) -> Op[SelectorResult]:
    return SelectorResult.of((yield from call("SandboxService/Stop", without_empty({"key": key, "job": job, "name": name}))))


def one(method: str, ref: str, **more: str) -> Op[SelectorResult]:
    return (yield from select(method, ref, **more)).check()


def close(ref: str) -> Op[None]:
    """Stops a sandbox for a context manager: to its end even when cancelled, and one that is gone is stopped."""
    body: JSON = {"id": ref}
    try:
        f = Fields((yield Call("SandboxService/Stop", body, timeout=STOP_TIME, undo=True)))
    except NotFound:
        return
    except GeneratorExit:
        raise
    except DsecError:
        raise
    except BaseException:  # as a second Ctrl-C: once more, then up
        yield from _best_effort([body])
        raise
    try:
        SelectorResult.of(f).check()
    except NotFound:
        return


def close_all(refs: Sequence[str]) -> Op[None]:
    for i in range(0, len(refs), 1000):
        body: JSON = {"selector": {"ids": list(refs[i : i + 1000])}}
        result = SelectorResult.of(Fields((yield Call("SandboxService/Stop", body, timeout=max(STOP_TIME, len(refs) / 20), undo=True))))
        for e in result.errors:
            if e.code != "not_found":
                raise e.error()


def snapshot_body(ref: str, publish: str, step: str) -> JSON:
    return without_empty({"id": ref, "publish": publish, "step": step or new_key()})


def fork_body(
    ref: str, n: int, key: str, job: str, labels: Optional[Mapping[str, str]], env: Optional[Env], secret_env: Collection[Octets],
    idle: Optional[float], total: Optional[float],
) -> JSON:
    if n < 1:
        raise Invalid(f"n {n}: want 1 or more")
    return without_empty({
        "id": ref, "count": n, "key": key, "job": job, "labels": dict(labels or {}), "env": env_vars(env, secret_env),
        "lifetime": lifetime_body(idle, total, ""),
    })


def fork(body: JSON, n: int, job: str, timeout: float) -> Op[Tuple[List[SandboxInfo], List[ItemError]]]:
    """Forks under the keys K/1 to K/N of a job, with the same promise for a cancelled one as `create`."""
    own = "key" not in body
    key = body.get("key") or new_key()
    stops = [without_empty({"key": f"{key}/{i + 1}", "job": job}) for i in range(min(n, 1000))]
    try:
        f = Fields((yield Call("SandboxService/Fork", dict(body, key=key), timeout=max(timeout, 600 + n / 20))))
    except GeneratorExit:
        raise
    except DsecError as e:
        if own and unclear(e):
            yield from _best_effort(stops)
        raise
    except BaseException:
        yield from _best_effort(stops)
        raise
    return f.subs("sandboxes", SandboxInfo.of), f.subs("errors", ItemError.of)


# Commands.


def argv_of(argv: Sequence[Union[Octets, Sequence[Octets]]]) -> List[Octets]:
    """`exec("ls", "-l")` and `exec(["ls", "-l"])` mean the same."""
    if len(argv) == 1 and not isinstance(argv[0], (str, bytes)):
        out = list(argv[0])
    else:
        out = [a for a in argv if isinstance(a, (str, bytes))]
        if len(out) != len(argv):
            raise TypeError("argv: want str or bytes each, or one sequence of them")
    if not out:
        raise Invalid("argv: is empty")
    return out


def start_body(
    sandbox: str, *, argv: Optional[Sequence[Octets]] = None, session: str = "", text: Octets = "", id: str = "", env: Optional[Env] = None,
    secret_env: Collection[Octets] = (), cwd: Octets = "", user: str = "", stdin: Octets = b"", timeout: Optional[float] = None,
    output_cap: int = 0, stdin_open: Optional[bool] = None, terminal: Optional[Tuple[int, int]] = None, step: str = "", restore: str = "",
    check: Sequence[str] = (),
) -> JSON:
    if timeout is not None and not timeout > 0:
        raise Invalid(f"timeout {timeout}: want seconds above 0, or None for no limit")
    if stdin_open is None:
        stdin_open = terminal is not None
    body = without_empty({
        "session": session, "env": env_vars(env, secret_env), "user": user, "timeout_ms": milliseconds(timeout, "timeout"),
        "output_cap": output_cap, "stdin_open": stdin_open, "stdin": base64_of(encode(stdin, "stdin")), "restore": restore, "check": list(check),
    })
    body["sandbox"], body["id"] = sandbox, id or step or new_key()
    if argv is not None:
        put_list(body, "argv", argv)
    if session:
        put(body, "text", text)
    put(body, "cwd", cwd)
    if terminal is not None:
        body["terminal"] = {"rows": terminal[0], "cols": terminal[1]}
    return body


def start(body: JSON) -> Op[CommandInfo]:
    return CommandInfo.of((yield from call("CommandService/Start", body)).sub("command"))


def execute(body: JSON) -> Op[Result]:
    """Starts a command and waits for its end, however long that takes."""
    body = dict(body, wait_ms=int(LONG_POLL * 1000), output_limit=OUTPUT_LIMIT)
    f = yield from call("CommandService/Start", body, timeout=LONG_POLL + 60)
    done = _result(f)
    if done is None:
        done = yield from wait(str(body["sandbox"]), str(body["id"]), None)
    return done


def _result(f: Fields) -> Optional[Result]:
    c = CommandInfo.of(f.sub("command"))
    if c.state == "running":
        return None
    return Result(c.id, f.raw("stdout"), f.raw("stderr"), c.outcome or Outcome(kind="unknown"))


def wait(sandbox: str, id: str, timeout: Optional[float]) -> Op[Result]:
    """Long polls until the end. After `timeout` seconds: DeadlineExceeded; the command goes on."""
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        poll = LONG_POLL if until is None else max(0.001, min(LONG_POLL, until - time.monotonic()))
        body: JSON = {"sandbox": sandbox, "id": id, "wait_ms": milliseconds(poll, "wait"), "output_limit": OUTPUT_LIMIT}
        done = _result((yield from call("CommandService/Wait", body, timeout=poll + 60)))
        if done is not None:
            return done
        if until is not None and time.monotonic() >= until:
            raise DeadlineExceeded(f"command {id} still runs after {timeout} s of waiting; it goes on")


def command(sandbox: str, id: str) -> Op[CommandInfo]:
    return CommandInfo.of((yield from call("CommandService/Wait", {"sandbox": sandbox, "id": id, "wait_ms": 1})).sub("command"))


def list_commands(sandbox: str, running_only: bool) -> Op[List[CommandInfo]]:
    out: List[CommandInfo] = []
    token = ""
    while True:
        body = without_empty({"sandbox": sandbox, "running_only": running_only, "page_size": 1000, "page_token": token})
        f = yield from call("CommandService/List", body)
        out += f.subs("commands", CommandInfo.of)
        token = f.text("nextPageToken")
        if not token:
            return out


def write_stdin(sandbox: str, id: str, offset: Optional[int], data: bytes, eof: bool) -> Op[int]:
    """Sends input at the offset reached, so that a piece that is sent again is taken once. Returns the offset after it."""
    if offset is None:  # a handle to a command that another one may have written to
        offset = (yield from command(sandbox, id)).stdin_taken
    pause = 0.01
    while data:
        body: JSON = {"sandbox": sandbox, "id": id, "offset": offset, "data": base64_of(data[:PIECE])}
        taken = (yield from call("CommandService/WriteStdin", body)).number("taken") - offset
        if taken > 0:
            data, offset, pause = data[taken:], offset + taken, 0.01
        else:  # nobody reads
            yield Sleep(pause)
            pause = min(2 * pause, 1.0)
    if eof:
        yield from call("CommandService/WriteStdin", {"sandbox": sandbox, "id": id, "offset": offset, "eof": True})
    return offset


def signal_body(sandbox: str, id: str, signal: Union[int, str]) -> JSON:
    """Makes the step key, so the same body may be sent again."""
    kind: JSON = {"name": signal} if isinstance(signal, str) else {"signal": int(signal)}
    return {"sandbox": sandbox, "id": id, "step": new_key(), **kind}


def session_body(sandbox: str, *, name: str = "", shell: str = "", env: Optional[Env] = None, cwd: Octets = "", user: str = "") -> JSON:
    body = without_empty({"shell": shell, "env": env_vars(env), "user": user})
    body["sandbox"], body["name"] = sandbox, name or new_key()
    put(body, "cwd", cwd)
    return body


class Resuming:
    """How a broken stream is taken up again: at most 20 times without progress."""

    def __init__(self) -> None:
        self._failures = 0
        self.done = False

    def progress(self) -> None:
        self._failures = 0

    def failed(self, e: Unavailable) -> float:
        """Seconds to wait before the next attempt; raises `e` when there is none."""
        self._failures += 1
        if self._failures > 20:
            raise e
        return float(min(0.05 * (1 << min(self._failures, 5)), 1.0)) * (1 + random.random() / 2)


class OutputCursor(Resuming):
    """Where a reader of a command's output is."""

    procedure = "CommandService/Attach"

    def __init__(self, sandbox: str, id: str, stdout: int, stderr: int, late: bool) -> None:
        super().__init__()
        self._sandbox, self._id, self._late = sandbox, id, late
        self._at = {"stdout": stdout, "stderr": stderr}
        self.outcome: Optional[Outcome] = None

    def body(self) -> JSON:
        return {
            "sandbox": self._sandbox, "id": self._id, "late": self._late,
            "stdout_offset": self._at["stdout"], "stderr_offset": self._at["stderr"],
        }

    def take(self, f: Fields) -> Iterator[Chunk]:
        self.progress()
        if f.has("chunk"):
            c = f.sub("chunk")
            out = Chunk(c.text("stream") or "stdout", c.number("offset"), c.raw("data"), c.flag("late"))
            self._at[out.stream] = out.offset + len(out.data)
            yield out
        elif f.has("gap"):
            g = f.sub("gap")
            stream, start, end = g.text("stream") or "stdout", g.number("from"), g.number("to")
            self._at[stream] = end
            yield Chunk(stream, start, b"", missing=end - start)
        elif f.has("ended"):
            self.outcome = Outcome.of(f.sub("ended").sub("outcome"))
            self.done = not self._late

    def close(self) -> None:
        """At a regular end of the stream."""
        if self.outcome is None:
            raise Unavailable("the stream ended without an outcome")
        self.done = True


class LogCursor(Resuming):
    """Where a reader of a trajectory is."""

    procedure = "LogService/Read"

    def __init__(self, body: JSON, from_seq: int, follow: bool, output: bool) -> None:
        super().__init__()
        self._body = dict(body, follow=follow, output=output)
        self._seq = from_seq

    def body(self) -> JSON:
        return dict(self._body, from_seq=self._seq)

    def take(self, f: Fields) -> Iterator[LogRecord]:
        self.progress()
        for r in f.subs("records", LogRecord.of):
            self._seq = r.seq + 1
            yield r

    def close(self) -> None:
        self.done = True


def verdict_body(sandbox: str, reward: Optional[float], metadata: Optional[Mapping[str, object]], key: str) -> JSON:
    verdict: JSON = {}
    if reward is not None:
        verdict["reward"] = float(reward)
    if metadata:
        verdict["metadata"] = dict(metadata)
    if key:
        verdict["key"] = key
    return {"sandbox": sandbox, "verdict": verdict}


# Layers, environments, jobs.


def environment_body(
    name: str, *, base: str = "", workspace: str = "", kits: Sequence[str] = (), env: Optional[Env] = None, user: str = "", cwd: str = "",
    memory: Size = 0, disk: Size = 0, pids: int = 0, cpu: float = 0, cpu_weight: int = 0, volatile_paths: Sequence[str] = (),
) -> JSON:
    return {"environment": without_empty({
        "name": name, "base": base, "workspace": workspace, "kits": list(kits), "env": env_vars(env), "user": user, "cwd": cwd,
        "resources": resources_body(memory, disk, pids, cpu, cpu_weight), "volatile_paths": list(volatile_paths),
    })}


def import_route(publish: str, source: str) -> str:
    return "/v1/layers?" + urlencode(without_empty({"name": publish, "source": source}))


def list_layers(prefix: str) -> Op[List[LayerName]]:
    out: List[LayerName] = []
    token = ""
    while True:
        f = yield from call("LayerService/ListLayers", without_empty({"prefix": prefix, "page_size": 1000, "page_token": token}))
        out += f.subs("names", LayerName.of)
        token = f.text("nextPageToken")
        if not token:
            return out


def list_images(prefix: str) -> Op[List[Image]]:
    out: List[Image] = []
    token = ""
    while True:
        f = yield from call("ImageService/ListImages", without_empty({"prefix": prefix, "page_size": 1000, "page_token": token}))
        out += f.subs("images", Image.of)
        token = f.text("nextPageToken")
        if not token:
            return out


def list_environments(prefix: str) -> Op[List[Environment]]:
    out: List[Environment] = []
    token = ""
    while True:
        f = yield from call("LayerService/ListEnvironments", without_empty({"prefix": prefix, "page_size": 1000, "page_token": token}))
        out += f.subs("environments", Environment.of)
        token = f.text("nextPageToken")
        if not token:
            return out


def job_body(name: str, lease: float, on_lease_end: str, retention: Optional[float], restore: str = "") -> JSON:
    return {"job": without_empty({
        "name": name, "lease_ms": milliseconds(lease, "lease"), "on_lease_end": on_lease_end, "retention_ms": milliseconds(retention, "retention"),
        "restore": restore,
    })}


class Renewal:
    """When a lease is renewed, and what is known of it: three attempts fit into one lease."""

    def __init__(self, lease: float) -> None:
        self.every = lease / 3
        self._lease = lease
        self._renewed = time.monotonic()
        self.error: Optional[DsecError] = None

    def renewed(self) -> None:
        self._renewed, self.error = time.monotonic(), None

    def failed(self, e: DsecError) -> None:
        self.error = e

    @property
    def lost(self) -> bool:
        """Whether the lease has ended for all that is known here."""
        return time.monotonic() - self._renewed > self._lease


def backoff_poll(attempt: int) -> float:
    """Seconds between questions whether a server inside answers."""
    return min(0.02 * float(1 << min(attempt, 6)), 0.5)
