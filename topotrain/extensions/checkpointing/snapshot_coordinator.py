"""How the shards of a server group take a snapshot together: who says what to whom, until it is on disk.

    host          SnapshotAsk   -> coordinator   it is time
    coordinator   Apply(change) -> shards        after the next step that is decided, freeze
    shard         FROZEN        -> coordinator   what my optimizer holds
    coordinator   LAYOUT        -> shards        what it holds in all: now everybody knows the place of each element
    shard's host  WRITTEN       -> coordinator   my elements are on disk, with these checksums
    coordinator's host PUBLISHED                 the manifest is there: the snapshot counts

Several server groups do that together (`cross_group_cut`): the first coordinator tells the others that it is time
(CUT), they announce it to their shards, and pass on what is said in both directions.

Rule: one at a time, since memory is kept for one. Whatever goes wrong on the way ends this snapshot and nothing else:
every shard is heard first, then the part of it that is on disk is dropped, and the one before it stays.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from topotrain.config.topology import Address
from topotrain.core.optim.state_table import StateError, Table, from_rows, merge, to_rows
from topotrain.core.protocol import MAX_TEXT, Message, ProtocolError
from topotrain.core.server.component_state import State, field_values
from topotrain.extensions.checkpointing.data_position import STATIC, DataPosition
from topotrain.extensions.checkpointing.shard_snapshot import FrozenShard
from topotrain.extensions.checkpointing.snapshot_messages import SnapshotPart

FROZEN, LAYOUT, WRITTEN, PUBLISHED, CUT = 0, 1, 2, 3, 4
"""SnapshotPart.stage."""

TIME, STEP, END = "time", "step", "end"
"""Why a snapshot is taken: seconds have passed, or steps, or the job is to end."""

MOST_PARTS = 4096
_PART = MAX_TEXT // 4
_MOST_OPEN = 4096  # things to say of which some parts have not come
Out = list[tuple[Address, Message]]


@dataclass(frozen=True, slots=True)
class WriteSnapshot:
    """To a host: write this server's elements; answered by WRITTEN."""

    number: int
    server: Address
    frozen: FrozenShard
    table: Table


