"""The client for threads."""

from __future__ import annotations

import ssl
from types import TracebackType
from typing import TYPE_CHECKING, Collection, Iterator, List, Mapping, Optional, Sequence, Type, Union

from .. import _config, _connect
from .. import _fncall as fn
from .. import _ops as ops, _restore as restoring
from .._fncall import BatchAnswer, CallAnswer, CallFiles, CallInput, CallLimits, CallSide, Kept, PairAnswer
from .._octets import Octets
from ..errors import Invalid
from ..model import Capabilities, ItemError, JobInfo, LogRecord, Selector, SelectorResult, ServerInfo
from ..options import Env
from .images import Images
from .jobs import Job
from .layers import Environments, Keys, Layers
from .log import read_log
from .sandbox import Batch, Sandbox
from .transport import Transport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..options import CreateOptions, RestoreOptions


class Found(List[Sandbox]):
    """What `Client.list` found. `errors` tells of hosts that did not answer: what they hold is missing."""

    errors: List[ItemError]


class Client:
    """Talks to one gateway; safe for use by many threads. As a context manager it first checks that the server is there, speaks this
    protocol and takes the key, and in the end closes its connections (sandboxes are not its to stop).

    url: `unix:/path`, `http://host:port` or `https://host:port`; else DSEC_URL, else where `dsec up` puts its socket.
    key, key_file: the API key or a file that holds it; else DSEC_KEY, DSEC_KEY_FILE, else the file beside the socket.
    timeout: seconds that a call may take when it has no other bound. tls: for https with a private authority."""

    def __init__(
        self, url: Optional[str] = None, key: Optional[str] = None, key_file: Optional[str] = None, timeout: float = 120.0,
        *, tls: Optional[ssl.SSLContext] = None,
    ) -> None:
        self._t = Transport(_config.resolve(url, key, key_file, timeout, tls))
        self.layers = Layers(self._t)
        self.environments = Environments(self._t)
        self.keys = Keys(self._t)
        self.images = Images(self._t)

    def close(self) -> None:
        """Closes the kept connections."""
        self._t.close()

    def __enter__(self) -> Client:
        try:
            self.server()
            self._t.run(ops.call("LayerService/ListLayers", {"page_size": 1}))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.close()

    def server(self) -> ServerInfo:
        """The server's versions. Raises VersionMismatch when it does not serve this client's protocol."""
        info = ServerInfo.of(self._t.run(ops.call("InfoService/GetInfo", {})))
        _connect.check_version(info.version, info.protocol, info.protocol_min)
        return info

    def capabilities(self) -> List[Capabilities]:
        """What each host's backends can do."""
        return self._t.run(ops.call("SandboxService/Capabilities", {})).subs("backends", Capabilities.of)

    # Function calls.

    def fncall(
        self, lang: str = "", *, cmd: Sequence[Octets] = (), code: Octets = "", files: Optional[CallFiles] = None, stdin: Union[Octets, Kept] = b"", args: Sequence[Octets] = (),
        env: Optional[Env] = None, secret_env: Collection[Octets] = (), environment: str = "", compile_args: Sequence[str] = (),
        limits: Optional[CallLimits] = None, compile_limits: Optional[CallLimits] = None, outputs: Sequence[str] = (), keep: Sequence[str] = (),
        job: str = "", key: str = "", hash_only: bool = False, pooled: bool = False, warm: bool = False, gpu: str = "", queue: Optional[float] = None,
    ) -> CallAnswer:
        """Runs a small program to its end and judges it: `code` in a language, or `cmd`. Nothing of it stays. See `CallLimits` for bounds;
        `outputs` are files of its work folder to bring back, `keep` those to keep under their SHA-256. The same `key` again gives the
        recorded answer. `warm` lets it begin in an interpreter that may be up already, for the languages that have it."""
        return self._t.run(fn.run(fn.call_body(
            lang, cmd=cmd, code=code, files=files, stdin=stdin, args=args, env=env, secret_env=secret_env, environment=environment, compile_args=compile_args,
            limits=limits, compile_limits=compile_limits, outputs=outputs, keep=keep, job=job, key=key, hash_only=hash_only, pooled=pooled, warm=warm, gpu=gpu, queue=queue)))

    def fncall_batch(
        self, inputs: Sequence[CallInput], lang: str = "", *, cmd: Sequence[Octets] = (), code: Octets = "", files: Optional[CallFiles] = None,
        environment: str = "", compile_args: Sequence[str] = (), limits: Optional[CallLimits] = None, compile_limits: Optional[CallLimits] = None,
        outputs: Sequence[str] = (), keep: Sequence[str] = (), job: str = "", key: str = "", hash_only: bool = False, pooled: bool = False, warm: bool = False, gpu: str = "",
        queue: Optional[float] = None, stop_early: bool = False,
    ) -> BatchAnswer:
        """Compiles a program once and runs it for each input. With `stop_early` the first result that is not OK cancels what has not begun."""
        return self._t.run(fn.run_batch(fn.batch_body(
            inputs, lang, cmd=cmd, code=code, files=files, environment=environment, compile_args=compile_args, limits=limits, compile_limits=compile_limits,
            outputs=outputs, keep=keep, job=job, key=key, hash_only=hash_only, pooled=pooled, warm=warm, gpu=gpu, queue=queue, stop_early=stop_early)))

    def fncall_pair(
        self, program: CallSide, interactor: CallSide, *, job: str = "", key: str = "", hash_only: bool = False, pooled: bool = False, queue: Optional[float] = None,
    ) -> PairAnswer:
        """Runs a program and its interactor, each one's standard output being the other's standard input."""
        return self._t.run(fn.run_pair(program, interactor, job, key, hash_only, pooled, queue))

    def cancel_call(self, key: str, *, job: str = "") -> None:
        """Ends the call of a key, which then answers CANCELLED."""
        self._t.run(fn.cancel(job, key))

    def put_call_file(self, data: bytes) -> str:
        """Keeps octets for later calls, under the SHA-256 that it returns."""
        return self._t.run(fn.put_file(data))

    def get_call_file(self, content: str) -> bytes:
        """The octets of a kept file."""
        return self._t.run(fn.get_file(content))

    def call_languages(self) -> Mapping[str, str]:
        """The languages of calls, each with the reason why it can't be used, "" where it can."""
        return self._t.run(fn.languages())

    # Sandboxes.

    def run_container(self, **options: Unpack[CreateOptions]) -> Sandbox:
        """Makes a container sandbox and returns when it can take commands. Options: see `CreateOptions`; `environment` or `layers` is
        needed. A create that is interrupted midway is stopped by its key, so nothing is left behind."""
        ops.check_keywords("run_container", options)
        info, existed = self._t.run(ops.create(ops.create_body(**options), self._t.config.timeout))
        return Sandbox(self._t, info.id, info, existed)

    def run_containers(self, n: int, *, all: bool = False, **options: Unpack[CreateOptions]) -> Batch:
        """Makes `n` sandboxes from one request, under the keys K/1 to K/n: with `all`, all of them or an error; else as many as possible,
        with a reason for each that is missing."""
        ops.check_keywords("run_containers", options)
        made, errors = self._t.run(ops.create_batch(ops.create_body(**options), n, all, self._t.config.timeout))
        return Batch(self._t, [Sandbox(self._t, i.id, i) for i in made], errors)

    def sandbox(self, ref: str) -> Sandbox:
        """A handle by ID or name, without asking the server."""
        if not ref:
            raise Invalid("sandbox: give an id or name")
        return Sandbox(self._t, ref)

    def get(self, ref: str) -> Sandbox:
        """Asks for a sandbox by ID or name, without waking it. Raises NotFound."""
        info = self._t.run(ops.get(ref))
        return Sandbox(self._t, info.id, info)

    def list(self, selector: Selector = Selector()) -> Found:
        """All sandboxes that match; ended ones only when the selector says so."""
        infos, errors = self._t.run(ops.list_sandboxes(selector))
        found = Found(Sandbox(self._t, i.id, i) for i in infos)
        found.errors = errors
        return found

    def stop(self, target: Union[str, Selector]) -> SelectorResult:
        """Ends one sandbox by ID or name, or all that a selector matches."""
        return self._t.run(ops.select("Stop", target))

    def stop_key(self, key: str, *, job: str = "", name: str = "") -> SelectorResult:
        """Ends what was, or within the next 60 s would be, created under a key (with its job, and its name when it has one)."""
        return self._t.run(ops.stop_key(key, job, name))

    def pause(self, target: Union[str, Selector], level: str = "") -> SelectorResult:
        """Freezes one sandbox, or all that a selector matches."""
        return self._t.run(ops.select("Pause", target, level=level))

    def resume(self, target: Union[str, Selector]) -> SelectorResult:
        """Wakes one sandbox, or all that a selector matches."""
        return self._t.run(ops.select("Resume", target))

    def restore(self, sandbox: str, **options: Unpack[RestoreOptions]) -> Sandbox:
        """Makes a sandbox that is gone again, by the ID of any sandbox of its trajectory, and waits for it, however long its steps take. What it
        came to is in its `restored`; where it came to no sandbox: NotRestored. Options: see `RestoreOptions`."""
        ops.check_keywords("restore", options)
        return Sandbox.of(self._t, self._t.run(restoring.restore(restoring.body(sandbox=sandbox, **options))))

    def log(
        self, sandbox: str = "", *, job: str = "", key: str = "", from_seq: int = 1, follow: bool = False, output: bool = True,
        timeout: Optional[float] = None,
    ) -> Iterator[LogRecord]:
        """The trajectory of a sandbox (by ID or name, or by job and key), record by record; with `follow` until it has ended. A connection
        that breaks is taken up again. `output` brings the octets of output too; after `timeout` seconds (24 h): DeadlineExceeded."""
        which = ops.without_empty({"sandbox": sandbox, "job": job, "key": key})
        return read_log(self._t, which, from_seq, follow, output, timeout)

    # Jobs.

    def job(self, name: str = "", *, lease: float = 30.0, on_lease_end: str = "", retention: Optional[float] = None, restore: str = "") -> Job:
        """Makes or joins a job. With a lease (seconds, 60 at most) it is renewed in the background; when this process dies, its end comes
        within the lease and `on_lease_end` happens: stop (default), pause or keep. `retention` (seconds) is of records and logs,
        `restore` the class of commands that state none (docs/trainer.md): repeat or never."""
        name = name or "job-" + ops.new_key()
        self._t.run(ops.call("JobService/Put", ops.job_body(name, lease, on_lease_end, retention, restore)))
        return Job(self, self._t, name, lease)

    def jobs(self) -> List[JobInfo]:
        """All jobs of the project."""
        return self._t.run(ops.call("JobService/List", {})).subs("jobs", JobInfo.of)
