"""Makers of the servers of a recorded or replayed job, and notes of decisions."""

from abc import ABC, abstractmethod

from topotrain.config.job import Job
from topotrain.config.topology import Address, Topology
from topotrain.core import protocol as m
from topotrain.core.model.schema import BufferMemory
from topotrain.core.server.server import Server
from topotrain.core.server.server_context import StartPoint
from topotrain.core.server.server_extension import Outbox, ServerExtension, StepResult
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.decision_record.order_entries import Note, StepMade, VersionShown


class ServerOrder(ABC):
    """Makes servers that record the order of their messages, or replay such an order."""

    @abstractmethod
    def make(
        self,
        me: Address,
        job: Job,
        topology: Topology,
        memory: BufferMemory,
        shared: bool,
        sender: MessageSender | None,
        start: StartPoint | None,
    ) -> Server:
        """Return the server at an address, without extensions.

        The arguments are those of `Server`.
        """


class VersionObserver:
    """Is told of each step that is over. The method does nothing here."""

    def on_version(self, version: int) -> None:
        """A step is over, and the values have this version."""


class DecisionNotes(ServerExtension):
    """Notes the decisions of a server.

    These are the steps that are over, and the versions that the server shows.

    observer: is told of versions, while the values have them.
    """

    observes = (m.Values,)

    def __init__(self, observer: VersionObserver | None = None) -> None:
        self._observer = observer or VersionObserver()
        self._made: list[Note] = []
        self._rounds: dict[int, int] = {}  # worker group -> the last round that it was shown

    def take(self) -> list[Note]:
        """Return the notes since the last call."""
        made, self._made = self._made, []
        return made

    def on_sent(self, to: Address, message: m.Message) -> None:
        assert isinstance(message, m.Values)
        # The values of a step have its version. The final values have none.
        if message.version < 0 or not m.extra_round(0) < message.round < 0:
            return
        # All workers of a group are shown one moment, bucket by bucket.
        if self._rounds.get(to.group) != message.round:
            self._rounds[to.group] = message.round
            self._made.append(VersionShown(to.group, message.version))

    def step_over(self, result: StepResult) -> Outbox:
        applied = result.applied
        self._made.append(StepMade(result.group, applied.version, applied.found_inf))
        self._observer.on_version(applied.version)
        return ()

    def reset_group(self, group: int, ended: bool) -> None:
        """As `ServerExtension.reset_group`.

        New processes number their requests from the start.
        """
        self._rounds.pop(group, None)
