"""Tables (see `table_client`).

`number` counts what one worker says to one server about tables, from 0: the server takes it in this order and once,
whatever the road does. `table` is the worker's own number for a table. `ids` are rows, each 8 bytes (little-endian),
at most MAX_IDS; the body has one row for each of them, and is a snapshot.
"""

from dataclasses import dataclass

from topotrain.core.protocol.codec import Message, numbered

MAX_IDS = 4096


@numbered(80)
@dataclass(frozen=True, slots=True)
class TableOpen(Message):
    """Worker -> server: my table number `table` is the one of this description; echoed (without it) when it is made."""

    number: int
    table: int
    spec: str


@numbered(81)
@dataclass(frozen=True, slots=True)
class TablePush(Message):
    """Worker -> server: a part of a push. turn: the step, or the how-manieth push of the table; last: it is complete.

    A push is told to every server, without ids where it has no rows: all count the same pushes.
    """

    number: int
    table: int
    turn: int
    last: bool
    ids: bytes


@numbered(82)
@dataclass(frozen=True, slots=True)
class TableStep(Message):
    """Worker -> server: all that I push to the tables of this step has been sent."""

    number: int
    step: int


@numbered(83)
@dataclass(frozen=True, slots=True)
class TablePull(Message):
    """Worker -> server: send me these rows, as they are once `seen` turns are applied."""

    number: int
    table: int
    round: int
    seen: int
    ids: bytes


@numbered(84)
@dataclass(frozen=True, slots=True)
class TableRows(Message):
    """Server -> worker: the rows of the pull of this round. Snapshot."""

    round: int


@numbered(85)
@dataclass(frozen=True, slots=True)
class TableAssign(Message):
    """Worker -> server: these rows are so from now on, whatever they were."""

    number: int
    table: int
    ids: bytes


@numbered(86)
@dataclass(frozen=True, slots=True)
class TableRule(Message):
    """Worker -> server: from turn `since` on, pushes are applied by this optimizer (`OptimizerSpec.to_text`)."""

    number: int
    table: int
    since: int
    optimizer: str


@numbered(87)
@dataclass(frozen=True, slots=True)
class TableStatsRequest(Message):
    """Worker -> server: how large is the table; replied with TableStats."""

    number: int
    table: int
    round: int


@numbered(88)
@dataclass(frozen=True, slots=True)
class TableStats(Message):
    """Server -> worker: rows that this server holds, and bytes: of their values, optimizer state and index."""

    round: int
    rows: int
    value_bytes: int
    state_bytes: int
    index_bytes: int


@numbered(89)
@dataclass(frozen=True, slots=True)
class TableBarrier(Message):
    """Worker -> server: I am at barrier number `round`; echoed when all workers of the job are there."""

    number: int
    round: int


@numbered(90)
@dataclass(frozen=True, slots=True)
class TablesFinished(Message):
    """Worker -> server: nothing more from me about tables."""

    number: int


@numbered(91)
@dataclass(frozen=True, slots=True)
class TableList(Message):
    """Worker -> server: which rows do you hold, from the `first`-touched one on? Replied with TableIds."""

    number: int
    table: int
    round: int
    first: int


@numbered(92)
@dataclass(frozen=True, slots=True)
class TableIds(Message):
    """Server -> worker: rows, in the order of first touch; at most MAX_IDS, fewer only at the end."""

    round: int
    ids: bytes


TABLE_ANSWERS = (TableOpen, TableRows, TableStats, TableBarrier, TableIds)
"""What a server says about tables."""
