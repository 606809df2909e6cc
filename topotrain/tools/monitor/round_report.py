"""The part of a report about rounds, and about workers that train alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from topotrain.core.events import LocalSteps, Rounds, StateTaken


@dataclass(slots=True)
class _Steps:
    """The steps of one worker, of its present process and the former ones."""

    made_before: int = 0
    lost_before: float = 0.0
    waited_before_s: float = 0.0
    now: LocalSteps | None = None

    def record(self, event: LocalSteps) -> None:
        """The present process has counted."""
        self.now = event

    def start(self) -> None:
        """A new process begins to count."""
        now, self.now = self.now, None
        if now is not None:
            # What the former process had told of no round died with it.
            self.made_before += now.made
            self.lost_before += now.pending + now.dropped
            self.waited_before_s += now.waited_s

    def as_data(self) -> dict[str, Any]:
        made, pending, dropped, waited_s = 0, 0.0, 0.0, 0.0
        if self.now is not None:
            made, pending, dropped, waited_s = self.now.made, self.now.pending, self.now.dropped, self.now.waited_s
        # A worker tells all its steps before its end, so pending ones are those of a process that came to no end.
        return {
            "steps": self.made_before + made,
            "lost_steps": self.lost_before + dropped + pending,
            "waited_s": self.waited_before_s + waited_s,
        }


class RoundReport:
    """Collects the events of an outer optimizer."""

    def __init__(self) -> None:
        self._rounds: Rounds | None = None
        self._steps: dict[str, _Steps] = {}
        self._states = {True: 0, False: 0}  # those that were taken from another group, and those that were not

    def record(self, event: Rounds | LocalSteps | StateTaken) -> None:
        """Record one event."""
        if isinstance(event, Rounds):
            self._rounds = event
        elif isinstance(event, StateTaken):
            self._states[event.whole] += 1
        else:
            self._steps.setdefault(event.who, _Steps()).record(event)

    def start(self, who: str) -> None:
        """A worker has a new process."""
        if who in self._steps:
            self._steps[who].start()

    def as_data(self, traffic: Mapping[str, Mapping[str, int]]) -> dict[str, Any] | None:
        """Return the figures of rounds and workers; None: there is no outer optimizer.

        traffic: the bytes of each worker.
        """
        if self._rounds is None and not self._steps:
            return None
        return {
            **_of_rounds(self._rounds),
            "lost_steps": sum(steps.as_data()["lost_steps"] for steps in self._steps.values()),
            "states_taken": self._states[True],
            "states_missed": self._states[False],
            "workers": [
                {"who": who, **self._steps[who].as_data(), **traffic.get(who, {})} for who in sorted(self._steps)
            ],
        }


def _of_rounds(found: Rounds | None) -> dict[str, Any]:
    if found is None:  # the job failed before its first round was reported
        found = Rounds("", {}, 0.0, 0, ())
    members = {int(count): rounds for count, rounds in found.members.items()}
    rounds = sum(members.values())
    return {
        "count": rounds,
        "members": {str(count): members[count] for count in sorted(members)},
        "members_mean": sum(count * made for count, made in members.items()) / rounds if rounds else None,
        "age_mean": found.age_mean,
        "age_max": found.age_max,
        "last": [_round(line) for line in found.last],
    }


def _round(line: str) -> dict[str, Any]:
    fragment, number, *groups = map(int, line.split())
    return {"fragment": fragment, "number": number, "groups": groups}
