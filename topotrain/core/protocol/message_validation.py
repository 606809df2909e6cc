"""Validation of senders and bounds, before a message from a peer is handled.

A peer is trusted to be a member of the job, and nothing else. A message that a correct peer never sends raises
ProtocolError. This ends the connection of that peer and does not affect others. The routes and bounds of a message are
declared at its class. Checks that depend on the model (sizes, bitmaps, existing buckets) are made where the model is
known.
"""

from collections.abc import Sequence

from topotrain.config.topology import Address, Role, Topology
from topotrain.core.protocol.message import Condition, Message, ProtocolError, Receiver, Sender

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
        """Check a message.

        Raises:
            ProtocolError: this sender never sends such a message here, or not with these numbers.
        """
        senders, groups = self._entries.get(type(message)) or self._entry(type(message))
        if sender not in senders:
            raise ProtocolError(f"{self._me} does not accept {type(message).__name__} from {sender}")
        if not message.is_valid() or (groups is not None and message.group not in groups):  # type: ignore[attr-defined]
            raise ProtocolError(f"{sender} sent a message with impossible numbers: {repr(message)[:200]}")

    def senders(self, kind: type[Message]) -> frozenset[Address]:
        """Return the addresses that may send messages of this type; none if it is empty."""
        return (self._entries.get(kind) or self._entry(kind))[0]

    def _entry(self, kind: type[Message]) -> _Entry:
        """Make the entry of a message type.

        It is made at the first message of the type, because the module of an extension may be imported late.
        """
        found = [
            self._peers(route.sender)
            for route in kind.ROUTES
            if route.receiver in self._roles() and self._holds(route.when)
        ]
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
                return self._topology.relayed
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
        if me.role is Role.SERVER and me != (Role.SERVER, 0, 0):
            return frozenset(topology.worker_groups_of(me.group))
        return frozenset(range(topology.worker_groups))


def check_bits(bits: bytes, count: int, what: str) -> None:
    """Check a bitmap of `count` items. An empty bitmap means that no item is set.

    Raises:
        ProtocolError: `bits` is not a valid bitmap of `count` items.
    """
    # Unused bits of the last byte must be 0.
    if bits and (len(bits) != (count + 7) // 8 or (count % 8 and bits[-1] >> count % 8)):
        raise ProtocolError(f"{what}: a bitmap of {len(bits)} bytes over {count} items")
