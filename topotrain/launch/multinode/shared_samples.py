"""Samples of the units that follow, for displays and records of the leader.

The recovery policies need few events of other units (`follower.py`), and displays need many. These travel apart from
decisions: once in INTERVAL_S, the last event of each kind and process, and nothing while an earlier message is on its
way. A lost one costs nothing but a point of a curve, since all counts are totals.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence

from topotrain.core.events import (
    Connects,
    Event,
    Exited,
    Finished,
    Frozen,
    Logged,
    Resources,
    Saved,
    ServerLoad,
    Serving,
    Slices,
    Started,
    StepDone,
    Tested,
    Thawed,
    Traffic,
    Waits,
    from_json,
    to_json,
)
from topotrain.launch import EventListener

INTERVAL_S = 1.0
"""Seconds between two messages of a unit, at least."""
SAMPLES = (
    *(Connects, Exited, Finished, Frozen, Logged, Resources, Saved, ServerLoad, Serving),
    *(Slices, Started, StepDone, Tested, Thawed, Traffic, Waits),
)
"""The events that are sent. Others reach the leader as events of recovery, or with a unit's report at the end."""
_MOST = 20_000  # events that wait for the leader's loop


class SampleTransfer(ABC):
    """The connections to the other units; none of the calls waits."""

    @property
    @abstractmethod
    def leads(self) -> bool:
        """Whether this unit leads."""

    @abstractmethod
    def send_samples(self, lines: Sequence[str]) -> bool:
        """Send events to the leader; return False if a former message is still on its way."""

    @abstractmethod
    def take_samples(self) -> Iterable[Event]:
        """Return the events of other units since the last call."""


class Samples:
    """The samples of a job with one unit, which are sent nowhere."""

    def poll(self, now: float) -> None:
        """Send and receive what is due."""


class SharedSamples(Samples):
    """The samples of one unit among several.

    Args:
        units: the connections to the other units.
        on_sample: in the leader, receives the events of other units.
    """

    def __init__(self, units: SampleTransfer, on_sample: EventListener) -> None:
        self._units, self._on_sample = units, on_sample
        self._waiting: dict[tuple[type[Event], str], Event] = {}
        self._due = 0.0

    def note(self, event: Event) -> None:
        """Keep an event of this unit, if it is one that is sent."""
        if isinstance(event, SAMPLES):
            key = type(event), event.who
            # At the end of the order: a start must come behind the last step of the process before it.
            self._waiting.pop(key, None)
            self._waiting[key] = event

    def poll(self, now: float) -> None:
        if self._units.leads:
            # The listeners of this unit have had its own events.
            self._waiting.clear()
            for event in self._units.take_samples():
                self._on_sample(event)
        elif self._waiting and now >= self._due:
            self._due = now + INTERVAL_S
            if self._units.send_samples([to_json(event) for event in self._waiting.values()]):
                self._waiting.clear()


class ReceivedSamples:
    """The events of other units, from the readers of connections to the leader's loop."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_MOST)

    def add(self, lines: Sequence[str]) -> None:
        """Add the events of a message. Raises ValueError for one that is none."""
        self._events.extend(event for event in map(from_json, lines) if isinstance(event, SAMPLES))

    def take(self) -> Iterable[Event]:
        """Yield and forget the events."""
        while self._events:
            yield self._events.popleft()
