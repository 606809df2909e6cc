"""How another unit takes over the decisions about a job.

* A new leader decides nothing until each other unit has joined it, or is lost. A unit that joins reports its decisions,
  its events that no decision follows from yet, and whether its processes run.
* The longest list of decisions holds for all: units without its last ones get them, with their commands.
* Then the loss of the former leader is handled as that of any other unit.
* If some units have ended their processes already, the whole job restarts.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeGuard

from topotrain.config.job import Job
from topotrain.config.topology import Topology, layout
from topotrain.core.events import (
    Event,
    Failed,
    Incident,
    Joined,
    Left,
    Notice,
    Recovered,
    Saved,
    StepDone,
    from_json,
    to_json,
)
from topotrain.launch.multinode.control_connection import (
    ControlChannel,
    LeaderElected,
    News,
    UnitMessage,
    UnitReturned,
    UnitVanished,
)
from topotrain.launch.multinode.election.decision_log import (
    Decision,
    DecisionLog,
    LoggedPolicy,
    LogParts,
    heard,
    lost_units,
    parts_of,
)
from topotrain.launch.multinode.node_info import HostMap, NodeInfo
from topotrain.launch.multinode.reliable_messages import Words, shortened
from topotrain.launch.recovery.recovery_actions import Action
from topotrain.launch.recovery.recovery_policy import recovery

OF_A_REPORT = (Incident, Recovered, Left, Joined)
"""The actions of a former leader that are in the report of the next one."""


def is_shown(action: Action) -> TypeGuard[Incident | Failed]:
    """Return whether an action is an event for the user."""
    return isinstance(action, Incident | Failed)


def lead_notice(takeover: "Takeover", rank: int) -> Notice:
    """Return the notice that a unit leads from now on."""
    elected = takeover.elected
    why = f"unit {elected.former} is gone" if elected.former >= 0 else "it was elected again"
    return Notice("launcher", f"unit {rank} leads the job from now on (term {elected.term}): {why}")


def replaced(rank: int, unit: NodeInfo) -> Failed:
    """Return the loss of a unit of which a new process is there."""
    return Failed(f"unit {rank}", "died", f"unit {rank} is gone, and {unit.who} has replaced it", "")


class EventReporter:
    """Sends the events of one attempt to the leader, and keeps some for the next one.

    Args:
        control: the connections of this unit.
        rank: of this unit.
        attempt: the number of the attempt.
    """

    def __init__(self, control: ControlChannel, rank: int, attempt: int) -> None:
        self._control, self._rank, self._attempt = control, rank, attempt
        self._number = 0
        self.told: list[tuple[int, dict[str, Any]]] = []
        """The events that no known decision follows from, with their numbers."""
        self.saved: dict[str, Any] = {}
        """The last snapshot of a server here."""

    def emit(self, event: Event) -> None:
        data = shortened(json.loads(to_json(event)))
        self._number += 1
        # A step that is not known costs a new leader nothing but the time of a recovery.
        if isinstance(event, Saved):
            self.saved = data
        # A snapshot that was asked for may be what a change of the number of workers waits for.
        if not isinstance(event, StepDone | Saved) or (isinstance(event, Saved) and event.why == "end"):
            self.told.append((self._number, data))
        self._control.report({"life": self._attempt, "number": self._number, "event": data})

    def settle(self, decision: Decision) -> None:
        """Forget the events that a decision follows from."""
        last = heard([decision], self._attempt).get(self._rank, 0)
        self.told = [(number, data) for number, data in self.told if number > last]


class Takeover:
    """Collects what a new leader has to know. It does no I/O.

    Args:
        elected: the news of the election.
        me: what this unit itself knows, as the words of a unit that joins.
        rank: of this unit.
        ranks: all units.
    """

    def __init__(self, elected: LeaderElected, me: Words, rank: int, ranks: Collection[int]) -> None:
        self.elected, self._rank = elected, rank
        self.joined: dict[int, Words] = {rank: me}
        self.lost: dict[int, Failed] = {} if elected.former < 0 else {elected.former: elected.lost}
        self._parts: dict[int, LogParts] = {}
        self.later: list[News] = []
        """News that came meanwhile, for after the takeover."""
        self._ranks, self._gone = set(ranks), lost_units(me["log"])

    def update(self, me: Words) -> None:
        """Record what this unit itself knows by now."""
        self.joined[self._rank] = me

    def on_news(self, news: News) -> None:
        """Record a unit that joins or is lost, and keep all other news."""
        match news:
            case UnitMessage(rank, words) if "part" in words:
                self._parts.setdefault(rank, LogParts()).add(words["part"])
            case UnitMessage(rank, words) if "joins" in words and rank not in self.lost:
                log = self._parts.pop(rank, LogParts()).add(words)
                self.joined[rank] = {**words, "at": 0, "log": log}
            case UnitVanished(rank, failed):
                self.joined.pop(rank, None)
                self.lost.setdefault(rank, failed)
            case UnitReturned(rank, unit):
                # Its predecessor does not join any more, and its silence may never be reported.
                self.joined.pop(rank, None)
                self.lost.setdefault(rank, replaced(rank, unit))
                self.later.append(news)
            case _:
                self.later.append(news)

    @property
    def missing(self) -> set[int]:
        """The units that have neither joined nor are lost."""
        return self._ranks - self.joined.keys() - self.lost.keys() - self._gone

    @property
    def attempt(self) -> int:
        """The last attempt that any unit has begun."""
        return max(int(words["life"]) for words in self.joined.values())

    @property
    def hosts(self) -> HostMap:
        """The hosts of that attempt."""
        attempt = self.attempt
        return HostMap.of(next(words["hosts"] for words in self.joined.values() if words["life"] == attempt))

    @property
    def running(self) -> set[int]:
        """The units with processes."""
        return {rank for rank, words in self.joined.items() if "ready" not in words}

    @property
    def decisions(self) -> Sequence[Decision]:
        """All decisions that a unit has acted on."""
        found: Sequence[Decision] = max((words["log"] for words in self.joined.values()), key=len)
        return found

    def unknown_to(self, rank: int) -> Iterator[tuple[int, Decision]]:
        """Yield the decisions that a unit has not received, with their numbers."""
        decisions = self.decisions
        for number in range(len(self.joined[rank]["log"]), len(decisions)):
            yield number, decisions[number]

    @property
    def saved(self) -> Saved | None:
        """The last snapshot that a unit knows."""
        found = [words["saved"] for words in self.joined.values() if words["saved"]]
        last = max(found, key=lambda data: int(data["number"]), default=None)
        event = None if last is None else from_json(json.dumps(last))
        return event if isinstance(event, Saved) else None

    def events(self) -> Iterator[tuple[dict[str, Any], Event]]:
        """Yield the events that no decision follows from, each with its origin."""
        attempt = self.attempt
        last = heard(self.decisions, attempt)
        for rank, words in sorted(self.joined.items()):
            for number, data in words["told"] if words["life"] == attempt else ():
                if number > last.get(rank, 0):
                    yield {"rank": rank, "life": attempt, "number": number}, from_json(json.dumps(data))


@dataclass(slots=True)
class Succession:
    """The knowledge of a unit that it needs in order to lead, over all attempts.

    job: the job. rank: of this unit. first: the host numbers of the first attempt. hosts: those of the present one.
    """

    job: Job
    rank: int
    first: tuple[int, ...]
    hosts: HostMap
    log: DecisionLog = field(default_factory=DecisionLog)
    reporter: EventReporter | None = None
    policy: LoggedPolicy | None = None
    """Decides while this unit leads."""
    _has_led: bool = False

    def open(self, topology: Topology, began: float) -> None:
        """Lead from the start of the job on. Raises ConfigError."""
        # Only these workers report every step here; the others do so while a recovery is open.
        near = frozenset(map(str, topology.units[self.rank].workers))
        made = recovery(self.job, topology, began, near, LoggedPolicy)
        self.policy = made if isinstance(made, LoggedPolicy) else None
        self._has_led = True

    def join_words(self, attempt: int, running: bool) -> dict[str, Any]:
        """Return what this unit reports to a new leader."""
        told = [] if self.reporter is None else [list(each) for each in self.reporter.told]
        words = {"joins": True, "life": attempt, "told": told, "at": 0, "log": list(self.log.decisions)}
        words |= {"hosts": asdict(self.hosts), "saved": {} if self.reporter is None else self.reporter.saved}
        return words if running else {**words, "ready": True}

    def join(self, control: ControlChannel, attempt: int, running: bool) -> None:
        """Report to a new leader."""
        *first, last = parts_of(self.log.decisions)
        for part in first:
            control.report({"life": attempt, "part": part})
        control.report({**self.join_words(attempt, running), **last})

    def take_over(self, takeover: Takeover, now: float) -> list[Action]:
        """Lead from now on; return the actions of former leaders. Raises ConfigError."""
        decisions, self.hosts = takeover.decisions, takeover.hosts
        self.log.extend(decisions, now)
        self.open(layout(self.job.cluster, self.first), self.log.began(now))
        return [] if self.policy is None else list(self.policy.receive_again(decisions))

    def begin(self, hosts: HostMap, reporter: EventReporter | None = None) -> None:
        """Begin an attempt on these hosts. reporter: sends its events to the leader."""
        self.hosts, self.reporter = hosts, reporter

    def follow(self, leader: int) -> None:
        """Lead no longer. leader: the unit that leads; -1: none."""
        self.policy = None
        # A former leader may have decided what no other unit knows. The next attempt begins with all decisions.
        if self._has_led and leader >= 0:
            self._has_led = False
            self.log.replace((), 0.0)

    def decide(self, commands: Sequence[Mapping[str, Any]], now: float) -> tuple[int, Decision] | None:
        """Record the inputs of the policy, with these commands, as a decision.

        Returns it with its number; None where nothing was decided.
        """
        if self.policy is None:
            return None
        inputs = self.policy.take()
        if not inputs and not commands:
            return None
        decision = {"at": self.policy.since_start(now), "inputs": inputs, "commands": list(commands)}
        number = len(self.log)
        self.log.add(number, decision, now)
        return number, decision

    def on_decision(self, words: Words, now: float) -> None:
        """Record a decision of the leader."""
        self.log.add(words["number"], words["decision"], now)
        if self.reporter is not None:
            self.reporter.settle(words["decision"])
