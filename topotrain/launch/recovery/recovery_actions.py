"""Actions after a process death, from the recovery policy to the run loop."""

from dataclasses import dataclass

from topotrain.core.events import Event, Failed
from topotrain.launch.recovery.elastic_groups import AnswerRequest, AskServers, ReportGone
from topotrain.launch.recovery.resize import RequestSnapshot, ResizeRefused, RestartResized


@dataclass(frozen=True, slots=True)
class RestartGroup:
    """An action: end the rest of this group, then restart its workers.

    incarnation: of the new workers. why: the reason, for their logs. who: the only worker to restart; "": all of them.
    """

    group: int
    incarnation: int
    why: str
    who: str = ""


@dataclass(frozen=True, slots=True)
class EndProcess:
    """An action: end this process, which has no work left.

    Separate actions describe what follows from its loss.
    """

    who: str


@dataclass(frozen=True, slots=True)
class PlaceReplica:
    """An action: send all server processes the new placement, and replace `who`.

    number: of the new process, counted over the job. seats: as from `ReplicaPlacement.to_data`.
    unit: the unit for the new process; -1: none, the placement keeps an empty slot.
    """

    who: str
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


Word = (
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
