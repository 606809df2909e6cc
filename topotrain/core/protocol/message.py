"""Base class and registry of messages.

A message class declares everything that the protocol needs to know about it where it is defined: its number on the
wire, its routes (sender and receiver), and the bounds of its numbers. A package registers its messages when its module
of messages is imported, so the core names no extension. A process can decode only messages of modules that it has
imported.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar, TypeVar

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
        """Return whether the numbers are possible.

        Checks that need the model are made where the model is known.
        """
        return True


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
        if other is not cls:
            raise ValueError(f"message number {number} of {_full_name(cls)} belongs to {_full_name(other)}")
        cls.KIND, cls.ROUTES, cls.NAMES_GROUP = number, routes, names_group
        cls.HANDLED, cls.SENT = handled, sent
        return cls

    return register


def _full_name(cls: type[Message]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def kind_of(number: int) -> type[Message]:
    """Return the class of a type number.

    Raises:
        ProtocolError: there is no such type.
    """
    cls = KINDS.get(number)
    if cls is None:
        raise ProtocolError(f"unknown message type {number}")
    return cls
