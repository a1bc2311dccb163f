"""What a person does at a screen, as requests of DisplayService."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple
from urllib.parse import quote

from ._config import Config
from ._octets import JSON
from ._ops import new_key, without_empty
from .errors import Invalid


def at(sandbox: str, port: int) -> JSON:
    return without_empty({"sandbox": sandbox, "port": port})


def act(sandbox: str, port: int, acts: Sequence[JSON], step: str) -> JSON:
    return dict(at(sandbox, port), step=step or new_key(), acts=list(acts))


def keys(names: Sequence[str]) -> List[JSON]:
    return [{"keys": list(names)}]


def click(x: int, y: int, button: str, clicks: int, to: Optional[Tuple[int, int]]) -> List[JSON]:
    pointer: JSON = {"x": x, "y": y, "button": button, "clicks": clicks}
    if to is not None:
        pointer.update(drag=True, to_x=to[0], to_y=to[1])
    return [{"pointer": pointer}]


def scroll(x: int, y: int, steps: int) -> List[JSON]:
    return [{"scroll": {"x": x, "y": y, "steps": steps}}]


def view_url(config: Config, sandbox: str, port: int) -> str:
    if not 0 <= port <= 65535:
        raise Invalid(f"port {port}: want 0 to 65535")
    return f"{config.base}/v1/screens/{quote(sandbox, safe='')}" + (f"?port={port}" if port else "")
