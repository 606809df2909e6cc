"""Requests of the user to a unit that another unit decides for."""

import threading
from collections.abc import Mapping
from typing import Any

from topotrain.launch.job_requests import ENDED, LEADER_LOST, JobRequest, JobRequests, RequestClient, from_data, to_data
from topotrain.launch.multinode.control_connection import ControlClient, ControlConnection


class ForwardedRequests:
    """Forwards requests to the leader, and its answers to their clients.

    Several threads may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: ControlClient | None = None
        self._clients: dict[int, RequestClient] = {}
        self._count = 0

    @property
    def has_leader(self) -> bool:
        """Whether there is a leader that requests go to, and it is another unit."""
        return self._control is not None

    def use(self, control: ControlClient | None) -> None:
        """Forward to this leader from now on.

        None: there is no leader, or it is this unit. A former leader answers nothing any more.
        """
        with self._lock:
            self._control = control
            clients, self._clients = list(self._clients.values()), {}
        # Whether it has carried them out is not known, so they are not sent again.
        for client in clients:
            client({"error": LEADER_LOST})

    def send(self, wish: JobRequest, client: RequestClient) -> None:
        """Forward a request of this client. The call does not block."""
        with self._lock:
            control = self._control
            if control is not None:
                self._count += 1
                self._clients[self._count] = client
                # With the lock: the client belongs to this leader, and to no later one.
                control.send(control.leader, {"ask": {"number": self._count, "wish": to_data(wish)}})
        if control is None:
            client({"error": LEADER_LOST})

    def receive(self, answer: Mapping[str, Any]) -> None:
        """Pass on an answer of the leader."""
        with self._lock:
            client = self._clients.pop(answer["number"], None)
        if client is not None:
            client(answer["said"])

    def close(self) -> None:
        """Answer all clients with an error."""
        with self._lock:
            clients, self._clients, self._control = list(self._clients.values()), {}, None
        for client in clients:
            client({"error": ENDED})


def accept(requests: JobRequests, control: ControlConnection, rank: int, words: Mapping[str, Any]) -> None:
    """Add a request in the leader that another unit has forwarded."""

    def reply(said: dict[str, Any]) -> None:
        control.send(rank, {"answer": {"number": words["number"], "said": said}})

    requests.add(from_data(words["wish"]), reply)
