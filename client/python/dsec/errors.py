"""What can go wrong.

A `DsecError` says that the platform failed or refused; each kind has a class of its own, and the text names the field and the fix. How a
command ended is never an error but a value (`Result`); only `Result.check` makes one of it, `CommandFailed`, which is no `DsecError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, Optional, Type

if TYPE_CHECKING:
    from .model import Restored, Result


class DsecError(Exception):
    """The platform failed or refused. `code` is the name on the wire, such as "not_found"; classes below exist for those worth telling apart."""

    code = "unknown"

    def __init__(self, message: str, code: Optional[str] = None) -> None:
        super().__init__(message)
        if code:
            self.code = code

    @property
    def message(self) -> str:
        """The text as the server told it."""
        return str(self.args[0])


class NotFound(DsecError):
    """The sandbox, command, file, layer or other object does not exist for the caller's project."""

    code = "not_found"


class Exists(DsecError):
    """The name is taken, or a key was used before for another request; the text names the first difference."""

    code = "already_exists"


class Invalid(DsecError, ValueError):
    """The request can't be right; the text names the field."""

    code = "invalid_argument"


class State(DsecError):
    """The object is in a state that does not allow the call, such as a command in a sandbox that has ended."""

    code = "failed_precondition"


class NotRestored(State):
    """A restore came to no sandbox: the caller is asked (`result.asks`, `result.secrets`), or a step came to something else
    (`result.diverged`). Nothing is left of the attempt."""

    def __init__(self, result: Restored) -> None:
        super().__init__(str(result))
        self.result = result


class VersionMismatch(State):
    """Server and client speak different protocols; the text says which side to upgrade."""


class Exhausted(DsecError):
    """No capacity, or a quota is used up: the same call may work later."""

    code = "resource_exhausted"


class Unavailable(DsecError):
    """A daemon could not be reached or went away during the call. Unless `unsent`, whether the call had an effect is not known; calls
    that are safe to repeat were repeated before this was raised."""

    code = "unavailable"
    unsent = False


class DeadlineExceeded(DsecError, TimeoutError):
    """The call's deadline passed. Whether it had an effect is not known; the same call with the same key is safe to send again."""

    code = "deadline_exceeded"


class Denied(DsecError):
    """The key is missing, wrong or expired, or does not open the project."""

    code = "permission_denied"


class Unsupported(DsecError):
    """The server or the sandbox's backend can't do this."""

    code = "unimplemented"


class Lost(DsecError):
    """The platform lost what was asked for, such as the outcome of a command whose host died: it is unknown for ever. Never a fault of
    the task, so it must not be counted as a reward of 0."""

    code = "data_loss"


class Internal(DsecError):
    """A fault in the server; its log has the details."""

    code = "internal"


class CommandFailed(Exception):
    """Raised by `Result.check` alone: the command did not exit with code 0."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.describe())
        self.result = result


_CLASSES: Dict[str, Type[DsecError]] = {
    c.code: c for c in (NotFound, Exists, Invalid, State, Exhausted, Unavailable, DeadlineExceeded, Denied, Unsupported, Lost, Internal)
}
_CLASSES["unauthenticated"] = Denied


def from_code(code: str, message: str) -> DsecError:
    """The error for a code of the wire."""
    return _CLASSES.get(code, DsecError)(message, code)


def unsent(message: str) -> Unavailable:
    """No connection came about, so nothing was sent and any call may be repeated."""
    e = Unavailable(message)
    e.unsent = True
    return e


def unclear(e: DsecError) -> bool:
    """Whether the call may have had an effect although it failed."""
    return isinstance(e, (DeadlineExceeded, Internal)) or (isinstance(e, Unavailable) and not e.unsent) or type(e) is DsecError
