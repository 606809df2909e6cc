"""Base class, registry and validation of messages.

A message class declares its number on the wire, its routes (sender and receiver), and the bounds of its numbers. It is
registered when its module is imported, so the core names no extension, and a process can decode only messages of
modules that it has imported.

A peer is trusted to be a member of the job, and nothing else. A message that a correct peer never sends raises
ProtocolError. This ends the connection of that peer and does not affect others. `MessageValidator` makes the checks
that need only the layout of the job. Checks that depend on the model (sizes, bitmaps, existing buckets) are made where
the model is known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar, TypeVar

from topotrain.config.topology import Address, Role, Topology
from topotrain.core.message_limits import ProtocolError as ProtocolError

if TYPE_CHECKING:
    import torch

MOST = 1 << 62
"""Bound of numbers. A few additions of smaller numbers still fit into 64 bits on the wire."""
MOST_EPOCHS = 1 << 31  # an epoch and a lease share one 64-bit number of a data stream
MOST_SAMPLES = 1 << 53  # weights are counts, and float64 counts exactly up to here


class Sender(Enum):
    """The endpoints that may send a message, relative to its receiver.

    Only SELF includes the receiver.
    """

    GROUP_WORKERS = auto()
    """Workers of the worker groups that a server serves, and the other workers of a worker's group."""
    FIRST_GROUP_WORKERS = auto()
    """Workers of worker group 0."""
    ALL_WORKERS = auto()
    MAIN_WORKER = auto()
    """Worker (0,0)."""
    GROUP_SERVERS = auto()
    """Servers of the receiver's server group, which are a worker's servers."""
    COORDINATOR = auto()
    """The first of them."""
    COORDINATORS = auto()
    """The first servers of all other server groups."""
    SAME_SHARD = auto()
    """Servers of the same shard in other server groups."""
    FIRST_SAME_SHARD = auto()
    """Server of the same shard in server group 0."""
    DATA_SERVICE = auto()
    """Server (0,0)."""
    SELF = auto()
    """The receiver's own process, in the receiver's name."""


class Receiver(Enum):
    """The endpoints that accept a message."""

    WORKER = auto()
    SERVER = auto()
    COORDINATOR = auto()
    """The first server of each server group."""
    SHARD = auto()
    """All other servers of a group."""
    FIRST_GROUP = auto()
    """Servers of server group 0."""
    LATER_GROUP = auto()
    """Servers of all other server groups."""
    DATA_SERVICE = auto()
    """Server (0,0)."""


class Condition(Enum):
    """The jobs in which a message is sent."""

    ALWAYS = auto()
    SERVER_GROUPS = auto()
    """There are several server groups."""
    BACKUP_WORKERS = auto()
    SHARED_MEMORY = auto()
    """The transports share memory."""
    SERVER_COLLECTIVE = auto()
    """Gradients are summed on their way from server to server."""


@dataclass(frozen=True, slots=True)
class Route:
    """One way on which a message is sent: its sender, its receiver, and the jobs."""

    sender: Sender
    receiver: Receiver
    when: Condition = Condition.ALWAYS


TO_SERVER = Route(Sender.GROUP_WORKERS, Receiver.SERVER)
TO_COORDINATOR = Route(Sender.GROUP_WORKERS, Receiver.COORDINATOR)
TO_DATA_SERVICE = Route(Sender.ALL_WORKERS, Receiver.DATA_SERVICE)
FROM_SERVER = Route(Sender.GROUP_SERVERS, Receiver.WORKER)
FROM_COORDINATOR = Route(Sender.COORDINATOR, Receiver.WORKER)
FROM_DATA_SERVICE = Route(Sender.DATA_SERVICE, Receiver.WORKER)
"""The routes between workers and servers, as a worker sees them."""


@dataclass(frozen=True, slots=True)
class Message:
    """Base class of all messages. `body` is 1-D and contiguous, or None.

    Attributes:
        KIND: the number of the type on the wire.
        ROUTES: the ways on which the message is sent. Empty: only the replication channel, or another unit, accepts it.
        NAMES_GROUP: the field `group` must be a worker group of the receiver.
        HANDLED, SENT: the names of the spans in which a server handles and sends the message.
    """

    KIND: ClassVar[int] = 0
    ROUTES: ClassVar[tuple[Route, ...]] = ()
    NAMES_GROUP: ClassVar[bool] = False
    HANDLED: ClassVar[str] = "handle"
    SENT: ClassVar[str] = "send"
    body: "torch.Tensor | None" = field(default=None, compare=False, repr=False, kw_only=True)

    def is_valid(self) -> bool:
        """Return whether the numbers are possible, as far as this needs no model."""
        return True

    def receive(self, body: "torch.Tensor") -> None:
        """Set the body; only a transport calls this, with a message that it has decoded."""
        # In place: a second message object costs as much as all the rest of the transport's work on a frame.
        object.__setattr__(self, "body", body)


KINDS: dict[int, type[Message]] = {}
"""All messages of the modules that this process has imported, by number."""

_M = TypeVar("_M", bound=Message)


