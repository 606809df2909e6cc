"""Messages about embedding tables (see `table_client`).

In the messages of a worker, `number` counts the worker's messages about tables to this server, from 0. The server
handles them in this order and once. `table` is the worker's own number of a table. `ids` are rows, each 8 bytes
(little-endian), at most MAX_IDS. The body has one row for each of them, and is a snapshot.
"""

from dataclasses import dataclass

from topotrain.core.protocol.message import FROM_SERVER, MOST, Message, Receiver, Route, Sender, message

MAX_IDS = 4096
_ANY_WORKER = Route(Sender.ALL_WORKERS, Receiver.SERVER)


@message(80, _ANY_WORKER, FROM_SERVER)
@dataclass(frozen=True, slots=True)
class TableOpen(Message):
    """Worker -> server: the worker's number of the table of this spec.

    The server echoes the message without the description when the table exists.
    """

    number: int
    table: int
    spec: str

    def is_valid(self) -> bool:
        return 0 <= self.number < MOST and 0 <= self.table < MOST


@message(81, _ANY_WORKER)
@dataclass(frozen=True, slots=True)
class TablePush(Message):
    """Worker -> server: a part of a push. Every server gets one, also without ids.

    turn: the step number, or the index of the push of the table. last: this is the last part of the push.
    """

    number: int
    table: int
    turn: int
    last: bool
    ids: bytes

    def is_valid(self) -> bool:
        return 0 <= self.number < MOST and 0 <= self.table < MOST and 0 <= self.turn < MOST


@message(82, _ANY_WORKER)
@dataclass(frozen=True, slots=True)
class TableStep(Message):
    """Worker -> server: all pushes of this step to tables were sent."""

    number: int
    step: int

    def is_valid(self) -> bool:
        return 0 <= self.number < MOST and 0 <= self.step < MOST


@message(83, _ANY_WORKER)
@dataclass(frozen=True, slots=True)
class TablePull(Message):
    """Worker -> server: request for rows, after `seen` turns are applied."""

    number: int
    table: int
    round: int
    seen: int
    ids: bytes

    def is_valid(self) -> bool:
        numbers = (self.number, self.table, self.round, self.seen)
        return min(numbers) >= 0 and max(numbers) < MOST


@message(84, FROM_SERVER)
@dataclass(frozen=True, slots=True)
class TableRows(Message):
    """Server -> worker: the rows of the pull of this round. Snapshot."""

    round: int


@message(85, _ANY_WORKER)
@dataclass(frozen=True, slots=True)
class TableAssign(Message):
    """Worker -> server: new values of these rows."""

    number: int
    table: int
    ids: bytes

    def is_valid(self) -> bool:
        return 0 <= self.number < MOST and 0 <= self.table < MOST


@message(86, _ANY_WORKER)
@dataclass(frozen=True, slots=True)
class TableRule(Message):
    """Worker -> server: the optimizer of pushes from turn `since` on, as text."""

    number: int
    table: int
    since: int
    optimizer: str

    def is_valid(self) -> bool:
        return 0 <= self.number < MOST and 0 <= self.table < MOST and 0 <= self.since < MOST


@message(87, _ANY_WORKER)
@dataclass(frozen=True, slots=True)
class TableStatsRequest(Message):
    """Worker -> server: request for the size of the table. The reply is TableStats."""

    number: int
    table: int
    round: int

    def is_valid(self) -> bool:
        return 0 <= self.number < MOST and 0 <= self.table < MOST and 0 <= self.round < MOST


@message(88, FROM_SERVER)
@dataclass(frozen=True, slots=True)
class TableStats(Message):
    """Server -> worker: rows on this server, and bytes of values, state and index."""

    round: int
    rows: int
    value_bytes: int
    state_bytes: int
    index_bytes: int


@message(89, _ANY_WORKER, FROM_SERVER)
@dataclass(frozen=True, slots=True)
class TableBarrier(Message):
    """Worker -> server: the worker is at barrier number `round`. Echoed when all are."""

    number: int
    round: int

    def is_valid(self) -> bool:
        # The barrier at the end of all scripts has number -1.
        return 0 <= self.number < MOST and -MOST < self.round < MOST


@message(90, _ANY_WORKER)
@dataclass(frozen=True, slots=True)
class TablesFinished(Message):
    """Worker -> server: the worker sends nothing more about tables."""

    number: int

    def is_valid(self) -> bool:
        return 0 <= self.number < MOST


@message(91, _ANY_WORKER)
@dataclass(frozen=True, slots=True)
class TableList(Message):
    """Worker -> server: request for the rows that exist, from number `first` on."""

    number: int
    table: int
    round: int
    first: int

    def is_valid(self) -> bool:
        numbers = (self.number, self.table, self.round, self.first)
        return min(numbers) >= 0 and max(numbers) < MOST


@message(92, FROM_SERVER)
@dataclass(frozen=True, slots=True)
class TableIds(Message):
    """Server -> worker: rows in the order of first use. Fewer than MAX_IDS at the end."""

    round: int
    ids: bytes


TABLE_REQUESTS = (
    *(TableOpen, TablePush, TableStep, TablePull, TableAssign, TableRule),
    *(TableStatsRequest, TableBarrier, TableList, TablesFinished),
)
"""Messages that a server accepts about tables."""
TABLE_REPLIES = (TableOpen, TableRows, TableStats, TableBarrier, TableIds)
"""Messages that a server sends about tables."""
