"""A result that is on its way: `sb = await c.run_container(...)` and `async with c.run_container(...) as sb:` both work."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Callable, Coroutine, Generator, Generic, Optional, Protocol, Type, TypeVar


class _Closing(Protocol):
    async def __aexit__(
        self, kind: Optional[Type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None: ...


T = TypeVar("T", bound=_Closing)


class Pending(Generic[T]):
    """Starts when it is awaited or entered, once."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._make = make
        self._made: Optional[T] = None

    def __await__(self) -> Generator[Any, Any, T]:
        return self._make().__await__()

    async def __aenter__(self) -> T:
        self._made = await self._make()
        return self._made

    async def __aexit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        if self._made is not None:
            await self._made.__aexit__(kind, value, trace)
