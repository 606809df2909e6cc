"""Requests to the recovery policy, and its actions, which the run loop executes."""

from dataclasses import dataclass

from topotrain.config.job import Job
from topotrain.core.events import Event, Failed

JOIN, LEAVE, LOSE = "join", "leave", "lose"
SNAPSHOT, STOP = "snapshot", "stop"


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request that a group joins or leaves.

    within_s: seconds for leaving, after which the group's processes are ended.
    """

    verb: str
    group: int
    within_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ResizeRequest:
    """A request that `workers` workers leave or join.

    within_s: seconds in which the snapshot has to be complete.
    """

    verb: str
    workers: int
    within_s: float = 10.0


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """A request for a snapshot after the next step, with which the job goes on.

    within_s: seconds in which the snapshot has to be complete.
    """

    within_s: float = 10.0


@dataclass(frozen=True, slots=True)
class StopJob:
    """A request that the job ends as after SIGTERM: with a last snapshot, if any."""


@dataclass(frozen=True, slots=True)
class RestartGroup:
    """An action: end the rest of this group, then restart its workers.

    incarnation: of the new workers. why: the reason, for their logs.
    worker: the only worker to restart; "": all of them.
    told: the servers of the group wait to be told which it is.
    """

    group: int
    incarnation: int
    why: str
    worker: str = ""
    told: bool = False


@dataclass(frozen=True, slots=True)
class EndProcess:
    """An action: end this process, which has no work left."""

    who: str


@dataclass(frozen=True, slots=True)
class PlaceReplica:
    """An action: send all server processes the new placement, and replace one.

    process: to be replaced. number: of the new process, counted over the job.
    seats: as from `ReplicaPlacement.to_data`.
    unit: the unit for the new process; -1: none, the placement keeps an empty slot.
    """

    process: str
    number: int
    why: str
    seats: list[list[int]]
    unit: int


@dataclass(frozen=True, slots=True)
class RestartJob:
    """An action: end every process, then restart the whole job."""

    why: str


@dataclass(frozen=True, slots=True)
class FailJob:
    """An action: end the job for one of these reasons, without further waiting."""

    failures: tuple[Failed, ...]


@dataclass(frozen=True, slots=True)
class AskServers:
    """An action: ask the group's servers whether a change is possible.

    incarnation: the present one of the group's workers.
    """

    wish: str
    group: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class ReportGone:
    """An action: report to the group's servers that earlier processes are gone.

    incarnation: no process before this incarnation is left.
    """

    group: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """An action: answer the clients that made this request; `error` refuses it."""

    verb: str
    group: int
    text: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """An action: ask the first server for a snapshot after the next step."""


@dataclass(frozen=True, slots=True)
class ResizeRefused:
    """An action: answer the client that nothing has changed, and why."""

    wish: ResizeRequest
    error: str


@dataclass(frozen=True, slots=True)
class RestartResized:
    """An action: end every process, then resume as this job from the new snapshot.

    number: of the Recovered event that reports when it trains. text: the answer to the client at that time.
    """

    wish: ResizeRequest
    job: Job
    number: int
    step: int
    text: str


Action = (
    Event
    | RestartGroup
    | EndProcess
    | PlaceReplica
    | RestartJob
    | FailJob
    | AskServers
    | ReportGone
    | AnswerRequest
    | RequestSnapshot
    | ResizeRefused
    | RestartResized
)


def refused(request: GroupRequest, error: str) -> AnswerRequest:
    """Return the answer that refuses a request about a group."""
    return AnswerRequest(request.verb, request.group, "", error)