def message(
    number: int, *routes: Route, names_group: bool = False, handled: str = "handle", sent: str = "send"
) -> Callable[[type[_M]], type[_M]]:
    """Register a message class. Its number must never change.

    The arguments are described at `Message`.

    Raises:
        ValueError: another class has this number.
    """

    def register(cls: type[_M]) -> type[_M]:
        other = KINDS.setdefault(number, cls)
        # At import, and not at the first message: two extensions must not share a number by chance.
        if other is not cls:
            raise ValueError(f"message number {number} of {_full_name(cls)} belongs to {_full_name(other)}")
        cls.KIND, cls.ROUTES, cls.NAMES_GROUP = number, routes, names_group
        cls.HANDLED, cls.SENT = handled, sent
        return cls

    return register


def _full_name(cls: type[Message]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def kind_of(number: int) -> type[Message]:
    """Return the class of a type number. Raises ProtocolError if there is none."""
    cls = KINDS.get(number)
    if cls is None:
        raise ProtocolError(f"unknown message type {number}")
    return cls


_Entry = tuple[frozenset[Address], frozenset[int] | None]
"""The addresses that may send a message, and the groups that it may name, if it names one."""


class MessageValidator:
    """Allowed senders and bounds of the messages to one worker or server.

    Args:
        me: the receiver.
        topology: the job's layout.
        shared: the transports share memory.
    """

    def __init__(self, me: Address, topology: Topology, shared: bool = True) -> None:
        self._me = me
        self._topology = topology
        self._shared = shared
        self._entries: dict[type[Message], _Entry] = {}

    def check(self, sender: Address, message: Message) -> None:
        """Raise ProtocolError for a message that this sender never sends here."""
        senders, groups = self._entries.get(type(message)) or self._entry(type(message))
        if sender not in senders:
            raise ProtocolError(f"{self._me} does not accept {type(message).__name__} from {sender}")
        if not message.is_valid() or (groups is not None and message.group not in groups):  # type: ignore[attr-defined]
            raise ProtocolError(f"{sender} sent a message with impossible numbers: {repr(message)[:200]}")

    def senders(self, kind: type[Message]) -> frozenset[Address]:
        """Return the addresses that may send messages of this type; none if it is empty."""
        return (self._entries.get(kind) or self._entry(kind))[0]

    def _entry(self, kind: type[Message]) -> _Entry:
        """Make the entry of a message type."""
        # At the first message of the type, because the module of an extension may be imported late.
        found = [
            self._peers(route.sender)
            for route in kind.ROUTES
            if route.receiver in self._roles() and self._holds(route.when)
        ]
        # Without a route from anyone the set is empty, and every such message is refused.
        entry = frozenset[Address]().union(*found), self._groups() if kind.NAMES_GROUP else None
        self._entries[kind] = entry
        return entry

    def _roles(self) -> set[Receiver]:
        """Return everything that the receiver is."""
        me = self._me
        if me.role is not Role.SERVER:
            return {Receiver.WORKER}
        return {
            Receiver.SERVER,
            Receiver.SHARD if me.index else Receiver.COORDINATOR,
            Receiver.LATER_GROUP if me.group else Receiver.FIRST_GROUP,
            *((Receiver.DATA_SERVICE,) if me == (Role.SERVER, 0, 0) else ()),
        }

    def _holds(self, condition: Condition) -> bool:
        match condition:
            case Condition.SERVER_GROUPS:
                return self._topology.synced
            case Condition.BACKUP_WORKERS:
                return self._topology.cluster.backup > 0
            case Condition.SHARED_MEMORY:
                return self._shared
            case Condition.SERVER_COLLECTIVE:
                return self._topology.server_collective
        return True

    def _peers(self, sender: Sender) -> frozenset[Address]:
        if sender is Sender.SELF:
            return frozenset({self._me})
        return frozenset(self._addresses(sender)) - {self._me}

    def _addresses(self, sender: Sender) -> list[Address]:
        me, topology = self._me, self._topology
        group = topology.server_group_of(me.group) if me.role is Role.WORKER else me.group
        other_groups = [number for number in range(topology.server_groups) if number != group]
        match sender:
            case Sender.GROUP_WORKERS:
                return self._workers((me.group,) if me.role is Role.WORKER else topology.worker_groups_of(me.group))
            case Sender.FIRST_GROUP_WORKERS:
                return self._workers((0,))
            case Sender.ALL_WORKERS:
                return self._workers(range(topology.worker_groups))
            case Sender.MAIN_WORKER:
                return [Address(Role.WORKER, 0, 0)]
            case Sender.GROUP_SERVERS:
                return list(topology.servers(group))
            case Sender.COORDINATOR:
                return [Address(Role.SERVER, group, 0)]
            case Sender.COORDINATORS:
                return [Address(Role.SERVER, other, 0) for other in other_groups]
            case Sender.SAME_SHARD:
                return [Address(Role.SERVER, other, me.index) for other in other_groups]
            case Sender.FIRST_SAME_SHARD:
                return [Address(Role.SERVER, 0, me.index)]
        return [Address(Role.SERVER, 0, 0)]

    def _workers(self, groups: Sequence[int]) -> list[Address]:
        return [worker for group in groups for worker in self._topology.workers(group)]

    def _groups(self) -> frozenset[int]:
        """Return the groups that a message may name."""
        me, topology = self._me, self._topology
        # Server (0,0) has the leases and model buffers of all worker groups.
        if me.role is Role.SERVER and me != (Role.SERVER, 0, 0):
            return frozenset(topology.worker_groups_of(me.group))
        return frozenset(range(topology.worker_groups))
