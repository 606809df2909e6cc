"""The file of a probe: what was measured of one program on one machine.

Times are in seconds, sizes in bytes. Nothing here needs torch. A file may come from another machine, so each field is
checked when it is read.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from topotrain.config.field_checks import INT64, ConfigError, Rule, number, rule_of, whole
from topotrain.config.sharding import ITEM_BYTES, Parameter

VERSION = 1
_LARGEST = 64 << 20
"""Bytes of the largest file that is read: a model of 100,000 parameters has a smaller one."""
_MOST_ELEMENTS = 1 << 37
"""Elements of the largest model: half a terabyte of float32."""
_NO_PROBE = "is no probe: must be the JSON that `topotrain probe` writes"
_TRAINABLE = tuple(name for name in ITEM_BYTES if name.startswith(("float", "bfloat", "complex")))
"""The types of which torch computes gradients."""
_PROCESSES = re.compile("[1-9][0-9]{0,4}")


def _within(least: float, most: float, unit: str = "") -> Rule:
    return number(f"a number{unit}, {least:g} to {most:,g}", least, most)


def _dtype(path: str, value: Any) -> str:
    if not isinstance(value, str) or value not in ITEM_BYTES:
        raise ConfigError(path, value, f"must be one of {', '.join(ITEM_BYTES)}")
    return value


# The bounds are far from anything that was ever measured. They keep a damaged file from an endless prediction.
_Whole = Annotated[int, whole(0, INT64)]
_StepS = Annotated[float, _within(0, 86400, " of seconds")]
"""Of a step, and of the start of a job."""
_MessageS = Annotated[float, _within(0, 60, " of seconds")]
"""For a message, or for a small operation."""
_ByteS = Annotated[float, _within(0, 1e-3, " of seconds")]
"""For a byte, or for an element."""
_Share = Annotated[float, _within(0, 1)]


@dataclass(frozen=True)
class Machine:
    cpu: str  # name of the processor
    cores: Annotated[int, whole(1, 1 << 16)]  # those that a process may use
    memory_bytes: _Whole


@dataclass(frozen=True)
class ProbedParameter:
    """A parameter of the program's model."""

    name: str
    shape: tuple[_Whole, ...]
    dtype: Annotated[str, _dtype]
    trainable: bool
    ready: _Share  # of the backward, after which its gradient is there

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class ProbedBatch:
    """The times of one step of the program, in one process alone on the machine.

    Forward and backward of `n` samples take `fixed_s + n * per_sample_s` seconds.
    """

    size: Annotated[int, whole(1, 10**9)]  # samples in a batch of the program's loader
    forward_s: _StepS  # from the model's call to the begin of the backward, with the loss
    backward_s: _StepS
    other_s: _StepS  # of the loader, and of what the script does besides
    optimizer_s: _StepS  # in the script's own process, which a job does not have on its workers
    fixed_s: _StepS
    per_sample_s: _StepS  # 0: only one size could be measured
    steps: _Whole

    def compute_s(self, samples: int) -> float:
        """Return the seconds of forward and backward for so many samples."""
        if not self.per_sample_s:
            # With one size only, all of it is taken to grow with the samples.
            return (self.forward_s + self.backward_s) * samples / self.size
        return self.fixed_s + self.per_sample_s * samples


@dataclass(frozen=True)
class ProbedOptimizer:
    """The optimizer of the program.

    A server updates `n` elements in `fixed_s + n * element_s` seconds.
    """

    name: str
    state_factor: Annotated[float, _within(0, 100)]  # elements of state per element of a parameter
    fixed_s: _MessageS
    element_s: _ByteS
    momentum: _Share


@dataclass(frozen=True)
class ProbedKernels:
    operation_s: _MessageS  # of torch on a small tensor
    byte_s: _ByteS  # that an addition of large tensors reads or writes
    copy_byte_s: _ByteS  # that is copied


@dataclass(frozen=True)
class ProbedTransport:
    """One transport between two processes of the machine.

    A message of `n` bytes costs its sender `send_message_s + n * send_byte_s` seconds of a core, and its receiver
    likewise.
    """

    send_message_s: _MessageS
    send_byte_s: _ByteS
    receive_message_s: _MessageS
    receive_byte_s: _ByteS
    latency_s: _MessageS  # until a small message is there, without the work of both

    @property
    def mbit(self) -> float:
        """Mbit/s of large messages; 0: without bound."""
        slower = max(self.send_byte_s, self.receive_byte_s)
        return 8e-6 / slower if slower > 0 else 0.0


