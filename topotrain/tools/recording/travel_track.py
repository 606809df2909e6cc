"""The messages of a slowed job, each with the sentence that explains it."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from topotrain.config import job_file
from topotrain.config.job import ConfigError
from topotrain.config.topology import layout
from topotrain.core.events import Traveled

if TYPE_CHECKING:
    from topotrain.extensions.slow_deliveries.explanations import Explanations

MOST_TRAVELS = 2000
PACKAGE = "topotrain.extensions.slow_deliveries"


@dataclass(frozen=True, slots=True)
class TravelEntry:
    """A message, and the number of its event in the history."""

    number: int
    at: float
    event: Traveled
    sentence: str

    def as_data(self) -> list[Any]:
        """Return the entry as in the view."""
        event = self.event
        return [round(self.at, 3), event.who, event.to, event.what, event.step, event.bucket, self.sentence]


class TravelTrack:
    """The last messages of a job."""

    def __init__(self) -> None:
        self._explanations: Explanations | None = None
        self._entries: deque[TravelEntry] = deque(maxlen=MOST_TRAVELS)

    def explained_by(self, job: Mapping[str, Any]) -> None:
        """From now on, explain in the words of the job that this header describes."""
        self._explanations = _explanations(str(job.get("block", "")))

    def add(self, number: int, at: float, event: Traveled) -> None:
        """Add a message."""
        sentence = "" if self._explanations is None else self._explanations.sentence(event)
        self._entries.append(TravelEntry(number, at, event, sentence))

    def since(self, number: int) -> list[list[Any]]:
        """Return the messages with higher numbers as in the view."""
        return [entry.as_data() for entry in self._entries if entry.number > number]


def _explanations(block: str) -> "Explanations | None":
    """Return the explanations for a cluster block. None: there are none for it."""
    if not block or find_spec(PACKAGE) is None:
        return None
    from topotrain.extensions.slow_deliveries.explanations import Explanations

    try:
        return Explanations.of(layout(job_file.loads(block, "the recording").cluster))
    except ConfigError:
        # A later version may have fields that this one does not know.
        return None
