"""What steps did beside their outcomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional

from ._octets import Fields


@dataclass(frozen=True)
class PathState:
    """What a path is, without its times."""

    type: str  # file | dir | link | fifo | socket | device
    mode: int
    size: int  # octets, of files
    sha256: str  # hex, of files; empty where it was not taken
    link: str  # target

    @classmethod
    def of(cls, f: Fields) -> PathState:
        return cls(f.text("type"), f.number("mode"), f.number("size"), f.raw("sha256").hex(), f.octets("link"))


@dataclass(frozen=True)
class FileChange:
    """A path that a step created, changed or removed."""

    path: str
    kind: str  # created | changed | removed
    before: Optional[PathState]
    after: Optional[PathState]
    replaced: bool  # a folder that was removed with all in it and made anew
    earlier: bool  # before the step began, by what ran in the background

    @classmethod
    def of(cls, f: Fields) -> FileChange:
        def state(name: str) -> Optional[PathState]:
            return PathState.of(f.sub(name)) if f.has(name) else None

        return cls(f.octets("path"), f.text("kind"), state("before"), state("after"), f.flag("replaced"), f.flag("earlier"))


@dataclass(frozen=True)
class TracedProcess:
    """A program that a step started."""

    pid: int
    parent: int
    argv: List[str]
    ended: bool
    cpu: float  # seconds
    code: int
    signal: int

    @classmethod
    def of(cls, f: Fields) -> TracedProcess:
        return cls(f.number("pid"), f.number("parent"), f.texts("argv"), f.flag("ended"), f.number("cpuUs") / 1e6, f.number("code"), f.number("signal"))


@dataclass(frozen=True)
class TracedStep:
    """A step and what it did. Lists are bounded: more_files, more_processes and more_reads count what was left out."""

    number: int  # in its trajectory, from 1
    step: str  # its key
    kind: str
    untraced: str  # why nothing is known of it; empty when it was traced
    files: List[FileChange]
    more_files: int
    volatile: List[str]
    processes: List[TracedProcess]
    more_processes: int
    read_bytes: int  # from storage; -1 unknown
    write_bytes: int  # -1 unknown
    reads: List[str]  # level full
    more_reads: int
    connections: List[str]  # level full
    whole: bool  # False: other steps may have a part in it, or files are told with another step, or not all
    lacking: List[str]  # what the host can't tell, with the reason

    @classmethod
    def of(cls, f: Fields) -> TracedStep:
        t = f.sub("trace")
        mixed = any(t.flag(n) for n in ("shared", "raced", "deferred", "filesPartial"))
        return cls(
            f.number("number"), f.text("step"), f.text("kind"), f.text("untraced"), t.subs("files", FileChange.of), t.number("moreFiles"),
            t.texts("volatilePaths"), t.subs("processes", TracedProcess.of), t.number("moreProcesses"), t.number("readBytes"), t.number("writeBytes"),
            t.subs("reads", lambda r: r.octets("path")), t.number("moreReads"), t.subs("connections", lambda c: c.text("address")),
            f.has("trace") and not mixed and t.number("sinceStep") == 0, t.texts("lacking"),
        )


@dataclass(frozen=True)
class FileHistory:
    """What is known of one file."""

    path: str
    changed_last: str  # key of the step; empty: none that is known
    changed_last_number: int
    read_first: str  # key of the step; see reads_traced
    read_first_number: int
    reads_traced: bool  # False: not traced, since the level is not full
    volatile_path: str  # it lies in a path whose changes are not told
    untraced_steps: int

    @classmethod
    def of(cls, f: Fields) -> FileHistory:
        return cls(
            f.octets("path"), f.text("changedLast"), f.number("changedLastNumber"), f.text("readFirst"), f.number("readFirstNumber"),
            f.flag("readsTraced"), f.text("volatilePath"), f.number("untracedSteps"),
        )


@dataclass
class Trace:
    """What the steps of a sandbox did, and the history of the file that was asked for."""

    steps: List[TracedStep] = field(default_factory=list)
    file: Optional[FileHistory] = None

    def take(self, m: Fields) -> None:
        """Adds what one answer of the server tells."""
        if m.has("step"):
            self.steps.append(TracedStep.of(m.sub("step")))
        if m.has("file"):
            self.file = FileHistory.of(m.sub("file"))
