"""The decisions about a job of several units, which every unit knows.

A decision is what the leader's policy has received, and the commands to units that followed. The policy is pure: a unit
that becomes the leader makes a new policy, lets it receive the same again, and has the state of the former leader.

* The leader sends each decision to all units in one message, so a unit knows a decision exactly if it has its commands.
* Each unit has the first decisions of the job up to some number. The unit with the most of them has all that any
  surviving unit has acted on.
* The log grows with deaths, and not with steps.

This module is pure: it does no I/O, and receives the time.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from topotrain.config import job_file
from topotrain.config.job import Job
from topotrain.config.topology import Topology, layout
from topotrain.core.events import (
    Event,
    Failed,
    Saved,
    Started,
    StepDone,
    from_json,
    to_json,
)
from topotrain.launch.recovery.recovery_actions import Action, GroupRequest, ResizeRequest, RestartResized
from topotrain.launch.recovery.recovery_policy import POLICY_EVENTS, RecoveryPolicy, RestartTerms
from topotrain.launch.recovery.resize import ResizeState

Decision = Mapping[str, Any]
"""Inputs and commands of one decision, as JSON."""
_TEXT = 2000  # the last characters of a log or a traceback
PART = 100
"""The number of decisions in one message between units. A long job with many deaths has more of them."""


class LogParts:
    """The decisions of another unit, which come in parts.

    Each part says how many decisions are before it.
    """

    def __init__(self) -> None:
        self._decisions: list[Decision] = []

    def add(self, words: Mapping[str, Any]) -> list[Decision]:
        """Record a part; return all decisions up to its end."""
        # A part that repeats decisions counts, and not what came before from a leader that is gone.
        self._decisions = [*self._decisions[: words["at"]], *words["log"]]
        return self._decisions


def parts_of(decisions: Sequence[Decision]) -> list[dict[str, Any]]:
    """Return the parts in which decisions are sent; at least one."""
    return [{"at": at, "log": list(decisions[at : at + PART])} for at in range(0, max(1, len(decisions)), PART)]


class DecisionLog:
    """The decisions that a unit knows, in their order."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self._began: float | None = None

    def __len__(self) -> int:
        return len(self.decisions)

    def add(self, number: int, decision: Decision, now: float) -> None:
        """Record a decision, unless it is known. number: of the decisions before it."""
        if number == len(self.decisions):
            self.decisions.append(decision)
            # Messages take time, so the earliest start that fits is the best one.
            began = now - decision["at"]
            self._began = began if self._began is None else min(began, self._began)

    def extend(self, decisions: Sequence[Decision], now: float) -> None:
        """Record the decisions that are not known yet, of all decisions of the job."""
        for number in range(len(self.decisions), len(decisions)):
            self.add(number, decisions[number], now)

    def replace(self, decisions: Sequence[Decision], now: float) -> None:
        """Record all decisions of the job, instead of what this unit knows."""
        self.decisions = []
        self.extend(decisions, now)

    def began(self, now: float) -> float:
        """Return when the job began, by the clock of this unit."""
        return now if self._began is None else self._began


