"""An HTTP server by uvicorn, on a thread with an event loop of its own.

The module is imported where a page is served.
"""

import asyncio
import socket
import ssl
import threading
from contextlib import suppress

from starlette.types import ASGIApp
from uvicorn import Config, Server

from topotrain.comm.transport.listener import Newcomers
from topotrain.tools.dashboard.event_streams import RunTicker

_MOST_CONNECTIONS = 128
_HEADER_BYTES = 16 << 10
_KEEP_S = 30
_END_S = 2
_JOIN_S = 5.0
_LOOK_S = 0.5


class HttpThread:
    """Serves an application until `close`.

    Args:
        app: the application.
        sock: listens already, so that no request is refused while the thread starts.
        tls: for an address that other machines reach.
        ticker: runs on the same event loop.
        newcomers: the connections of the socket that have not made a request yet.
    """

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        tls: ssl.SSLContext | None,
        ticker: RunTicker,
        newcomers: Newcomers,
    ) -> None:
        config = Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # else each stranger's nonsense is a line on the user's terminal
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,  # else a request could name the scheme that it came by
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_keep_alive=_KEEP_S,
            timeout_graceful_shutdown=_END_S,
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        config.load()
        config.ssl = tls
        self._server, self._sock, self._ticker, self._newcomers = Server(config), sock, ticker, newcomers
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._sock, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        beside = [asyncio.ensure_future(each) for each in (self._ticker.run(), self._end_late())]
        await self._server.serve(sockets=[self._sock])
        for task in beside:
            task.cancel()

    async def _end_late(self) -> None:
        while True:
            self._newcomers.end_late()
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """Let the streams send what came last, and end the thread."""
        # The loop may have ended by itself.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(_JOIN_S)

    def _end(self) -> None:
        self._ticker.close()
        self._server.should_exit = True
