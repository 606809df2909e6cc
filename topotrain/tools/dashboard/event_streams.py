"""Server-sent events: a whole view first, and twice a second what is new.

A reader that takes nothing for some seconds is dropped. Until then it costs one message: what comes meanwhile is not
queued, because the next delta has it all.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from topotrain.tools.dashboard.watched_run import RunUpdate, WatchedRun

TICK_S = 0.5
IDLE_TICK_S = 5.0
"""Seconds between two looks at the recordings while no page is open."""
SLOW_S = 10.0
"""Seconds for which a reader may take nothing."""
MOST_STREAMS = 32
_QUIET_S = 5.0  # a page whose job says nothing is told the time

Scope = Mapping[str, Any]


class Receive(Protocol):
    """The incoming side of an ASGI connection."""

    def __call__(self) -> Awaitable[Any]:
        """Wait for the next message of the browser or of the server."""
        ...


class Send(Protocol):
    """The outgoing side of an ASGI connection."""

    def __call__(self, message: dict[str, Any], /) -> Awaitable[None]:
        """Send a message, and wait until the network has taken it."""
        ...


@dataclass(slots=True)
class StreamLimits:
    """How often streams are served, and how slow a reader may be. In seconds."""

    tick_s: float = TICK_S
    slow_s: float = SLOW_S
    most: int = MOST_STREAMS


@dataclass(slots=True)
class RunTicker:
    """Reads what is new in the recordings, and wakes the streams, on one event loop.

    runs: by the name that the page has for them.
    """

    runs: Mapping[str, WatchedRun]
    limits: StreamLimits = field(default_factory=StreamLimits)
    streams: int = 0
    """The number of open streams."""
    closing: bool = False
    """The server is asked to close."""
    ended: bool = False
    """The last tick has been."""
    _ticked: asyncio.Event = field(default_factory=asyncio.Event)
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Tick until `close` is called."""
        while not self.closing:
            self._tick()
            await self._pause()
        # What came last, such as the end of the job. Set first: who wakes now waits for no other tick.
        self.ended = True
        self._tick()

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._wanted.wait(), self.limits.tick_s if self.streams else IDLE_TICK_S)
        except TimeoutError:
            return
        self._wanted.clear()

    def _tick(self) -> None:
        for run in self.runs.values():
            run.poll()
        ticked, self._ticked = self._ticked, asyncio.Event()
        ticked.set()

    def open(self) -> bool:
        """Count one more stream; False if there are too many."""
        if self.streams >= self.limits.most or self.closing:
            return False
        self.streams += 1
        # The first page after a pause sees the present at once, and then at the shorter interval.
        for run in self.runs.values():
            run.poll()
        self._wanted.set()
        return True

    def release(self) -> None:
        """Count one stream less."""
        self.streams -= 1

    def wait(self) -> Awaitable[object]:
        """Wait for the next tick after this call."""
        # No coroutine function: that would look for the event when it first runs, which may be after the last tick.
        return self._ticked.wait()

    def close(self) -> None:
        """Let the streams send what came last, and end."""
        self.closing = True
        self._wanted.set()


class EventStream:
    """One response: the events of a run for one browser. An ASGI application.

    Args:
        run: what it shows.
        ticker: wakes it.
    """

    def __init__(self, run: WatchedRun, ticker: RunTicker) -> None:
        self._run, self._ticker = run, ticker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the browser goes, is too slow, or the server closes."""
        gone = asyncio.ensure_future(_gone(receive))
        try:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await self._within(send({"type": "http.response.start", "status": 200, "headers": headers}))
            view = self._run.view()
            await self._within(_event(send, view))
            await self._follow(view.cursor, gone, send)
        except TimeoutError:
            # Its next message would only wait behind this one.
            return
        finally:
            gone.cancel()
            self._ticker.release()

    async def _follow(self, cursor: int, gone: "asyncio.Future[None]", send: Send) -> None:
        loop = asyncio.get_running_loop()
        said = loop.time()
        while not gone.done():
            over = self._ticker.ended
            if not over:
                tick = asyncio.ensure_future(self._ticker.wait())
                first: set[asyncio.Future[Any]] = {tick, gone}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                tick.cancel()
            update = self._run.delta(cursor)
            if update.cursor != cursor or loop.time() - said >= _QUIET_S:
                await self._within(_event(send, update))
                cursor, said = update.cursor, loop.time()
            if over:
                await self._within(send({"type": "http.response.body", "body": b"", "more_body": False}))
                return

    async def _within(self, sending: Awaitable[None]) -> None:
        """Wait until the network has taken a message. Raises TimeoutError."""
        async with asyncio.timeout(self._ticker.limits.slow_s):
            await sending


async def _event(send: Send, update: RunUpdate) -> None:
    # The JSON has no end of a line, which would end the field.
    body = f"event: {update.event}\ndata: {update.text}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    """Wait until the browser has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
