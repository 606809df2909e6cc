"""A server that writes down the order of its messages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.model.schema import BufferMemory
from topotrain.core.server.server import Server
from topotrain.core.server.server_context import Out, StartPoint
from topotrain.core.server.server_extension import ServerExtension
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.decision_record.order_entries import (
    LOST,
    Arrival,
    Entry,
    EntryEncoder,
    ModelKnown,
    OwnMessage,
)
from topotrain.extensions.decision_record.ordered_messages import MessageOrder, StepChecks
from topotrain.extensions.decision_record.server_order import DecisionNotes


class RecordingSink(ABC):
    """Takes the bytes of one process."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Keep these bytes, also if the process is killed right after."""


def model_digest(server: Server) -> bytes | None:
    """Return the digest of the model that workers have described to a server.

    None: the model is not known yet.
    """
    model = server.model
    return None if model is None else sha256(model.schema.text().encode()).digest()[:8]


class RecordingServer(Server):
    """A server that records the order of its messages.

    Args:
        me, job, topology, memory, shared, sender, start: as for `Server`.
        sink: takes the recording.
    """

    def __init__(
        self,
        me: Address,
        job: Job,
        topology: Topology,
        memory: BufferMemory,
        shared: bool,
        sender: MessageSender | None,
        start: StartPoint | None,
        sink: RecordingSink,
    ) -> None:
        super().__init__(me, job, topology, memory, shared, sender, start)
        self._sink, self._encoder = sink, EntryEncoder()
        self._order, self._checks, self._notes = MessageOrder(job), StepChecks(), DecisionNotes()
        self._has_model = False

    def attach(self, extensions: Sequence[ServerExtension]) -> None:
        super().attach((*extensions, self._notes))

    def handle(self, sender: Address, message: m.Message) -> Out:
        # A message that no peer may send changes nothing, and is in no recording.
        self.validator.check(sender, message)
        entry = self._entry(sender, message)
        try:
            return super().handle(sender, message)
        finally:
            self._record(entry)

    def lost(self, worker: Address) -> Out:
        self._checks.forget(worker)
        try:
            return super().lost(worker)
        finally:
            self._record(Arrival(worker, LOST))

    def _entry(self, sender: Address, message: m.Message) -> Entry | None:
        """Return the entry of a message. None: its order does not matter."""
        if not self._order.has_order(sender, message):
            if sender.role is Role.WORKER:
                self._checks.add(sender, message)
            return None
        if sender == self.me:
            return OwnMessage(*m.encode(message))
        checks = self._checks.commit(sender, message) if isinstance(message, m.Commit) else b""
        return Arrival(sender, message.KIND, checks)

    def _record(self, entry: Entry | None) -> None:
        """Write an entry, and what has followed from it."""
        entries: list[Entry] = [] if entry is None else [entry]
        digest = None if self._has_model else model_digest(self)
        if digest is not None:
            self._has_model = True
            entries.append(ModelKnown(digest))
        entries += self._notes.take()
        if entries:
            self._sink.write(b"".join(map(self._encoder.encode, entries)))
