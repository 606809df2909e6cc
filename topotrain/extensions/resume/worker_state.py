"""State of a worker's process that no server knows, as bytes for a fresh process.

The bytes are a safetensors file, which names no code. Its tensor "json" has everything that is not a tensor.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from topotrain.config.job import ConfigError
from topotrain.training.final_parameters import from_bytes, to_bytes
from topotrain.training.rng_state import Stand

VERSION = 1
_WHAT = "a worker's state"
_TENSORS = ("begin", "now", "ahead", "draw", "buffers", "tensors")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Position of a worker's script, before a batch of pass number `passes`.

    Args:
        passes: passes that are over.
        steps: calls of `optimizer.step()`.
        turn, epoch, epoch_pass: the index of the last `tt.epochs` of the script (-1: none so far), the number of its
            epoch, and the next pass when that epoch began.
        drawn, fresh: the epoch of this pass, see `distributed_loader.EpochStart`.
        groups: the optimizer's parameter groups without their parameters, packed, by index.
        schedulers: LR schedulers, packed, by class.
        within: the names of schedulers that have stepped within a pass, and not only after it.
        trains: whether a parameter trains, of those that the script has frozen or thawed since the job began.
        data: settings of the loader of this pass, see `map_dataset.EpochStart`.
        kept: the objects of `tt.keep` and `tt.prepare`, packed, by name.
        begin: random number generators before the pass began.
        now: the same before this batch, if it is not the first one.
        ahead: the same before each further batch that the loop had read ahead, and before it used this batch, as
            "<number> <name>" with numbers from 0.
        draw: those of worker (0,0) when the epoch was drawn, if they differ from `begin`.
        buffers: of the model, by name; and parameters without gradients that the script has written.
        tensors: of the packed values.
        uncounted: the first pass with batches that may not be in the values. -1: `passes`.
        interleaved: the script reads two loaders at once.
    """

    passes: int
    steps: int
    turn: int = -1
    epoch: int = 0
    epoch_pass: int = 0
    drawn: Literal["dice", "seed"] = "dice"
    fresh: bool = True
    groups: list[Any] = field(default_factory=list)
    schedulers: dict[str, Any] = field(default_factory=dict)
    within: list[Any] = field(default_factory=list)
    trains: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    begin: Stand = field(default_factory=dict)
    now: Stand = field(default_factory=dict)
    ahead: Stand = field(default_factory=dict)
    draw: Stand = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    uncounted: int = -1
    interleaved: bool = False

    @property
    def first(self) -> int:
        """The first pass that is not over."""
        return self.passes if self.uncounted < 0 else min(self.passes, self.uncounted)

    def to_bytes(self) -> bytes:
        plain = {name: getattr(self, name) for name in _TYPES}
        text = json.dumps({"version": VERSION, **plain}).encode()
        tensors = {"json": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
        for kind in _TENSORS:
            tensors |= {f"{kind}/{name}": tensor for name, tensor in getattr(self, kind).items()}
        return to_bytes(tensors)

    @staticmethod
    def from_bytes(data: bytes) -> "WorkerState":
        """Read the form of `to_bytes`. Raises ConfigError for anything else."""
        # The bytes come from a server or a file, so each field is checked.
        found = from_bytes(data, _WHAT)
        try:
            text = found.pop("json")
            plain = json.loads(bytes(text.numpy().tobytes()))
            version = plain.pop("version")
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(_WHAT, f"{len(data)} bytes", f"has no readable description: {error!r}") from None
        if version != VERSION:
            raise ConfigError(f"{_WHAT}: version", version, f"must be {VERSION}")
        tensors: dict[str, Stand] = {kind: {} for kind in _TENSORS}
        for name, tensor in found.items():
            kind, _, rest = name.partition("/")
            if kind not in tensors:
                raise ConfigError(_WHAT, name, f"must be one of {', '.join(_TENSORS)}")
            tensors[kind][rest] = tensor
        _check(plain)
        return WorkerState(**{**plain, **tensors})


# The types of a default state are those that `_check` accepts.
_SAMPLE = asdict(WorkerState(0, 0))
_TYPES = {name: type(value) for name, value in _SAMPLE.items() if name not in _TENSORS}


def _check(plain: dict[str, Any]) -> None:
    if not plain.keys() <= _TYPES.keys() or not {"passes", "steps"} <= plain.keys():
        raise ConfigError(_WHAT, ", ".join(sorted(map(str, plain))), f"must hold {', '.join(_TYPES)}")
    for name, value in plain.items():
        if type(value) is not _TYPES[name] or (name == "drawn" and value not in ("dice", "seed")):
            raise ConfigError(f"{_WHAT}: {name}", repr(value)[:80], f"must be a {_TYPES[name].__name__}")
        if isinstance(value, int) and not -1 <= value < 1 << 62:
            raise ConfigError(f"{_WHAT}: {name}", value, "must be a number of the job")
