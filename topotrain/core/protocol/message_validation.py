"""Validation of senders and bounds, before a message from a peer is handled.

A peer is trusted to be a member of the job, and nothing else. A message that a correct peer never sends raises
ProtocolError. This ends the connection of that peer and does not affect others. The table here checks addresses and
numbers. Checks that depend on the model (sizes, bitmaps, existing buckets) are made where the model is known.
"""

from collections.abc import Callable, Collection, Mapping
from math import inf
from operator import attrgetter
from typing import Any

from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m

MOST = 1 << 62
"""Bound of numbers. A few additions of smaller numbers still fit into 64 bits on the wire."""
MOST_EPOCHS = 1 << 31  # an epoch and a lease share one 64-bit number of a data stream
MOST_SAMPLES = 1 << 53  # weights are counts, and float64 counts exactly up to here
MAX_KEY = 200  # characters of the name of an entry of optimizer state

_Rule = Callable[[Any], bool]
_Entry = tuple[Collection[Address], _Rule]

TABLE_WORDS = (
    *(m.TableOpen, m.TablePush, m.TableStep, m.TablePull, m.TableAssign, m.TableRule),
    *(m.TableStatsRequest, m.TableBarrier, m.TableList, m.TablesFinished),
)


class MessageValidator:
    """Allowed senders and bounds of the messages to one worker or server.

    Args:
        me: the receiver.
        topology: the job's layout.
        shared: the transports share memory.
    """

    def __init__(self, me: Address, topology: Topology, shared: bool = True) -> None:
        self._me = me
        may = _server_hears(me, topology, shared) if me.role is Role.SERVER else _worker_hears(me, topology)
        groups = frozenset(range(topology.worker_groups))
        if me.role is Role.SERVER and not _is_desk(me):
            groups = frozenset(topology.worker_groups_of(me.group))
        self._table: Mapping[type[m.Message], _Entry] = {
            kind: (
                senders,
                _with_group(_RULES.get(kind, _anything), groups)
                if kind in _ABOUT_GROUPS
                else _RULES.get(kind, _anything),
            )
            for kind, senders in may.items()
            if senders
        }

    def check(self, sender: Address, message: m.Message) -> None:
        """Check a message.

        Raises:
            ProtocolError: this sender never sends such a message here, or not with these numbers.
        """
        senders, holds = self._table.get(type(message), _NONE)
        if sender not in senders:
            raise m.ProtocolError(f"{self._me} does not accept {type(message).__name__} from {sender}")
        if not holds(message):
            raise m.ProtocolError(f"{sender} sent a message with impossible numbers: {repr(message)[:200]}")


