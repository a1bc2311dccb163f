"""The asyncio client with the face of the sync one, so that one test tries both. What is awaitable is awaited, what is an async iterator or
context manager becomes a plain one, on a loop in a thread of its own."""

import asyncio
import inspect
import threading


class Loop:
    def __init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def wait(self, awaitable):
        async def outer():
            return await awaitable

        return asyncio.run_coroutine_threadsafe(outer(), self.loop).result(60)

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)

    def wrap(self, value):
        if inspect.isawaitable(value) and not hasattr(value, "__aenter__"):
            return self.wrap(self.wait(value))
        if hasattr(value, "__anext__") or hasattr(value, "__aenter__") or type(value).__name__.startswith("Async"):
            return Bridge(self, value)
        return value


def unwrap(value):
    return value._inner if isinstance(value, Bridge) else value


class Bridge:
    def __init__(self, loop, inner):
        object.__setattr__(self, "_loop", loop)
        object.__setattr__(self, "_inner", inner)

    def _made(self):
        """What is on its way is awaited at its first use."""
        if type(self._inner).__name__ == "Pending":
            object.__setattr__(self, "_inner", self._loop.wait(self._inner))
        return self._inner

    def __getattr__(self, name):
        value = getattr(self._made(), name)
        if not callable(value) or inspect.isclass(value):
            return self._loop.wrap(value)

        def call(*args, **kwargs):
            async def make():
                return value(*map(unwrap, args), **kwargs)

            return self._loop.wrap(self._loop.wait(make()))

        return call

    def __len__(self):
        return len(self._made())

    def __getitem__(self, i):
        return self._loop.wrap(self._made()[i])

    def __iter__(self):
        inner = self._made()
        if hasattr(inner, "__aiter__"):
            it = inner.__aiter__()
            while True:
                try:
                    yield self._loop.wrap(self._loop.wait(it.__anext__()))
                except StopAsyncIteration:
                    return
        else:
            yield from map(self._loop.wrap, inner)

    def __next__(self):
        try:
            return self._loop.wrap(self._loop.wait(self._inner.__anext__()))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self):
        entered = self._loop.wait(self._inner.__aenter__())
        if type(self._inner).__name__ == "Pending":
            return self._loop.wrap(entered)
        return self if entered is self._inner else self._loop.wrap(entered)

    def __exit__(self, *exc):
        self._loop.wait(self._inner.__aexit__(*exc))
