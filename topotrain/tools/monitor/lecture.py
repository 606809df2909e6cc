"""A job for teaching: its messages are slow, and a sentence explains each."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from topotrain.config.job import ConfigError
from topotrain.config.topology import Topology

if TYPE_CHECKING:
    from topotrain.core.events import Event
    from topotrain.launch import EventListener
    from topotrain.tools.monitor.progress.chosen_display import Progress

OPTION = "--lecture"
MOST_PROCESSES = 16
"""Workers and servers of a job that can be followed by eye."""
LEAST_S, MOST_S = 0.01, 5.0
"""Bounds of the seconds for which a message is held. Longer ones would keep the end of a job waiting."""
_PACKAGE = "topotrain.extensions.slow_deliveries"


def check_lecture(seconds: float, topology: Topology) -> None:
    """Raise ConfigError unless messages of a job of this layout can be slowed down."""
    if find_spec(_PACKAGE) is None:
        raise ConfigError(OPTION, None, f"needs the package {_PACKAGE}, which this installation does not have")
    # Written so that NaN is refused, too.
    if not LEAST_S <= seconds <= MOST_S:
        raise ConfigError(OPTION, seconds, f"must be from {LEAST_S:g} to {MOST_S:g} seconds for each message")
    many = sum(len(unit.workers) + len(unit.servers) for unit in topology.units)
    if many > MOST_PROCESSES:
        accepted = f"needs a job of at most {MOST_PROCESSES} workers and servers: this one has {many}"
        raise ConfigError(OPTION, seconds, accepted)
    if topology.torch_collective:
        engine = topology.cluster.engine.value
        accepted = f"needs engine: kOwn: with {engine} the gradients travel inside torch.distributed"
        raise ConfigError(OPTION, seconds, accepted)


class ExplainedMessages:
    """Prints a sentence for each message of a job that is slowed down.

    Args:
        topology: the layout.
        shown: prints the sentences.
    """

    def __init__(self, topology: Topology, shown: "Progress") -> None:
        from topotrain.extensions.slow_deliveries.explanations import Explanations

        self._explanations, self._shown = Explanations.of(topology), shown

    def __call__(self, event: "Event") -> None:
        """Explain the message of a `Traveled` event; drop every other event."""
        from topotrain.core.events import Traveled

        if isinstance(event, Traveled):
            self._shown.say(self._explanations.sentence(event))


class NothingExplained:
    """The listener of a job at full speed."""

    def __call__(self, event: "Event") -> None:
        """Do nothing."""


def explaining(topology: Topology, shown: "Progress", wanted: bool) -> "EventListener":
    """Return the listener that explains messages where that is wanted."""
    return ExplainedMessages(topology, shown) if wanted else NothingExplained()
