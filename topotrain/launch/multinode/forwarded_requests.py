"""Requests of the user to a unit that another unit decides for."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from topotrain.launch.job_requests import ENDED, JobRequest, JobRequests, RequestClient, from_data, to_data
from topotrain.launch.multinode.control_connection import ControlConnection


class ForwardedRequests:
    """Forwards requests to unit 0, and its answers to their clients.

    Several threads may use it.

    Args:
        control: the connection to unit 0.
    """

    def __init__(self, control: ControlConnection) -> None:
        self._control, self._lock = control, threading.Lock()
        self._clients: dict[int, RequestClient] = {}
        self._count = 0

    def send(self, wish: JobRequest, client: RequestClient) -> None:
        """Forward a request of this client. The call does not block."""
        with self._lock:
            self._count += 1
            number = self._count
            self._clients[number] = client
        self._control.send(0, {"ask": {"number": number, "wish": to_data(wish)}})

    def receive(self, answer: Mapping[str, Any]) -> None:
        """Pass on an answer of unit 0."""
        with self._lock:
            client = self._clients.pop(answer["number"], None)
        if client is not None:
            client.reply(answer["said"])

    def close(self) -> None:
        """Answer all clients with an error."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.reply({"error": ENDED})


@dataclass(frozen=True, slots=True, eq=False)
class _UnitClient(RequestClient):
    """A client of another unit. Its request has this number there."""

    control: ControlConnection
    rank: int
    number: int

    def reply(self, said: dict[str, Any]) -> None:
        """As `RequestClient.reply`."""
        self.control.send(self.rank, {"answer": {"number": self.number, "said": said}})


def accept(requests: JobRequests, control: ControlConnection, rank: int, words: Mapping[str, Any]) -> None:
    """Add a request in unit 0 that another unit has forwarded."""
    requests.add(from_data(words["wish"]), _UnitClient(control, rank, words["number"]))