@dataclass(frozen=True, slots=True)
class PublishSnapshot:
    """To the coordinator's host: every element is on disk, make it count; answered by PUBLISHED.

    facts: what the manifest says besides. written: what each shard's host answered. why: one of the reasons below.
    """

    number: int
    why: str
    facts: Mapping[str, Any]
    written: tuple[Mapping[str, Any], ...]
    deposits: Mapping[Address, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    """To the coordinator's host: this snapshot has come to nothing, for this reason.

    number: 0 where none was begun, since none can be taken.
    """

    number: int
    why: str


Work = Callable[[WriteSnapshot | PublishSnapshot | DropSnapshot], None]


def texts(number: int, stage: int, data: Mapping[str, Any]) -> list[SnapshotPart]:
    """Data as messages."""
    text = json.dumps(data, separators=(",", ":"))
    cuts = [text[i : i + _PART] for i in range(0, len(text), _PART)]
    return [SnapshotPart(number, stage, i, len(cuts), cut) for i, cut in enumerate(cuts)]


class TextParts:
    """Puts the parts of such data together, in whatever order they come."""

    def __init__(self) -> None:
        self._parts: dict[tuple[Address, int, int], dict[int, str]] = {}

    def take(self, sender: Address, message: SnapshotPart) -> dict[str, Any] | None:
        """Keep a part; the data with the last one. Raises ProtocolError."""
        if not 0 <= message.part < message.parts <= MOST_PARTS:
            raise ProtocolError(f"part {message.part} of {message.parts} about a snapshot")
        key = (sender, message.number, message.stage)
        if key not in self._parts and len(self._parts) >= _MOST_OPEN:
            raise ProtocolError(f"{sender} says much about snapshots, and nothing to its end")
        parts = self._parts.setdefault(key, {})
        parts[message.part] = message.text
        if len(parts) < message.parts:
            return None
        del self._parts[key]
        try:
            data = json.loads("".join(parts[i] for i in range(message.parts)))
        except (ValueError, KeyError, RecursionError) as error:
            raise ProtocolError(f"not about a snapshot: {error}") from error
        if not isinstance(data, dict):
            raise ProtocolError("not about a snapshot")
        return data

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {"parts": self._parts}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._parts = {key: dict(parts) for key, parts in state["parts"].items()}


@dataclass(slots=True)
class _UnderWay:
    """A snapshot that has been announced. `counts` are those of the data streams when it was frozen."""

    number: int
    reason: str = TIME
    facts: dict[str, Any] = field(default_factory=dict)
    counts: Mapping[int, int] = field(default_factory=dict)
    told: dict[Address, Mapping[str, Any]] = field(default_factory=dict)
    written: dict[Address, Mapping[str, Any]] = field(default_factory=dict)
    laid_out: bool = False
    publishing: bool = False
    why: str = ""


class SnapshotCoordinator:
    """The coordinator's side.

    Args:
        servers: the shards, in order, of all groups that take snapshots together.
        position: which batches are where.
        work: the host's; told what to do with files.
    """

    def __init__(self, servers: tuple[Address, ...], position: DataPosition, work: Work) -> None:
        self._servers = servers
        group = servers[0].group
        self._near = [server for server in servers if server.group == group or server.index == 0]
        self._others = [server for server in self._near if server.group != group]
        self._work = work
        self.position = position
        self.next = 1
        self._now: _UnderWay | None = None

    @property
    def number(self) -> int:
        """Of the snapshot that is under way; 0: none is."""
        return 0 if self._now is None else self._now.number

    @property
    def publishing(self) -> bool:
        """Whether the coordinator's host is about to let one count."""
        return self._now is not None and self._now.publishing

    def begin(self, why: str = TIME) -> int:
        """Start one; its number, or 0 where another is not over yet."""
        if self._now is not None:
            return 0
        self._now = _UnderWay(self.next, why)
        self.next += 1
        return self._now.number

    def cut(self, number: int) -> Out:
        """Let the other groups freeze, too."""
        return [(other, part) for other in self._others for part in texts(number, CUT, {})]

    def frozen(self, number: int, facts: Mapping[str, Any], counts: Mapping[int, int]) -> None:
        """The coordinator's own shard is frozen; the others are at the same decision."""
        if self._now is not None and self._now.number == number:
            self._now.facts, self._now.counts = dict(facts), counts

    def take(self, shard: Address, number: int, stage: int, data: Mapping[str, Any], frozen: FrozenShard | None) -> Out:
        """What a server, or this host, says; returns what to send. `frozen`: the coordinator's own part."""
        now = self._now
        if now is None or now.number != number:
            return []
        if stage == PUBLISHED:
            self._now = None
            return []
        if now.publishing:
            return []  # said again by the second copy of a shard whose host has written it
        if data.get("error"):
            now.why = now.why or str(data["error"])
        if stage == WRITTEN:
            now.written[shard] = data
            self._end_if_failed(now)
            return []
        return self._described(now, shard, data, frozen)

    def _described(self, now: _UnderWay, shard: Address, data: Mapping[str, Any], frozen: FrozenShard | None) -> Out:
        now.told[shard] = data
        if len(now.told) < len(self._servers) or now.laid_out:
            return []
        now.laid_out = True  # the coordinator's own part is one of them, so it is frozen
        merged: Table = {}
        if frozen is not None and not now.why:
            known = frozen.parameters
            try:
                merged = merge((from_rows(told.get("rows"), known) for told in now.told.values()), known)
            except StateError as error:
                now.why = str(error)
        rows = to_rows(merged)
        now.facts["optimizer"] = rows
        for told in now.told.values() if self._others else ():
            _add_facts(now, told.get("facts"))
        self.position.close(min((epoch for _, epoch in now.facts.get("reads", ())), default=0))
        now.facts["closed"] = self.position.closed
        layout = {"rows": rows, "error": now.why, "closed": self.position.closed}
        return [(server, part) for server in self._near for part in texts(now.number, LAYOUT, layout)]

    def _end_if_failed(self, now: _UnderWay) -> None:
        if now.why and len(now.written) == len(self._servers):
            self._drop(now, now.why)

    def _drop(self, now: _UnderWay, why: str) -> None:
        self._now = None
        self._work(DropSnapshot(now.number, why))

    def give_up(self, why: str) -> bool:
        """Drop what waits for nothing but the workers; False: there is no such snapshot."""
        now = self._now
        if now is None or now.publishing or len(now.written) < len(self._servers):
            return False
        self._drop(now, why)
        return True

    def abandon(self, why: str) -> str:
        """The state of some worker never comes: drop the snapshot once nobody writes at it. Returns its reason."""
        now = self._now
        if now is None or now.publishing:
            return ""
        now.why = now.why or why
        self._end_if_failed(now)
        return now.reason

    def ended(self) -> set[tuple[int, int]]:
        """Workers of other server groups whose scripts had come to their ends, as (group, index)."""
        return set() if self._now is None else {tuple(each) for each in self._now.facts.get("ended", ())}

    def missing(self, expected: Iterable[Address], taken: Mapping[Address, torch.Tensor]) -> set[Address]:
        """Workers whose state at this snapshot is not here yet; nobody's while shards are being written."""
        now = self._now
        if now is None or now.publishing or len(now.written) < len(self._servers):
            return set()
        return set(expected) - taken.keys()

    def publish(self, deposits: Mapping[Address, torch.Tensor], counts: Mapping[int, int], exact: bool) -> None:
        """Everything that was waited for is here. `counts`: of the streams now; exact: nobody's state is older."""
        now = self._now
        if now is None or now.publishing or len(now.written) < len(self._servers):
            return
        now.publishing = True
        since = [stream >> 32 for stream, count in counts.items() if count > now.counts.get(stream, 0)]
        reading = dict(now.facts.get("reading", ())).values()  # the epoch in which each group was then, or before it
        if self._others:  # what those groups have applied since is not known here
            since, exact = list(reading), False
        elif len(reading) > 1 and any(stream & STATIC for stream in counts):
            since += reading  # nobody waits at the end of an epoch for a group that reads its part of it, or has died
        first = min(since, default=None)
        applied = self.position.applied(now.counts)
        if first is not None and exact:
            self.position.close(first)
        facts = {**now.facts, "first_epoch": first, "epochs": [[e, list(map(list, r))] for e, r in applied.items()]}
        written = tuple(now.written[server] for server in self._servers)
        self._work(PublishSnapshot(now.number, now.reason, facts, written, dict(deposits)))

    def state_dict(self) -> State:
        """Return the state without `position`, see `component_state`."""
        return {"next": self.next, "now": None if self._now is None else field_values(self._now)}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self.next, now = state["next"], state["now"]
        self._now = None if now is None else _UnderWay(*now)


def _add_facts(now: _UnderWay, facts: Any) -> None:
    """What the coordinator of another group says of its moment; shards have nothing to say."""
    if not facts:
        return
    for name in ("steps", "clocks", "reading", "reads", "samples", "ended"):
        now.facts[name] = sorted([*map(list, now.facts.get(name, ())), *facts[name]])
    now.facts["version"] += facts["version"]
    now.counts = {**now.counts, **dict(facts["counts"])}
