"""A task of a cluster that clients drive, in one session after the other.

* There is one session at a time.
* A peer has to prove that it knows the token before anything else.
* The worker that a client connects to is the first of the session. It sends requests to all other tasks, over one
  connection to each.
* A connection that ends is the end of the session. So a client that dies, and a task that dies, free the others.
"""

import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from topotrain.comm.security.handshake import refuse
from topotrain.comm.store import StoreError
from topotrain.comm.store.discovery.static_addresses import numeric, split_address
from topotrain.comm.store.tcp_store_handshake import bound, certificate_for, come_in, resolve
from topotrain.comm.transport import Refused, TransportError
from topotrain.compat.tensorflow.session.session_follower import follow
from topotrain.compat.tensorflow.session.session_leader import SessionLeader
from topotrain.compat.tensorflow.session.session_protocol import FRAME_S, SessionClosed, SessionConnection, identity
from topotrain.compat.tensorflow.session.session_task import TaskAddress
from topotrain.launch.by_hand.manual_server import tell

if TYPE_CHECKING:
    from topotrain.comm.security.tls import Certificate

MAX_CALLERS = 64
GRACE_S = 10.0
"""Seconds for which a client waits for the end of a session that is ending."""
_CLOSING_S = 5.0
_BACKLOG = 64


class SessionServer:
    """One task's process. It accepts connections as soon as it is made.

    Args:
        cluster: the addresses of all tasks, by job.
        me: this task.
        secret: 32 bytes, the same on all tasks and in the client.

    Raises:
        StoreError: no connection can be accepted at this address.
    """

    def __init__(self, cluster: Mapping[str, Sequence[str]], me: TaskAddress, secret: bytes) -> None:
        self._tasks = [TaskAddress(job, k, address) for job, at in cluster.items() for k, address in enumerate(at)]
        self._me, self._secret = me, secret
        host, port = split_address(me.address)
        self._host = numeric(host)
        self._listener, self._certificate = _listen(self._host, port, secret)
        self._identity = identity(secret)
        self._turn = threading.Lock()  # held by the session that this task belongs to
        self._lock = threading.Lock()
        self._callers: dict[socket.socket, threading.Thread] = {}
        self._over = threading.Event()
        self._served: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._doorman = threading.Thread(target=self._accept, name=f"session {me}", daemon=True)
        self._doorman.start()

    def stay(self) -> None:
        """Serve sessions until the process is stopped (KeyboardInterrupt) or `close`."""
        tell(f"{self._me}: ready at tcp://{self._me.address}")
        try:
            while not self._over.is_set():
                served = self._served.get()
                if served is not None:
                    served()
        finally:
            self.close()

    def close(self) -> None:
        """Close all connections. A session that is under way ends."""
        self._over.set()
        self._served.put(None)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._doorman.join(_CLOSING_S)
        self._listener.close()
        with self._lock:
            callers = dict(self._callers)
        for sock in callers:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in callers.values():
            thread.join(_CLOSING_S)

    def _in_stay(self, serve: Callable[[], None]) -> None:
        """Run a server on the thread of `stay`.

        Ctrl-C reaches that thread, and servers print why they end.
        """
        done = threading.Event()

        def served() -> None:
            try:
                serve()
            finally:
                done.set()

        self._served.put(served)
        done.wait()

    # --- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                self._over.wait(0.05)  # out of descriptors: some will be closed
                continue
            thread = threading.Thread(target=self._let_in, args=(sock,), name="session", daemon=True)
            with self._lock:
                room = len(self._callers) < MAX_CALLERS and not self._over.is_set()
                if room:
                    self._callers[sock] = thread
            if room:
                thread.start()
            else:
                refuse(sock, Refused("FULL", "this task cannot take a connection now"))
                sock.close()

    def _let_in(self, sock: socket.socket) -> None:
        try:
            with sock, suppress(OSError, TransportError, SessionClosed):
                talk = SessionConnection(come_in(sock, self._identity, self._certificate))
                said, tensors = talk.hear(FRAME_S)
                self._answer(talk, said, tensors)
        finally:
            with self._lock:
                self._callers.pop(sock, None)

    def _answer(self, talk: SessionConnection, said: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        workers = [f"tcp://{task.address}" for task in self._tasks if task.job == "worker"]
        client = said.get("do") == "open"
        if client and self._me.job != "worker":
            talk.say({"error": f"is {self._me}: a session talks to a worker, {' or '.join(workers)}", "config": True})
            return
        if not self._turn.acquire(timeout=GRACE_S):
            talk.say({"error": f"{self._me} belongs to the session of another client", "config": True})
            return
        try:
            if client:
                SessionLeader(talk, self._tasks, self._me, self._host, self._secret).lead()
            else:
                counts = [sum(task.job == job for task in self._tasks) for job in ("worker", "ps")]
                follow(self._me, talk, said, tensors, counts, self._host, self._secret, self._in_stay)
        finally:
            self._turn.release()


def _listen(host: str, port: int, secret: bytes) -> "tuple[socket.socket, Certificate | None]":
    family, address = resolve(host, port)
    certificate = certificate_for(host, address, port, secret)
    try:
        sock = bound(family, address, port, _BACKLOG)
    except OSError as error:
        raise StoreError(f"tcp://{host}:{port}: {error.strerror}") from error
    return sock, certificate
