"""A server that handles messages in a recorded order.

It holds messages that come too early.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.model.schema import BufferMemory
from topotrain.core.server.server import Server
from topotrain.core.server.server_context import Out, StartPoint
from topotrain.core.server.server_extension import ServerExtension
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.decision_record.order_entries import LOST, Arrival, OwnMessage
from topotrain.extensions.decision_record.ordered_messages import MessageOrder, StepChecks, is_aside
from topotrain.extensions.decision_record.recording_server import model_digest
from topotrain.extensions.decision_record.replay_order import ReplayOrder, words_of, words_of_note
from topotrain.extensions.decision_record.server_order import DecisionNotes, VersionObserver

CHANCE = "the script computes something else (chance without a seed, a clock, other data, another machine)"


class ReplayObserver(ABC):
    """Is told by a server how far its replay is."""

    @abstractmethod
    def on_whole_life(self, server: Server, worker: Address, life: int) -> None:
        """The server has all messages of a process that the recording has seen die."""

    @abstractmethod
    def on_version(self, server: Server, version: int) -> None:
        """The values of the server have the version now at which the replay is to stop."""

    @abstractmethod
    def on_end(self, server: Server) -> None:
        """The recording of a job that was interrupted ends here."""

    @abstractmethod
    def on_difference(self, server: Server, text: str) -> None:
        """The program does not do what the recording has, and the server stops."""


class _Lost:
    """In the place of a message: the process of the worker is gone."""


_LOST = _Lost()


def _with_own_body(message: m.Message) -> m.Message:
    """Return a message with a body that nothing else writes."""
    # The body of a shared buffer is the memory itself, which a copy would not be.
    if message.body is None or isinstance(message, m.SharedBuffer):
        return message
    return replace(message, body=message.body.clone())


class _LastVersion(VersionObserver):
    """Tells a server that it has the last version of its replay."""

    def __init__(self, server: "ReplayedServer", until: int) -> None:
        self._server, self._until = server, until

    def on_version(self, version: int) -> None:
        if version == self._until:
            self._server.reached(version)


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """The part of a recording that a server replays.

    Attributes:
        order: the recorded order.
        observer: is told how far the replay is.
        until: the version at which the replay stops. None: at the end.
    """

    order: ReplayOrder
    observer: ReplayObserver
    until: int | None = None


class ReplayedServer(Server):
    """A server that makes the decisions of a recording again.

    Messages of one sender keep their order. One that has no order is handled as soon as none of its sender is held.
    The server goes on behind its last version: another server may need a worker that waits for this one to reach its
    own.

    Args:
        me, job, topology, memory, shared, sender, start: as for `Server`.
        task: the part of the recording.
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
        task: ReplayTask,
    ) -> None:
        super().__init__(me, job, topology, memory, shared, sender, start)
        self._recorded, self._observer = task.order, task.observer
        self._order, self._checks = MessageOrder(job), StepChecks()
        self._notes = DecisionNotes(None if task.until is None else _LastVersion(self, task.until))
        self._boxes: dict[tuple[Address, bool], deque[m.Message | _Lost]] = {}  # sender, and whether `is_aside`
        self._received: dict[Address, tuple[int, int]] = {}  # worker -> its process, and the messages of that one
        self._steps: dict[Address, int] = {}
        self._has_model = self._begun = False
        self._differs = False
        self._told = False  # the observer knows how the replay has ended

    def attach(self, extensions: Sequence[ServerExtension]) -> None:
        super().attach((*extensions, self._notes))

    # --- what arrives --------------------------------------------------------------------------------------------

    def handle(self, sender: Address, message: m.Message) -> Out:
        """As `Server.handle`, as soon as it is the turn of the message."""
        self.validator.check(sender, message)
        if self._differs:
            return []
        self._begin()
        if sender == self.me:
            # The recording has what timers and the launcher have sent, and when.
            timed = self._order.has_order(sender, message) and not self._over
            return [] if timed else super().handle(sender, message)
        aside = is_aside(message.KIND)
        if self._order.has_order(sender, message) and not aside:
            # In the recording the process was dead by now.
            if self._is_whole(sender):
                return []
            self._count(sender)
        box = self._boxes.setdefault((sender, aside), deque())
        box.append(message)
        out = self._advance(sender)
        # It has to wait. Its body may be in a buffer that the next message of its sender overwrites.
        if box and box[-1] is message:
            box[-1] = _with_own_body(message)
        return out

    def lost(self, worker: Address) -> Out:
        """As `Server.lost`, in its turn."""
        if self._differs:
            return []
        self._boxes.setdefault((worker, False), deque()).append(_LOST)
        life, _ = self._received.get(worker, (0, 0))
        self._received[worker] = life + 1, 0
        self._tell_of_life(worker)
        return self._advance(worker)

    def _begin(self) -> None:
        """Tell of processes that the recording has seen die before their first message."""
        if not self._begun:
            self._begun = True
            for worker in self._recorded.lives:
                self._tell_of_life(worker)

    def _count(self, sender: Address) -> None:
        life, messages = self._received.get(sender, (0, 0))
        self._received[sender] = life, messages + 1
        self._tell_of_life(sender)

    def _is_whole(self, worker: Address) -> bool:
        """Whether all recorded messages of a worker's present process have arrived.

        False for a process that the recording has not seen die before the end of its script.
        """
        life, messages = self._received.get(worker, (0, 0))
        recorded = self._recorded.life(worker, life)
        return recorded is not None and recorded.messages == messages

    def _tell_of_life(self, worker: Address) -> None:
        if self._is_whole(worker):
            self._observer.on_whole_life(self, worker, self._received.get(worker, (0, 0))[0])

    # --- in the recorded order -----------------------------------------------------------------------------------

    @property
    def _over(self) -> bool:
        """Whether the recorded job had nothing more to decide."""
        return self._recorded.next is None and self._recorded.whole

    def _advance(self, sender: Address) -> Out:
        """Handle what may be handled now that something of a sender has arrived."""
        out = self._handle_free(sender)
        while not self._differs and not self._over:
            entry = self._recorded.next
            if entry is None:
                if self._tell():
                    self._observer.on_end(self)
                break
            if isinstance(entry, OwnMessage):
                self._recorded.advance()
                out += self._carry(self.me, m.decode(entry.kind, entry.meta))
            elif not (box := self._boxes.get((entry.sender, is_aside(entry.kind)))):
                break
            else:
                message = box.popleft()
                if self._is_recorded(entry, message):
                    self._recorded.advance()
                    out += self._carry(entry.sender, message)
                    out += self._handle_free(entry.sender)
        if self._over:
            for each, _ in sorted(self._boxes):
                out += self._handle_free(each)
        return out

    def _handle_free(self, sender: Address) -> Out:
        """Handle the first messages of a sender that have no order."""
        out: Out = []
        for box in (self._boxes.get((sender, aside)) for aside in (False, True)):
            while box and not self._differs and (self._over or not self._ordered(sender, box[0])):
                out += self._carry(sender, box.popleft())
        return out

    def _ordered(self, sender: Address, message: m.Message | _Lost) -> bool:
        return isinstance(message, _Lost) or self._order.has_order(sender, message)

    def _carry(self, sender: Address, message: m.Message | _Lost) -> Out:
        """Handle a message now, and compare what has followed."""
        try:
            if isinstance(message, _Lost):
                self._checks.forget(sender)
                out = super().lost(sender)
            else:
                if sender.role is Role.WORKER and not self._order.has_order(sender, message):
                    self._checks.add(sender, message)
                    # Its gradient may be in its own memory, and it is killed before the turn of its commit.
                    life, _ = self._received.get(sender, (0, 0))
                    if self._recorded.life(sender, life) is not None:
                        message = _with_own_body(message)
                out = super().handle(sender, message)
        except m.ProtocolError as error:
            # It may be from another sender than the message that has just come.
            self._differ(f"{sender}: {error}")
            return []
        # A list of the queue, which it uses again.
        made = list(out)
        self._compare()
        return made

    # --- comparing -----------------------------------------------------------------------------------------------

    def _is_recorded(self, entry: Arrival, message: m.Message | _Lost) -> bool:
        """Whether the recording has this message. Otherwise the server stops."""
        sender = entry.sender
        kind = LOST if isinstance(message, _Lost) else message.KIND
        step = message.step if isinstance(message, m.Commit) else self._steps.get(sender, 0)
        where = f"step {step + 1} of {sender}"
        if kind != entry.kind:
            self._differ(f"{where}: the recording has {words_of(entry.kind)}, and {words_of(kind)} came")
        elif isinstance(message, m.Commit):
            self._steps[sender] = step + 1
            found = self._checks.commit(sender, message)
            if found[:1] != entry.checks[:1]:
                what = "batches, weight or hyper-parameters"
                self._differ(f"{where}: {what} with check {entry.checks[0]:02x} are recorded, {found[0]:02x} came")
            elif found != entry.checks:
                what = f"a gradient with check {entry.checks[1]:02x} is recorded, {found[1]:02x} came"
                self._differ(f"{where}: {what}: {CHANCE}")
        return not self._differs

    def _compare(self) -> None:
        """Compare what has followed from the last message."""
        digest = None if self._has_model else model_digest(self)
        if digest is not None:
            self._has_model = True
            if digest != self._recorded.model:
                self._differ("the recording is of another model, or of another optimizer, than the program's")
        for note in self._notes.take():
            expected = self._recorded.expect()
            # Behind the end of an interrupted recording nothing is known.
            if expected != note and not (expected is None and not self._recorded.whole):
                wanted = "nothing more" if expected is None else words_of_note(expected)
                self._differ(f"{self.me}: the recording has that {wanted}, and now {words_of_note(note)}")

    def reached(self, version: int) -> None:
        """The values have the last version of the replay."""
        if self._tell():
            self._observer.on_version(self, version)

    def _differ(self, text: str) -> None:
        self._differs = True
        if self._tell():
            self._observer.on_difference(self, text)

    def _tell(self) -> bool:
        """Whether the observer is to be told now how the replay has ended, once."""
        told, self._told = self._told, True
        return not told
