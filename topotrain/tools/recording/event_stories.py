"""The moments of a job in words, for the terminal, the page and the summary."""

from collections.abc import Mapping
from typing import NamedTuple

from topotrain.core.events import (
    Event,
    Failed,
    Final,
    Incident,
    Joined,
    Left,
    Lost,
    Metrics,
    Notice,
    Output,
    Recovered,
    Resized,
    Saved,
    Skipped,
    StepDone,
    Tested,
    Unsaved,
)

SKIPS_SAID = 10
"""The number of skipped steps of a worker with a moment each. After these only every tenth has one."""


class Story(NamedTuple):
    """A moment of a job. of: the name of a process; "": the job."""

    kind: str
    of: str
    text: str


class EventStories:
    def __init__(self) -> None:
        self._resizes: set[int] = set()  # by number: they have a Recovered event, as losses have

    def of(self, event: Event) -> Story | None:
        """Return the moment that an event tells of; None: it tells of none."""
        match event:
            case StepDone() | Output():
                return None  # first: most events are of these
            case Incident():
                # The numbers of a job that was started again begin anew.
                self._resizes.discard(event.number)
                return Story("incident", event.who, f"{event.what}; {event.action}")
            case Recovered():
                return Story("recovered", "", _recovery(event, "change" if event.number in self._resizes else "loss"))
            case Resized():
                self._resizes.add(event.number)
                many = f"nworkers_per_group: {event.workers}"
                return Story("resized", "", f"{moved(event)}; the job goes on after step {event.step} with {many}")
            case Left():
                return Story("left", f"worker {event.group}/0", f"group {event.group} {event.how}; the others continue")
            case Joined():
                text = f"group {event.group} joins (incarnation {event.incarnation})"
                return Story("joined", f"worker {event.group}/0", text)
            case Skipped() if _is_said(event):
                return Story("skipped", event.who, _skip(event))
            case Notice() | Unsaved():
                return Story("notice", event.who, event.text)
            case Failed() | Lost():
                return Story("failed", event.who, event.text)
            case Saved():
                return Story("snapshot", "", f"snapshot {event.number} after step {event.step}")
            case Tested():
                return Story("evaluation", "", f"{event.kind} after step {event.step}: {_values(event.values)}")
            case Metrics():
                return Story("evaluation", "", f"reported: {_values(event.values)}")
            case Final():
                return Story("snapshot", "", "the final parameters are written")
            case _:
                return None


def moved(found: Resized) -> str:
    count, verb = abs(found.workers - found.former), "join" if found.workers > found.former else "leave"
    return f"1 worker {verb}s" if count == 1 else f"{count} workers {verb}"


def _recovery(event: Recovered, what: str) -> str:
    others = f", the others were without a step for at most {event.others_s:.1f} s" if event.others_s else ""
    return f"training again {event.waited_s:.1f} s after that {what}{others}"


def _skip(event: Skipped) -> str:
    whose = f"of {event.parameter}" if event.parameter else "of a table's rows"
    what = "the gradient" if event.by else "its group's sum of the gradients"
    many = f" (its skipped step number {event.total})" if event.total > 1 else ""
    return f"{event.who}: {what} {whose} is not finite in step {event.step}: the step is skipped{many}"


def _is_said(event: Skipped) -> bool:
    """Return whether to tell of a skipped step, once for a group."""
    # Of a group only the worker with the bad gradient tells of it, or else its first worker.
    teller = event.by == event.who or (not event.by and event.who.endswith("/0"))
    return teller and (event.total <= SKIPS_SAID or event.total % SKIPS_SAID == 0)


def _values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