def check_bits(bits: bytes, count: int, what: str) -> None:
    """Check a bitmap of `count` items. An empty bitmap means that no item is set.

    Raises:
        ProtocolError: `bits` is not a valid bitmap of `count` items.
    """
    # Unused bits of the last byte must be 0.
    if bits and (len(bits) != (count + 7) // 8 or (count % 8 and bits[-1] >> count % 8)):
        raise m.ProtocolError(f"{what}: a bitmap of {len(bits)} bytes over {count} items")


# --- senders -------------------------------------------------------------------------------------------------------


def _is_desk(me: Address) -> bool:
    return me == (Role.SERVER, 0, 0)


def _server_hears(me: Address, topology: Topology, shared: bool) -> Mapping[type[m.Message], Collection[Address]]:
    def when(condition: bool, senders: frozenset[Address]) -> frozenset[Address]:
        return senders if condition else frozenset()

    leads, desk = me.index == 0, _is_desk(me)
    members = frozenset(w for group in topology.worker_groups_of(me.group) for w in topology.workers(group))
    everybody = frozenset(w for group in range(topology.worker_groups) for w in topology.workers(group))
    main = frozenset({Address(Role.WORKER, 0, 0)})
    twins = frozenset(
        Address(Role.SERVER, group, me.index) for group in range(topology.server_groups) if group != me.group
    )
    first_twin = frozenset({Address(Role.SERVER, 0, me.index)} if me.group else ())
    coordinators = frozenset(
        Address(Role.SERVER, group, 0) for group in range(topology.server_groups) if group != me.group
    )
    shards = frozenset(topology.servers(me.group)) - {me}
    coordinator = frozenset({Address(Role.SERVER, me.group, 0)})
    return {
        m.SchemaPart: members | when(me.group == 0, twins),
        m.SharedBuffer: when(shared, members | when(not leads, coordinator)),
        m.Init: frozenset(topology.workers(0)) if me.group == 0 else first_twin,
        m.Fail: members | twins,
        **dict.fromkeys(
            (m.Fetch, m.Push, m.StepRates, m.BackwardEnd, m.GradientOverride, m.Commit, m.Finish, m.LoopExited), members
        ),
        **dict.fromkeys((m.StateRequest, m.StatePart), members),
        **dict.fromkeys((m.GroupIdle, m.AppliedBatchesRequest), when(leads, members)),
        m.StepCatchUp: when(leads and topology.cluster.backup > 0, members),
        **dict.fromkeys((m.StepVote, m.StepDecisionRequest), when(leads, shards)),
        m.StepDecision: when(not leads, coordinator),
        m.WorkerRejoined: everybody if desk else members,
        m.RestartRequest: when(leads, shards) | when(desk, coordinators),
        m.AppliedBatchesOfStreams: coordinators if desk else when(leads, frozenset({Address(Role.SERVER, 0, 0)})),
        **dict.fromkeys(
            (m.Delta, m.MasterValue, m.RingOffer, m.RingReply, m.Drained, m.Remainder), when(topology.synced, twins)
        ),
        m.FinalValue: when(topology.synced and me.group == 0, twins),
        m.FinalRequest: when(me.group == 0, main),
        m.BufferRequest: when(desk, main),
        **dict.fromkeys(
            (
                m.ModelBufferValue,
                m.LeaseRequest,
                m.LeaseRelease,
                m.DrawRequest,
                m.WorkerStatePart,
                m.WorkerStateRequest,
            ),
            when(desk, everybody),
        ),
        m.DrawnBatches: when(desk, main),
        **dict.fromkeys(
            (m.SnapshotRequest, m.GroupLeaveRequest, m.GroupLeft), when(leads, frozenset({me}))
        ),  # sent by the server's own process in the server's name
        m.SnapshotPart: frozenset({me}) | (shards | when(desk, coordinators) | first_twin if leads else coordinator),
        m.CollectivePart: when(topology.relayed, shards),
        **dict.fromkeys(TABLE_WORDS, everybody),
    }


def _worker_hears(me: Address, topology: Topology) -> Mapping[type[m.Message], Collection[Address]]:
    servers = frozenset(topology.servers(topology.server_group_of(me.group)))
    first = frozenset({topology.servers(topology.server_group_of(me.group))[0]})
    desk = frozenset({Address(Role.SERVER, 0, 0)})
    others = frozenset(topology.workers(me.group)) - {me}
    return {
        **dict.fromkeys(
            (m.Values, m.ReducedGradient, m.BackwardReduced, m.Applied, m.StatePart, *m.TABLE_ANSWERS), servers
        ),
        **dict.fromkeys((m.SharedBuffer, m.GroupIdle, m.AppliedBatchesReply), first),
        m.StepMissed: first if topology.cluster.backup else frozenset(),
        m.StepCaughtUp: servers if topology.cluster.backup else frozenset(),
        **dict.fromkeys((m.Fail, m.WorkerRejoined), servers | desk),
        **dict.fromkeys((m.Lease, m.DrawnBatches, m.WorkerStatePart, m.ModelBufferValue), desk),
        **dict.fromkeys((m.Activation, m.ActivationHello), others),
    }


# --- bounds --------------------------------------------------------------------------------------------------------


def _anything(message: m.Message) -> bool:
    return True


_NONE: _Entry = ((), _anything)


def _with_group(rule: _Rule, groups: Collection[int]) -> _Rule:
    return lambda message: message.group in groups and rule(message)


def _in_bounds(*names: str, below: int = MOST, least: int = 0) -> _Rule:
    get = attrgetter(*names)
    if len(names) == 1:
        return lambda message: bool(least <= get(message) < below)  # type: ignore[operator]

    def rule(message: m.Message) -> bool:
        numbers: tuple[int, ...] = get(message)
        return bool(least <= min(numbers) and max(numbers) < below)

    return rule


def _commit(message: m.Commit) -> bool:
    clips = message.clip_norm > 0
    return (
        0 <= message.step < MOST
        and 0 <= message.backwards < MOST_EPOCHS
        and 0 <= message.weight <= MOST_SAMPLES
        and 0 < message.inv_scale < inf
        and (message.clip_norm == 0 or clips)  # false for NaN
        and (not clips or message.clip_type > 0)
        and 0 <= message.exits < MOST
        and len(message.marks) % 3 == 0
        and (not message.marks or (min(message.marks) >= 0 and max(message.marks) < MOST))
    )


_LEASES = _in_bounds("epoch", "ordinal", below=MOST_EPOCHS)

_ABOUT_GROUPS = (
    m.StepVote,
    m.StepDecision,
    m.RestartRequest,
    m.AppliedBatchesOfStreams,
    m.GroupLeaveRequest,
    m.GroupLeft,
)
"""Messages with a field `group` that must be a group of the receiver."""

_RULES: Mapping[type[m.Message], _Rule] = {
    m.SchemaPart: lambda s: 0 <= s.part < s.parts and len(s.text) <= m.MAX_TEXT // 4,
    m.Fetch: _in_bounds("round"),
    m.Push: lambda p: 0 <= p.weight <= MOST_SAMPLES and p.ordinal >= 0,
    m.BackwardEnd: lambda b: 0 <= b.weight <= MOST_SAMPLES and b.ordinal >= 0 and 0 <= b.exits < MOST,
    m.Commit: _commit,
    m.Finish: _in_bounds("steps"),
    m.LoopExited: _in_bounds("exits", "step", "backwards"),
    m.GroupIdle: _LEASES,
    m.AppliedBatchesRequest: _in_bounds("stream", least=-1),
    m.StepVote: _in_bounds("step", "applied", "incarnation"),
    m.StepDecision: lambda a: 0 <= a.index < MOST and 0 <= a.step < MOST and 0 <= a.change <= 7,
    m.StepDecisionRequest: _in_bounds("index"),
    m.StepMissed: _in_bounds("step"),
    m.StepCatchUp: lambda c: 0 <= c.round < MOST and -1 <= c.through < MOST_EPOCHS and (c.round or c.through >= 0),
    m.StepCaughtUp: _in_bounds("round", "step", "version"),
    m.WorkerRejoined: _in_bounds("incarnation", below=MOST_EPOCHS),
    m.RestartRequest: lambda a: 0 <= a.incarnation < MOST_EPOCHS and -1 <= a.index < MOST_EPOCHS,
    m.GroupLeft: _in_bounds("incarnation", below=MOST_EPOCHS),
    m.AppliedBatchesOfStreams: lambda s: (
        0 <= s.incarnation < MOST_EPOCHS and 0 <= s.part < s.parts < MOST_EPOCHS and len(s.counts) % 2 == 0
    ),
    **dict.fromkeys((m.Delta, m.MasterValue, m.RingOffer, m.RingReply), _in_bounds("sync")),
    m.FinalRequest: _in_bounds("round", least=-MOST),
    m.ModelBufferValue: _in_bounds("index", least=-1),
    m.LeaseRequest: lambda a: _LEASES(a) and -1 <= a.total < MOST and 0 <= a.passed <= a.ordinal,
    m.LeaseRelease: lambda f: _LEASES(f) and 0 <= f.first < MOST,
    m.DrawnBatches: lambda d: 0 <= d.epoch < MOST_EPOCHS and 0 <= d.chunk < MOST,
    m.DrawRequest: lambda d: 0 <= d.epoch < MOST_EPOCHS and 0 <= d.chunk < MOST,
    m.StateRequest: _in_bounds("round"),
    m.StatePart: lambda s: -MOST < s.round < MOST and len(s.key) <= MAX_KEY,
    m.WorkerStatePart: _in_bounds("group", "index", "part", "parts", "nbytes"),
    m.SnapshotPart: _in_bounds("number", "stage", "part", "parts"),
    m.CollectivePart: lambda h: (
        -1 <= h.ordinal < MOST
        and 0 <= h.step < MOST
        and 0 <= h.weight < inf
        and 0 <= h.each < inf
        and 0 <= h.count < MOST
        and -1 <= h.version < MOST
    ),
    **dict.fromkeys((m.TableStep,), _in_bounds("number", "step")),
    m.TableOpen: _in_bounds("number", "table"),
    m.TablePush: _in_bounds("number", "table", "turn"),
    m.TablePull: _in_bounds("number", "table", "round", "seen"),
    m.TableAssign: _in_bounds("number", "table"),
    m.TableRule: _in_bounds("number", "table", "since"),
    m.TableStatsRequest: _in_bounds("number", "table", "round"),
    m.TableBarrier: lambda b: 0 <= b.number < MOST and -MOST < b.round < MOST,
    m.TablesFinished: _in_bounds("number"),
    m.TableList: _in_bounds("number", "table", "round", "first"),
    m.Values: lambda v: v.bucket >= -1,
}
