"""The keywords of calls that take many. Absent ones take the environment's defaults, else the platform's."""

from __future__ import annotations

from typing import Collection, Mapping, Sequence, Tuple, TypedDict, Union

Octets = Union[str, bytes]
Env = Mapping[Octets, Octets]
Size = Union[int, str]  # octets, or text such as "512m", "1g" or "1.5g", as the command line has it


class CreateOptions(TypedDict, total=False):
    """Of a new sandbox. Times are seconds, sizes octets or text as "512m". Give `environment`, `layers` or `image`."""

    environment: str  # name or name@version
    layers: Sequence[str]  # layer references, lowest first
    image: str  # OCI reference, as python:3.12; imported when it is not there
    pull: str  # of image: missing (default) | always
    image_entrypoint: bool  # start the image's entrypoint and command; their end ends the sandbox
    job: str
    key: str  # idempotency key, unique in the job: the same key and request again answers the same sandbox
    name: str  # a DNS label, unique among the project's living sandboxes
    labels: Mapping[str, str]
    memory: Size  # octets, swap included
    disk: Size  # octets of its own writes
    pids: int
    cpu: float  # cap in CPUs
    cpu_weight: int  # 1 to 10,000
    idle: float  # seconds without activity; negative: no bound
    total: float  # seconds from birth
    on_idle: str  # stop | pause
    network: str  # none | open
    user: str
    cwd: Octets
    env: Env
    secret_env: Collection[Octets]  # names in env whose values the log must not hold
    hostname: str
    entrypoint: Sequence[str]  # started after birth; its end ends the sandbox
    best_effort: bool
    backend: str  # container (default) | microvm | vm
    runtime: str  # of a container: direct (default) | crun | runc | gvisor; capabilities() tells which a host has
    allow_degraded: bool  # microvm and vm: take a host without hardware acceleration, where code runs translated
    no_new_privs: bool
    durability: str  # process | host | store
    volumes: Mapping[str, str]  # path -> layer that is seen there, read-only
    deadline: float  # seconds that the create may take
    trace: str  # off (default) | light | full: what is recorded of what steps do, beside their outcomes
    volatile: Sequence[str]  # paths of caches and the like: not looked into by traces, not compared by replays


class CommandOptions(TypedDict, total=False):
    """Of a command."""

    id: str  # step key: the same ID never runs twice, it answers the recorded result
    step: str  # the same by another name
    env: Env  # beside the sandbox's
    secret_env: Collection[Octets]
    cwd: Octets
    user: str
    stdin: Octets  # whole standard input
    timeout: float  # seconds until the command is killed with all it started; only time in which the sandbox runs counts
    output_cap: int  # octets kept of each stream; default 16 MiB
    restore: str  # what a restore of its sandbox does with it: repeat | verify | never (docs/trainer.md)
    check: Sequence[str]  # of verify: exit code 0 says that it need not be done again, 1 that it must


class RestoreOptions(TypedDict, total=False):
    """Of making a sandbox again that is gone."""

    warn: bool  # tell what comes to something else and go on; else the restore ends there
    skip: Collection[str]  # steps that are not done again; "*" is all that would be asked about
    repeat: Collection[str]  # steps that are done again whatever their class; "*" is all that would be asked about
    secrets: Mapping[Octets, Octets]  # values of secret entries, which the log does not hold
    accept_tail_loss: bool  # go on where the end of the record may be missing
    lost_host: str  # this host is gone for good: the caller vouches for it
    call_id: str  # of this call: the same again joins it


class StartOptions(CommandOptions, total=False):
    """Of a command that is started and not waited for."""

    stdin_open: bool  # more comes by Process.write; with a terminal that is the default
    terminal: Tuple[int, int]  # rows, columns


class SessionOptions(TypedDict, total=False):
    """Of a new session; a living one of the same name is joined as it is."""

    name: str
    shell: str
    env: Env
    cwd: Octets
    user: str


class RunOptions(TypedDict, total=False):
    """Of a command in a session."""

    id: str
    step: str
    stdin: Octets
    timeout: float
    output_cap: int
    restore: str
    check: Sequence[str]


class EnvironmentOptions(TypedDict, total=False):
    """Of a new version of an environment."""

    base: str
    workspace: str
    kits: Sequence[str]
    env: Env
    user: str
    cwd: str
    memory: Size
    disk: Size
    pids: int
    cpu: float
    cpu_weight: int
    volatile_paths: Sequence[str]