@dataclass(frozen=True)
class Probe:
    """All that was measured of one program on one machine."""

    version: int  # of the file's format
    machine: Machine
    versions: dict[str, str]  # of topotrain, torch and python
    program: str  # name of the script's file, without its folder
    model: tuple[ProbedParameter, ...]
    batch: ProbedBatch
    spread: Annotated[float, _within(0, 10)]  # standard deviation of a step's own time, over its mean
    optimizer: ProbedOptimizer
    kernels: ProbedKernels
    transports: dict[str, ProbedTransport]  # shm and tcp
    worker_step_s: _StepS  # seconds of a core that the product's part of a worker adds to each step
    server_message_s: _MessageS  # the same of a server for each message, beside kernels and transport
    # By the number of processes that compute at once: how many times slower each of them is.
    sharing: dict[int, Annotated[float, _within(1, 1000)]]
    start_s: _StepS  # of a job, until its first step

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def schema(self) -> tuple[Parameter, ...]:
        """Return the parameters as servers see them, each contiguous."""
        return tuple(Parameter(p.name, p.shape, _strides(p.shape), p.dtype, p.trainable) for p in self.model)

    def check_model(self, parameters: Iterable[Parameter | ProbedParameter], program: str) -> None:
        """Check that the probe is of this model, which `program` has. Raises ConfigError."""
        if list(map(_description, parameters)) != list(map(_description, self.model)):
            why = f"a probe of another model, made with {self.program}; `topotrain probe {program}` makes one of this"
            raise ConfigError("--probe", None, why)


def _description(parameter: Parameter | ProbedParameter) -> tuple[Any, ...]:
    return parameter.name, tuple(parameter.shape), parameter.dtype, parameter.trainable


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


def load_probe(path: Path | str) -> Probe:
    """Read a probe from a file.

    Raises ConfigError for one that cannot be read, and for a field that is wrong.
    """
    try:
        if Path(path).stat().st_size > _LARGEST:
            raise ConfigError("", None, f"is no probe: larger than {_LARGEST >> 20} MB")
        return parse_probe(json.loads(Path(path).read_text("utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError("", None, f"cannot be read as a probe ({why})", str(path)) from None
    except ConfigError as error:
        raise error.at(str(path)) from None
    except (ValueError, RecursionError):
        raise ConfigError("", None, _NO_PROBE, str(path)) from None


def parse_probe(data: object) -> Probe:
    """Return the probe of the data of a file. Raises ConfigError."""
    if not isinstance(data, dict) or "version" not in data or "batch" not in data:
        raise ConfigError("", None, _NO_PROBE)
    if data["version"] != VERSION:
        raise ConfigError("version", data["version"], f"must be {VERSION}: make it again with this release")
    found: Probe = _block("", Probe, data)
    _check_model(found.model)
    for name in ("shm", "tcp"):
        if name not in found.transports:
            raise ConfigError(f"transports.{name}", None, "is missing")
    if not found.batch.forward_s + found.batch.backward_s > 0:
        accepted = "must be above 0, alone or with batch.backward_s: a step needs time"
        raise ConfigError("batch.forward_s", found.batch.forward_s, accepted)
    return found


def _block(path: str, kind: Any, data: object) -> Any:
    """Return a dataclass of a file's block. Raises ConfigError with the field's path."""
    given, values = _mapping(path, data), {}
    for field in fields(kind):
        name = f"{path}.{field.name}" if path else field.name
        if field.name not in given:
            raise ConfigError(name, None, "is missing")
        values[field.name] = _value(name, field.type, given[field.name])
    return kind(**values)


def _value(path: str, kind: Any, data: object) -> Any:
    inner = get_args(kind)
    if is_dataclass(kind):
        return _block(path, kind, data)
    if get_origin(kind) is tuple and isinstance(data, list):
        return tuple(_value(f"{path}[{at}]", inner[0], item) for at, item in enumerate(data))
    if get_origin(kind) is dict:
        items = _mapping(path, data).items()
        return {_key(path, inner[0], key): _value(f"{path}.{key}", inner[1], item) for key, item in items}
    return rule_of(kind)(path, data)


def _mapping(path: str, data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(path, None, "must be a block with fields")
    return data


def _key(path: str, kind: type, key: str) -> Any:
    # JSON has names only, and the number of processes is one.
    if kind is int and not _PROCESSES.fullmatch(key):
        raise ConfigError(path, key, "must be numbers of processes >= 1")
    return kind(key)


def _check_model(model: tuple[ProbedParameter, ...]) -> None:
    if not any(parameter.trainable for parameter in model):
        raise ConfigError("model", None, "must have a parameter that is trainable")
    names: set[str] = set()
    elements = 0
    for at, parameter in enumerate(model):
        if parameter.name in names:
            raise ConfigError(f"model[{at}].name", parameter.name, "must not be given twice")
        names.add(parameter.name)
        if parameter.trainable and parameter.dtype not in _TRAINABLE:
            accepted = f"must be one of {', '.join(_TRAINABLE)} for a parameter that is trainable"
            raise ConfigError(f"model[{at}].dtype", parameter.dtype, accepted)
        elements += parameter.elements
        if elements > _MOST_ELEMENTS:
            accepted = f"must leave the model at most {_MOST_ELEMENTS:,} elements"
            raise ConfigError(f"model[{at}].shape", parameter.shape, accepted)
