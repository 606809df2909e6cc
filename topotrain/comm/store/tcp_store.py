"""A client of topotrain's own store server, over TCP.

* Each operation takes one of a few open connections, sends its request, and waits for the reply. Several threads use
  several connections.
* A lost connection is made anew, with growing pauses, until the deadline.
* A repeated request carries the number of its first attempt, so the server knows whether it was carried out already.
"""

import os
import threading
import time
from dataclasses import replace

from topotrain.comm.backoff import spread
from topotrain.comm.request_reply import RequestChannel, connect, service_identity
from topotrain.comm.store.key_validation import StoreError, check_key, check_prefix, check_ttl, check_value
from topotrain.comm.store.store_base import PATIENCE
from topotrain.comm.store.tcp_store_protocol import (
    MAX_WAIT,
    SERVICE,
    Op,
    Reply,
    Status,
    StoreRequest,
    receive_reply,
    send_request,
)
from topotrain.comm.transport import Refused, TransportError
from topotrain.comm.transport.tcp_socket import InvalidHost, url_of

_REPLY_S = 10.0  # seconds for a reply that the server gives at once
_MAX_IDLE = 8  # idle connections
_FIRST_PAUSE, _LAST_PAUSE = 0.02, 1.0  # seconds between attempts


class AccessDenied(StoreError):
    """The server refuses this client, and would refuse it again."""


class TcpStore:
    """A `Store` at tcp://host:port; connects at its first use.

    secret: 32 bytes, those of the server. patience: seconds for which an operation retries while the server cannot be
    reached. After that it raises StoreError. A wrong secret is refused at once.

    Raises:
        ValueError: the secret does not have 32 bytes.
    """

    def __init__(self, host: str, port: int, secret: bytes, patience: float = PATIENCE) -> None:
        self._host, self._port = host, port
        self._url = url_of(host, port)
        self._identity = service_identity(SERVICE, secret)
        self._patience = patience
        self._lock = threading.Lock()
        self._idle: list[RequestChannel] = []
        self._busy: set[RequestChannel] = set()
        self._process = os.getpid()
        self._closed = False

    def get(self, key: str) -> bytes | None:
        check_key(key)
        reply = self._ask(StoreRequest(Op.GET, key))
        return reply.body if reply.status is Status.YES else None

    def set(self, key: str, value: bytes, ttl: float | None = None) -> None:
        check_key(key)
        check_value(value)
        self._ask(StoreRequest(Op.SET, key, value, life=check_ttl(ttl)))

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes, ttl: float | None = None) -> bool:
        check_key(key)
        check_value(value)
        if expected is not None:
            check_value(expected)
        return self._ask(StoreRequest(Op.COMPARE_AND_SET, key, value, expected, check_ttl(ttl))).status is Status.YES

    def delete(self, key: str) -> None:
        check_key(key)
        self._ask(StoreRequest(Op.DELETE, key))

    def keys(self, prefix: str = "") -> list[str]:
        check_prefix(prefix)
        return self._ask(StoreRequest(Op.KEYS, prefix)).body.decode().split()

    def watch(self, key: str, timeout: float, known: bytes | None = None) -> bytes:
        check_key(key)
        if known is not None:
            check_value(known)
        until = time.monotonic() + timeout
        reply = self._ask(StoreRequest(Op.WATCH, key, known=known), max(0.0, timeout), until)
        if reply.status is Status.TIMEOUT:
            raise TimeoutError(f"nothing new under {key!r} in {self._url} within {timeout} s")
        return reply.body

    def close(self) -> None:
        """Close the connections; an operation of another thread ends with StoreError."""
        self._leave_parent()
        with self._lock:
            self._closed = True
            # Only shut down: the thread that uses a connection closes it.
            for channel in self._busy:
                channel.shutdown()
        self._close_idle()

    def _ask(self, request: StoreRequest, wait: float = 0.0, until: float | None = None) -> Reply:
        """Send the request until there is a reply; `wait` and `until` are of a watch."""
        lost_at, pause = None, _FIRST_PAUSE
        while True:
            if until is not None:
                # A repeated watch must not wait longer than the first one would have.
                wait = max(0.0, until - time.monotonic())
            try:
                reply = self._attempt(request, min(wait, MAX_WAIT))
            except (OSError, TransportError) as error:
                self._close_idle()  # when one connection was lost, the others mostly are, too
                self._give_up_on(error)
                now = time.monotonic()
                lost_at = now if lost_at is None else lost_at
                # Patience counts from the first loss; a watch also ends at its own time.
                end = min(lost_at + self._patience, until if until is not None else now + self._patience)
                if now + pause > end:
                    tried = f" (tried for {now - lost_at:.0f} s)" if now - lost_at >= 1 else ""
                    raise StoreError(f"store {self._url} cannot be reached{tried}: {error}") from error
                # Never longer than `pause`, with which the deadline was checked.
                time.sleep(spread(pause, most=1))
                pause = min(2 * pause, _LAST_PAUSE)
                continue
            if reply.status is Status.REFUSED:
                raise StoreError(f"store {self._url}: {reply.body.decode('utf-8', 'replace')}")
            return reply

    def _attempt(self, request: StoreRequest, wait: float) -> Reply:
        channel = self._acquire()
        try:
            with self._lock:
                self._check_open()
                self._busy.add(channel)  # so that `close` ends what happens on it
            # `once` stays the same in each attempt, so the server carries the request out once.
            send_request(channel, replace(request, seconds=wait), wait + _REPLY_S)
            reply = receive_reply(channel, wait + _REPLY_S)
        except BaseException:
            with self._lock:
                self._busy.discard(channel)
            channel.close()  # its reply may still come, and would be taken for the one of another request
            raise
        self._release(channel)
        return reply

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"store {self._url}: was closed")

    def _acquire(self) -> RequestChannel:
        self._leave_parent()
        with self._lock:
            self._check_open()
            if self._idle:
                return self._idle.pop()
        return connect(self._host, self._port, self._identity)

    def _leave_parent(self) -> None:
        """Begin anew in a forked process: the connections belong to the parent."""
        if self._process != os.getpid():
            # A thread that this process does not have may have held the lock when the parent forked.
            self._lock, self._idle, self._busy, self._process = threading.Lock(), [], set(), os.getpid()

    def _release(self, channel: RequestChannel) -> None:
        with self._lock:
            self._busy.discard(channel)
            if not self._closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(channel)
                return
        channel.close()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def _give_up_on(self, error: Exception) -> None:
        """Raise StoreError for an error that a retry would not change."""
        if isinstance(error, InvalidHost):
            raise StoreError(f"store {self._url}: {error}") from error
        if isinstance(error, Refused) and error.code != "FULL":
            if error.code == "AUTH":
                raise AccessDenied(f"store {self._url} has another secret than this process") from error
            raise AccessDenied(f"store {self._url} refused this process: {error}") from error