class LoggedPolicy(RecoveryPolicy):
    """A policy that records what it receives, for the units that may lead later."""

    def __init__(
        self,
        topology: Topology,
        terms: RestartTerms,
        began: float,
        replicated: bool = False,
        near: frozenset[str] | None = None,
        resizing: ResizeState | None = None,
    ) -> None:
        super().__init__(topology, terms, began, replicated, near, resizing)
        self._began = began
        self._inputs: list[dict[str, Any]] = []
        self._origin: Mapping[str, Any] = {}
        self._stepped: set[str] = set()
        self._heard: dict[tuple[int, int], int] = {}  # the last event of a unit in an attempt
        self.resized: Job | None = None
        """The job to restart as, with another layout, if that is decided and has not begun."""

    def take(self) -> list[dict[str, Any]]:
        """Return what was received since the last call."""
        found, self._inputs = self._inputs, []
        return found

    def since_start(self, now: float) -> float:
        """Return the seconds since the start of the job."""
        return now - self._began

    @property
    def job(self) -> Job:
        """The job as it is now."""
        assert self._resizing is not None
        return self._resizing.job

    @property
    def over(self) -> bool:
        """Whether nothing restarts in this attempt any more."""
        return self._attempt.over

    def on_remote_event(self, origin: Mapping[str, Any], event: Event, now: float) -> list[Action]:
        """As `on_event`, for an event of another unit.

        origin: the rank of the unit, its attempt, and the number of the event there. An event that was received before
            changes nothing: a unit repeats some to a new leader.
        """
        unit = origin["rank"], origin["life"]
        if origin["number"] <= self._heard.get(unit, 0):
            return []
        self._heard[unit] = origin["number"]
        self._origin = origin
        try:
            return self.on_event(event, now)
        finally:
            self._origin = {}

    def on_event(self, event: Event, now: float) -> list[Action]:
        found = super().on_event(event, now)
        for action in found:
            if isinstance(action, RestartResized):
                self.resized = action.job
        if self._matters(event, len(found) > 1):
            self._note(now, event=_short(event), **self._origin)
        return found

    def _matters(self, event: Event, acts: bool) -> bool:
        """Return whether the state of the policy depends on an event.

        acts: actions follow from it.
        """
        match event:
            # Of steps the first one after a start matters, and those that complete a recovery.
            case StepDone(who=who):
                first = who not in self._stepped
                self._stepped.add(who)
                return first or acts
            case Started(who=who):
                self._stepped.discard(who)
            case Saved():
                return acts
            case _:
                pass
        return isinstance(event, POLICY_EVENTS)

    def poll(self, now: float) -> list[Action]:
        due = self.due
        found = super().poll(now)
        if found or (due is not None and due <= now):
            self._note(now, poll=True)
        return found

    def on_unit_lost(self, rank: int, lost: Failed, now: float) -> list[Action]:
        found = super().on_unit_lost(rank, lost, now)
        self._note(now, lost=rank, event=_short(lost))
        return found

    def on_group_request(self, request: GroupRequest) -> list[Action]:
        found = super().on_group_request(request)
        self._inputs.append({"group": asdict(request)})
        return found

    def on_resize_request(self, request: ResizeRequest, now: float) -> list[Action]:
        found = super().on_resize_request(request, now)
        self._note(now, resize=asdict(request))
        return found

    def on_stop_request(self) -> list[Action]:
        found = super().on_stop_request()
        if found:
            self._inputs.append({"stop": True})
        return found

    def begin_attempt(self, topology: Topology | None = None) -> None:
        super().begin_attempt(topology)
        self.resized = None
        self._inputs.append({"hosts": list((topology or self._topology).hosts)})

    def begin_resized(self, job: Job, topology: Topology) -> None:
        super().begin_resized(job, topology)
        self.resized = None
        self._inputs.append({"hosts": list(topology.hosts), "job": job_file.dumps(job)})

    def _note(self, now: float, **values: Any) -> None:
        self._inputs.append({"at": self.since_start(now), **values})

    def receive_again(self, decisions: Iterable[Decision]) -> Iterator[Action]:
        """Receive the inputs of a former leader's policy; yield its actions."""
        for decision in decisions:
            for given in decision["inputs"]:
                yield from self._receive_again(given)
        self._inputs = []

    def _receive_again(self, given: Mapping[str, Any]) -> list[Action]:
        now = self._began + given.get("at", 0.0)
        if "lost" in given:
            lost = _event(given)
            assert isinstance(lost, Failed)
            return self.on_unit_lost(given["lost"], lost, now)
        if "event" in given:
            return self.on_event(_event(given), now)
        if "poll" in given:
            return self.poll(now)
        if "group" in given:
            return self.on_group_request(GroupRequest(**given["group"]))
        if "resize" in given:
            return self.on_resize_request(ResizeRequest(**given["resize"]), now)
        if "stop" in given:
            return self.on_stop_request()
        hosts = tuple(given["hosts"])
        if "job" in given:
            job = job_file.loads(given["job"], "the job of a former leader")
            self.begin_resized(job, layout(job.cluster, hosts))
        else:
            self.begin_attempt(layout(self._topology.cluster, hosts))
        return []


def lost_units(decisions: Iterable[Decision]) -> set[int]:
    """Return the units that were lost in the last attempt."""
    found: set[int] = set()
    for decision in decisions:
        for given in decision["inputs"]:
            if "hosts" in given:
                found.clear()
            elif "lost" in given:
                found.add(given["lost"])
    return found


def heard(decisions: Iterable[Decision], attempt: int) -> dict[int, int]:
    """Return, for each unit, the number of its last event that was decided about."""
    found: dict[int, int] = {}
    for decision in decisions:
        for given in decision["inputs"]:
            if "rank" in given and given["life"] == attempt:
                found[given["rank"]] = max(given["number"], found.get(given["rank"], 0))
    return found


def _event(given: Mapping[str, Any]) -> Event:
    return from_json(json.dumps(given["event"]))


def _short(event: Event) -> dict[str, Any]:
    """Return the JSON data of an event, without the beginning of long texts."""
    data: dict[str, Any] = json.loads(to_json(event))
    return {key: value[-_TEXT:] if isinstance(value, str) else value for key, value in data.items()}
