"""Making sandboxes that are gone again."""

from __future__ import annotations

from typing import Collection, Mapping, Optional

from ._octets import Fields, JSON, Octets, env_vars
from ._ops import Op, Sleep, call, new_key, without_empty
from .errors import NotRestored, Unavailable
from .model import Restored, SandboxInfo

WAIT = 20.0  # seconds of one call
TRIES = 30  # a second apart, while nobody answers


def body(
    *, sandbox: str = "", job: str = "", key: str = "", warn: bool = False, skip: Collection[str] = (), repeat: Collection[str] = (),
    secrets: Optional[Mapping[Octets, Octets]] = None, accept_tail_loss: bool = False, lost_host: str = "", call_id: str = "",
) -> JSON:
    out = without_empty({
        "sandbox": sandbox, "job": job, "key": key, "policy": "warn" if warn else "", "skip": list(skip), "repeat": list(repeat),
        "secrets": env_vars(secrets, list(secrets or ())), "accept_tail_loss": accept_tail_loss, "lost_host": lost_host,
    })
    out.update({"id": call_id or "restore-" + new_key(), "wait_ms": int(WAIT * 1000)})
    return out


def restore(request: JSON) -> Op[Restored]:
    """Asks until it has come to something; the same call again joins it, also through another gateway."""
    failed = 0
    while True:
        try:
            f: Fields = yield from call("RestoreService/Restore", request, timeout=WAIT + 60)
        except Unavailable:
            failed += 1
            if failed > TRIES:
                raise
            yield Sleep(1.0)
            continue
        failed = 0
        if f.text("state") != "restoring":
            break
    done = Restored.of(f)
    if done.sandbox is None:
        raise NotRestored(done)
    return done


def info_of(done: Restored) -> SandboxInfo:
    assert done.sandbox is not None  # else NotRestored was raised
    return done.sandbox
