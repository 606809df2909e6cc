"""What is to be done about a process death: what `recovery_policy` decides, and the run loop carries out."""

from dataclasses import dataclass

from topotrain.core.events import Event, Failed
from topotrain.launch.recovery.elastic_groups import AnswerRequest, AskServers, ReportGone
from topotrain.launch.recovery.resize import RequestSnapshot, ResizeRefused, RestartResized


@dataclass(frozen=True, slots=True)
class RestartGroup:
    """To do: end what is left of this group, then start its workers with this incarnation.

    why: for their logs. who: the one worker that is meant; "": all of them.
    """

    group: int
    incarnation: int
    why: str
    who: str = ""


@dataclass(frozen=True, slots=True)
class EndProcess:
    """To do: end this process, which does nothing any more; what follows from its loss is said beside."""

    who: str


@dataclass(frozen=True, slots=True)
class PlaceReplica:
    """To do: tell every server process who has which seat now, and start a fresh one in the seat of `who`.

    number: of the fresh process, counted over the job. seats: as `seats.ReplicaPlacement.to_data`. unit: where the
    fresh one is to stand; -1: nowhere, the seat stays empty.
    """

    who: str
    number: int
    why: str
    seats: list[list[int]]
    unit: int


@dataclass(frozen=True, slots=True)
class RestartJob:
    """To do: end every process, then start the whole job again."""

    why: str


@dataclass(frozen=True, slots=True)
class FailJob:
    """To do: end the job for one of these reasons; nobody needs to wait for a better one."""

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
