"""A task of a cluster that clients drive, in one session after the other.

* A peer has to prove that it knows the token before anything else.
* The worker that a client connects to is the first of the session. It sends requests to all other tasks, over one
  connection to each.
* A connection that ends is the end of the session. So a client that dies, and a task that dies, free the others.
"""

import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from topotrain.comm.request_reply import RequestChannel, RequestServer
from topotrain.comm.store import StoreError
from topotrain.comm.store.discovery.static_addresses import numeric, split_address
from topotrain.comm.transport import TransportError
from topotrain.compat.tensorflow.session.session_follower import ShardQueue, follow
from topotrain.compat.tensorflow.session.session_leader import SessionLeader
from topotrain.compat.tensorflow.session.session_protocol import FRAME_S, SERVICE, SessionConnection
from topotrain.compat.tensorflow.session.session_task import TaskAddress
from topotrain.launch.by_hand.manual_server import tell

MAX_CALLERS = 64
GRACE_S = 10.0
"""Seconds for which a client waits for the end of a session that is ending."""


class SessionServer:
    """One task's process. It accepts connections as soon as it is made.

    secret: 32 bytes, the same on all tasks and in the client. Raises StoreError if no connection can be accepted at
    this address.
    """

    def __init__(self, cluster: Mapping[str, Sequence[str]], me: TaskAddress, secret: bytes) -> None:
        self._tasks = [TaskAddress(job, k, address) for job, at in cluster.items() for k, address in enumerate(at)]
        self._me, self._secret = me, secret
        host, port = split_address(me.address)
        self._host = numeric(host)
        try:
            self._server = RequestServer(SERVICE, self._host, port, secret, self.serve_client, MAX_CALLERS)
        except TransportError as error:
            raise StoreError(f"tcp://{self._host}:{port}: {error}") from error
        except OSError as error:
            raise StoreError(f"tcp://{self._host}:{port}: {error.strerror}") from error
        # Held by the session that this task belongs to. There is one at a time.
        self._turn = threading.Lock()
        self._over = threading.Event()
        self._shards: ShardQueue = queue.SimpleQueue()
        self._server.start()

    def stay(self) -> None:
        """Serve sessions until the process is stopped (KeyboardInterrupt) or `close`."""
        tell(f"{self._me}: ready at tcp://{self._me.address}")
        try:
            while not self._over.is_set():
                # Ctrl-C reaches this thread, and servers print why they end.
                shard = self._shards.get()
                if shard is not None:
                    shard.run()
        finally:
            self.close()

    def close(self) -> None:
        """Close all connections. A session that is under way ends."""
        if not self._over.is_set():
            self._over.set()
            # Wakes the main thread, which waits in `stay`.
            self._shards.put(None)
            self._server.close()

    # --- connections -------------------------------------------------------------------------------------------------

    def serve_client(self, channel: RequestChannel) -> None:
        """Serve a client, or another task of its session."""
        connection = SessionConnection(channel)
        self._answer(connection, connection.receive_first())

    def _answer(self, connection: SessionConnection, said: Mapping[str, Any]) -> None:
        workers = [f"tcp://{task.address}" for task in self._tasks if task.job == "worker"]
        client = said.get("do") == "open"
        if not client and said.get("do") != "join":
            connection.send({"error": "a session begins with open or join", "config": True})
            return
        if client and self._me.job != "worker":
            connection.send(
                {"error": f"is {self._me}: a session talks to a worker, {' or '.join(workers)}", "config": True}
            )
            return
        # The session before may just be ending, so a client waits a little before it is refused.
        if not self._turn.acquire(timeout=GRACE_S):
            connection.send({"error": f"{self._me} belongs to the session of another client", "config": True})
            return
        try:
            if client:
                SessionLeader(connection, self._tasks, self._me, self._host, self._secret).lead()
            else:
                counts = [sum(task.job == job for task in self._tasks) for job in ("worker", "ps")]
                # Only now: a peer without a session could fill the memory.
                request, tensors = connection.receive(FRAME_S)
                follow(self._me, connection, request, tensors, counts, self._host, self._secret, self._shards)
        finally:
            self._turn.release()
