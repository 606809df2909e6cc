"""Description of a table: rows on the servers only, made at their first use.

Row r is on shard (r + first) mod the number of shards. Every layout of a job makes the same rows, in any order of use.
`row_storage` stores rows, `row_optimizers` updates them, and `push_modes` decides when a push counts. Workers use
`table_client`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from topotrain.config.job import ConfigError
from topotrain.core.protocol import MAX_BODY, ProtocolError
from topotrain.extensions.tables.table_messages import MAX_IDS

Ids = npt.NDArray[np.int64]

MODES = ("step", "sync", "async")
DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}
INITS = {"zeros": 0, "given": 0, "uniform": 2, "normal": 2}
"""The kinds of `init`, and the number of numbers that follow each."""

MAX_NAME = 200
MAX_ROW = 1 << 62
# Parts of 1 MB are pipelined: a server handles one while the next is on its way.
PART_BYTES = 1 << 20
# Initial values that are computed at a time: 8 MB of float64.
_CELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Description of a table. It must be the same on every worker of the job.

    Args:
        name: unique in the job, at most 200 characters.
        rows: the number of rows, or -1 for no bound.
        width: elements of a row.
        dtype: "float32", "float64". Without an optimizer also "int32", "int64".
        mode: "step": pushes belong to a step of the prepared model. They are applied or dropped with the step, as the
            mean (or sum) of the worker group. "sync": the n-th pushes of all workers of the job are added up, in rank
            order, and applied once. "async": each push is applied when it arrives.
        optimizer: the text of `row_optimizers.optimizer_text`. Empty: a "sync" sum replaces the row, and an "async"
            push is added to it. A "step" table needs an optimizer.
        init: "zeros", "uniform LO HI", "normal MEAN STD", or "given": a row must be assigned before its first use.
        seed: of the initial rows.
        dense: all rows exist from the start, and with an optimizer every push has all of them. Any element-wise
            optimizer of torch may be used. Not dense: rows are made at their first use, and the optimizer is one that
            torch has for sparse gradients.
        first: the shard of row 0.

    Raises:
        ConfigError: a field has another type or value.
    """

    name: str
    rows: int
    width: int
    dtype: str = "float32"
    mode: str = "step"
    optimizer: str = ""
    init: str = "zeros"
    seed: int = 0
    dense: bool = False
    first: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # A bool is an int for isinstance, and is refused.
            if type(value) is not field.type:
                raise ConfigError(
                    f"table.{field.name}", value, f"must be of type {getattr(field.type, '__name__', '')}"
                )
        limit = MAX_BODY // DTYPES.get(self.dtype, torch.float64).itemsize
        checks = {
            "name": (0 < len(self.name) <= MAX_NAME, f"must have 1 to {MAX_NAME} characters"),
            "rows": (-1 <= self.rows <= MAX_ROW and self.rows != 0, "must be 1 or more, or -1 for no bound"),
            "width": (1 <= self.width <= limit, f"must be 1 to {limit} elements"),
            "dtype": (self.dtype in DTYPES, f"must be one of {', '.join(DTYPES)}"),
            "mode": (self.mode in MODES, f"must be one of {', '.join(MODES)}"),
            "optimizer": (self.mode != "step" or self.optimizer != "", "must be there for mode 'step'"),
            "seed": (0 <= self.seed < 1 << 63, "must be 0 to 2**63 - 1"),
            "dense": (not self.dense or self.rows > 0, "must be false for a table without a bound of its rows"),
            "first": (self.first >= 0, "must be 0 or more"),
        }
        for name, (fine, must) in checks.items():
            if not fine:
                raise ConfigError(f"table.{name}", getattr(self, name), must)
        if self.optimizer and not DTYPES[self.dtype].is_floating_point:
            raise ConfigError("table.dtype", self.dtype, "must be float32 or float64 where there is an optimizer")
        _init(self.init)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.width * self.torch_dtype.itemsize

    @property
    def part_rows(self) -> int:
        """Maximum rows in one message."""
        return max(1, min(MAX_IDS, PART_BYTES // self.row_bytes))

    def residue(self, shard: int, shards: int) -> int:
        """Return the remainder of the rows of a shard, divided by the number of shards."""
        return (shard - self.first) % shards

    def to_text(self) -> str:
        """JSON, the same text for the same table."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> "TableSpec":
        """Read the form of `to_text`. Raises ProtocolError for anything else."""
        try:
            data: Any = json.loads(text)
            return TableSpec(**data)
        # ConfigError is a ValueError: a description with wrong fields comes from no correct worker.
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"not the description of a table: {error}") from error


def difference(mine: TableSpec, theirs: TableSpec) -> str:
    """Return an error about the first field in which two descriptions differ, or ""."""
    for field in fields(mine):
        a, b = getattr(mine, field.name), getattr(theirs, field.name)
        if a != b:
            return f"table {mine.name!r}: {field.name} is {a!r} for one worker and {b!r} for another"
    return ""


def pack_ids(ids: Ids) -> bytes:
    return ids.astype("<i8", copy=False).tobytes()


def unpack_ids(raw: bytes) -> Ids:
    """Return the row numbers of a message. Raises ProtocolError."""
    if len(raw) % 8 or len(raw) > 8 * MAX_IDS:
        raise ProtocolError(f"{len(raw)} bytes of row numbers: must be a multiple of 8, at most {8 * MAX_IDS}")
    return np.frombuffer(raw, dtype="<i8").astype(np.int64, copy=False)


# --- initial values ----------------------------------------------------------------------------------------


def _init(text: str) -> tuple[str, tuple[float, ...]]:
    word, *rest = text.split(" ") if text else [""]
    try:
        numbers = tuple(float(part) for part in rest)
    except ValueError:
        numbers = ()
    if INITS.get(word) != len(rest) or len(numbers) != len(rest) or not all(map(math.isfinite, numbers)):
        raise ConfigError("table.init", text, "must be zeros, given, uniform LO HI, or normal MEAN STD")
    return word, numbers


def initial_rows(spec: TableSpec, ids: Ids) -> torch.Tensor:
    """Return the initial values of rows, (number of ids, width).

    They are a function of seed, name, row and column. The generator is counter-based: SplitMix64's finalizer (Steele,
    Lea and Flood, 2014) over the row, then over the column. Normal numbers are made as by Box and Muller (1958).
    """
    word, numbers = _init(spec.init)
    rows = torch.zeros(len(ids), spec.width, dtype=spec.torch_dtype)
    if word in ("zeros", "given"):
        return rows
    # `hash` of Python differs from process to process.
    raw = blake2b(f"{spec.seed} {spec.name}".encode(), digest_size=8).digest()
    key = np.frombuffer(raw, dtype="<u8").astype(np.uint64)
    step = max(1, _CELLS // spec.width)
    for at in range(0, len(ids), step):
        part = _mixed(key + (ids[at : at + step].astype(np.uint64) + _ONE) * _GOLDEN)[:, None]
        cells = _uniform(part, spec.width, *numbers) if word == "uniform" else _normal(part, spec.width, *numbers)
        rows[at : at + step] = torch.from_numpy(cells).to(spec.torch_dtype)
    return rows


# Arrays of one element: numpy warns when a scalar overflows, and lets arrays wrap around as the generator needs it.
_ONE = np.ones(1, dtype=np.uint64)
_GOLDEN = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
_FACTORS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)
_SHIFTS = np.array([30, 27, 31, 11], dtype=np.uint64)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> _SHIFTS[0:1])) * _FACTORS[0:1]
    x = (x ^ (x >> _SHIFTS[1:2])) * _FACTORS[1:2]
    mixed: npt.NDArray[np.uint64] = x ^ (x >> _SHIFTS[2:3])
    return mixed


def _unit(rows: npt.NDArray[np.uint64], columns: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1), with 53 bits each."""
    bits = _mixed(rows + (columns + _ONE) * _GOLDEN) >> _SHIFTS[3:4]
    # float64 has 53 bits of precision.
    return bits.astype(np.float64) * 2.0**-53


def _uniform(rows: npt.NDArray[np.uint64], width: int, low: float, high: float) -> npt.NDArray[np.float64]:
    return low + (high - low) * _unit(rows, np.arange(width, dtype=np.uint64)[None])


def _normal(rows: npt.NDArray[np.uint64], width: int, mean: float, deviation: float) -> npt.NDArray[np.float64]:
    columns = 2 * np.arange(width, dtype=np.uint64)[None]
    # log1p(-u) is finite for all u in [0, 1). log(u) is not finite for 0.
    radius = np.sqrt(-2.0 * np.log1p(-_unit(rows, columns)))
    cells: npt.NDArray[np.float64] = mean + deviation * radius * np.cos(2 * np.pi * _unit(rows, columns + _ONE))
    return cells
