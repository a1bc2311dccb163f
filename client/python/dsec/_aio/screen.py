"""The screen of a sandbox, used as a person does."""

from __future__ import annotations

from typing import Sequence, Tuple

from .. import _ops as ops
from .. import _screen as screen
from .._octets import JSON
from ..model import Screenshot
from .transport import Transport


class AsyncScreen:
    """A screen: the machine's own where it has one, else a display server (RFB without a password) at a port inside. Places are pixels from
    the left and the top. What is done is one recorded step each; the same `step` key again does nothing."""

    def __init__(self, transport: Transport, sandbox: str, port: int) -> None:
        self._t = transport
        self._sandbox = sandbox
        self.port = port

    @property
    def view_url(self) -> str:
        """Where a browser shows the screen; the page asks for a key, or takes it from a fragment `#key=`. Through a Unix socket no browser
        reaches it."""
        return screen.view_url(self._t.config, self._sandbox, self.port)

    async def shot(self) -> Screenshot:
        """The screen as it is, as PNG. It is recorded with its hash and size alone."""
        return Screenshot.of(await self._t.run(ops.call("DisplayService/Screenshot", screen.at(self._sandbox, self.port))))

    async def keys(self, *names: str, step: str = "") -> None:
        """Presses up to 8 keys together and lets them go: `keys("ctrl", "s")`, `keys("Return")`."""
        await self._act(screen.keys(names), step)

    async def type(self, text: str, *, step: str = "") -> None:
        """Types text, at most 4,096 octets of UTF-8."""
        await self._act([{"text": text}], step)

    async def move(self, x: int, y: int, *, step: str = "") -> None:
        """Moves the pointer."""
        await self._act(screen.click(x, y, "", 0, None), step)

    async def click(self, x: int, y: int, button: str = "left", *, clicks: int = 1, step: str = "") -> None:
        """Clicks `left`, `middle` or `right`, one to three times."""
        await self._act(screen.click(x, y, button, clicks, None), step)

    async def drag(self, x: int, y: int, to: Tuple[int, int], button: str = "left", *, step: str = "") -> None:
        """Holds the button from one place to another."""
        await self._act(screen.click(x, y, button, 0, to), step)

    async def scroll(self, x: int, y: int, steps: int, *, step: str = "") -> None:
        """Turns the wheel over a place, down when positive; at most 100 steps."""
        await self._act(screen.scroll(x, y, steps), step)

    async def _act(self, acts: Sequence[JSON], step: str) -> None:
        await self._t.run(ops.call("DisplayService/Act", screen.act(self._sandbox, self.port, acts, step)))
