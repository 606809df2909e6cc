"""Requests of the user to a running job, and their answers.

A request comes over the control socket of this host, from another unit, or over the job's store. The run loop takes it
and answers, possibly in a later attempt of the job.
"""

import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from topotrain.launch.recovery.recovery_actions import (
    JOIN,
    LEAVE,
    SNAPSHOT,
    STOP,
    AnswerRequest,
    GroupRequest,
    ResizeRequest,
    StopJob,
    TakeSnapshot,
)

JobRequest = GroupRequest | ResizeRequest | TakeSnapshot | StopJob
ENDED = "the job has ended, or the whole job restarts"
LEADER_LOST = "the unit that led the job was lost before it answered: ask again if the job has not changed"


RequestClient = Callable[[dict[str, Any]], None]
"""Sends the answer to a request to its sender, without waiting. A sender that is gone is no error."""


@dataclass(slots=True)
class PendingAnswer:
    """An answer that comes later, possibly from another attempt of the job.

    number: the number of the recovery after which the answer is due.
    """

    number: int
    data: dict[str, Any]
    _client: RequestClient | None = None

    def send(self, error: str = "") -> None:
        """Send the answer, or the error. A second call does nothing."""
        if self._client is not None:
            self._client({"error": error} if error else self.data)
            self._client = None


class JobRequests:
    """The requests to a job that are not answered yet. Several threads may add some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[JobRequest] = []
        self._waiting: list[tuple[JobRequest, RequestClient]] = []

    def add(self, wish: JobRequest, client: RequestClient) -> None:
        """Add a request, which the run loop takes soon."""
        with self._lock:
            self._new.append(wish)
            self._waiting.append((wish, client))

    @property
    def waiting(self) -> int:
        """The number of requests that are not answered yet."""
        return len(self._waiting)

    def take(self) -> list[JobRequest]:
        """Return the requests since the last call; their answers may come at any time."""
        with self._lock:
            found, self._new = self._new, []
            return found

    def take_with_client(self) -> list[tuple[JobRequest, RequestClient]]:
        """Return the requests since the last call, which are answered elsewhere."""
        with self._lock:
            self._new.clear()
            found, self._waiting = self._waiting, []
            return found

    def answer(self, answer: AnswerRequest) -> None:
        """Answer all clients that made this request."""
        said = {"error": answer.error} if answer.error else {"group": answer.group, "text": answer.text}
        for wish, client in list(self._waiting):
            if isinstance(wish, GroupRequest) and (wish.verb, wish.group) == (answer.verb, answer.group):
                self._send(client, said)

    def reply(self, wish: JobRequest, said: dict[str, Any]) -> None:
        """Send this answer to the client of this one request only."""
        for each, client in list(self._waiting):
            if each is wish:
                self._send(client, said)

    def refuse(self, wish: JobRequest, error: str) -> None:
        """Send the error to the client of this one request only."""
        self.reply(wish, {"error": error})

    def promise(self, wish: ResizeRequest, number: int, data: dict[str, Any]) -> PendingAnswer:
        """Return the answer to this request, which comes later; `close` leaves it out."""
        with self._lock:
            found = [client for each, client in self._waiting if each is wish]
            self._waiting = [(each, client) for each, client in self._waiting if each is not wish]
        return PendingAnswer(number, data, found[0] if found else None)

    def close(self, error: str = ENDED) -> None:
        """Answer all waiting clients with an error."""
        for _, client in list(self._waiting):
            self._send(client, {"error": error})
        with self._lock:
            self._new.clear()

    def _send(self, client: RequestClient, said: dict[str, Any]) -> None:
        with self._lock:
            self._waiting = [(each, other) for each, other in self._waiting if other is not client]
        client(said)


def to_data(wish: JobRequest) -> dict[str, Any]:
    """Return a request as JSON data."""
    match wish:
        case GroupRequest(verb=verb, group=group, within_s=within_s):
            return {"verb": verb, "group": group, "within_s": within_s}
        case ResizeRequest(verb=verb, workers=workers, within_s=within_s):
            return {"verb": verb, "workers": workers, "within_s": within_s}
        case TakeSnapshot(within_s=within_s):
            return {"verb": SNAPSHOT, "within_s": within_s}
        case StopJob():
            return {"verb": STOP}


def from_text(text: bytes | str) -> JobRequest:
    """Parse a request. Raises ValueError."""
    try:
        return from_data(json.loads(text))
    except RecursionError as error:
        raise ValueError(f"not a request: {error}") from None


def from_data(said: Any) -> JobRequest:
    """Return the request of JSON data. Raises ValueError."""
    try:
        verb = said["verb"]
        if verb == STOP:
            return StopJob()
        within_s = said["within_s"]
        number = 0 if verb == SNAPSHOT else said["workers"] if "workers" in said else said["group"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a request: {error}") from None
    numbers = isinstance(number, int) and isinstance(within_s, int | float) and not isinstance(number, bool)
    if verb not in (JOIN, LEAVE, SNAPSHOT) or not numbers or not 0 < within_s < math.inf:
        raise ValueError(f"not a request: {said}")
    if verb == SNAPSHOT:
        return TakeSnapshot(float(within_s))
    return (ResizeRequest if "workers" in said else GroupRequest)(verb, number, float(within_s))
