"""The file of a probe: what was measured of one program on one machine.

Times are in seconds, sizes in bytes. Nothing here needs torch. A file may come from another machine, so each field is
checked when it is read.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

from topotrain.config.field_checks import ConfigError
from topotrain.config.sharding import ITEM_BYTES, MAX_ELEMENTS, Parameter

VERSION = 1
_LARGEST = 64 << 20
"""Bytes of the largest file that is read: a model of 100,000 parameters has a smaller one."""

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """The machine of a probe.

    cpu: name of the processor. cores: those that a process may use. system: the operating system.
    """

    cpu: str
    cores: int
    memory_bytes: int
    system: str


@dataclass(frozen=True)
class ProbedParameter:
    """A parameter of the program's model.

    ready: share of the backward, 0 to 1, after which its gradient is there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    ready: float

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a zero-dimensional parameter."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class ProbedBatch:
    """The times of one step of the program, in one process alone on the machine.

    A step of `n` samples computes for `fixed_s + n * per_sample_s` seconds.

    Attributes:
        size: samples in a batch of the program's loader.
        forward_s: from the model's call to the begin of the backward, with the loss.
        backward_s: the backward.
        other_s: of the loader, and of what the script does besides.
        optimizer_s: the optimizer's step in the script's own process, which a job does not have on its workers.
        fixed_s: of forward and backward, for any size of batch.
        per_sample_s: of forward and backward, for each sample. 0: only one size could be measured.
        steps: that were measured.
        samples_per_epoch: in the loader. 0: this is not known.
    """

    size: int
    forward_s: float
    backward_s: float
    other_s: float
    optimizer_s: float
    fixed_s: float
    per_sample_s: float
    steps: int
    samples_per_epoch: int

    def compute_s(self, samples: int) -> float:
        """Return the seconds of forward and backward for so many samples."""
        if not self.per_sample_s:
            # With one size only, all of it is taken to grow with the samples.
            return (self.forward_s + self.backward_s) * samples / self.size
        return self.fixed_s + self.per_sample_s * samples


@dataclass(frozen=True)
class ProbedOptimizer:
    """The optimizer of the program, as a server computes it.

    Attributes:
        name: of its class.
        state_factor: elements of state per element of a parameter.
        fixed_s: of the server's kernel, for one slice of any size.
        element_s: of the kernel, for each element.
        momentum: of the optimizer; 0.0 without.
    """

    name: str
    state_factor: float
    fixed_s: float
    element_s: float
    momentum: float


@dataclass(frozen=True)
class ProbedKernels:
    """Plain operations on tensors.

    Attributes:
        operation_s: of one operation of torch on a small tensor.
        byte_s: of each byte that an addition of large tensors reads or writes.
        copy_byte_s: of each byte that is copied.
    """

    operation_s: float
    byte_s: float
    copy_byte_s: float


@dataclass(frozen=True)
class ProbedTransport:
    """One transport between two processes of the machine.

    A message of `n` bytes costs its sender `send_message_s + n * send_byte_s` seconds of a core, and its receiver
    likewise. latency_s: from sending a small message until it is there, without the work of both.
    """

    send_message_s: float
    send_byte_s: float
    receive_message_s: float
    receive_byte_s: float
    latency_s: float

    @property
    def mbit(self) -> float:
        """Mbit/s of large messages. 0: without bound.

        The sender and the receiver each work on their own, so the slower one counts.
        """
        slower = max(self.send_byte_s, self.receive_byte_s)
        return 8e-6 / slower if slower > 0 else 0.0


@dataclass(frozen=True)
class Probe:
    """All that was measured of one program on one machine.

    Attributes:
        version: of the file's format.
        made_at: seconds since 1970.
        machine: where it was measured.
        versions: of topotrain, torch and python.
        program: name of the script's file, without its folder.
        model: the parameters.
        batch: a step of the program.
        spread: standard deviation of a step's own time, over its mean.
        optimizer: the server's kernel.
        kernels: plain operations.
        transports: by name, shm and tcp.
        worker_step_s: seconds of a core that the product's part of a worker adds to each step.
        server_message_s: seconds of a core that a server needs for each message beside kernels and transport.
        sharing: by the number of processes that compute at once, how many times slower each of them is.
        start_s: from the start of a job until its first step.
    """

    version: int
    made_at: float
    machine: Machine
    versions: dict[str, str]
    program: str
    model: tuple[ProbedParameter, ...]
    batch: ProbedBatch
    spread: float
    optimizer: ProbedOptimizer
    kernels: ProbedKernels
    transports: dict[str, ProbedTransport]
    worker_step_s: float
    server_message_s: float
    sharing: dict[int, float]
    start_s: float

    @cached_property
    def digest(self) -> str:
        """The digest of the model: of names, shapes, types, and which are trained."""
        return model_digest(self.model)

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(asdict(self) | {"digest": self.digest}, indent=2) + "\n"

    def schema(self) -> tuple[Parameter, ...]:
        """Return the parameters as servers see them, each contiguous."""
        return tuple(Parameter(p.name, p.shape, _strides(p.shape), p.dtype, p.trainable) for p in self.model)

    def check_model(self, parameters: Iterable[Parameter | ProbedParameter], program: str) -> None:
        """Check that the probe is of this model. Raises ConfigError."""
        if model_digest(parameters) != self.digest:
            made = f"a probe of another model, made with {self.program}; `topotrain probe {program}` makes one of this"
            raise ConfigError("probe", None, made)


def model_digest(parameters: Iterable[Parameter | ProbedParameter]) -> str:
    """Return the digest of a model's parameters."""
    rows = [[p.name, list(p.shape), p.dtype, p.trainable] for p in parameters]
    return sha256(json.dumps(rows).encode()).hexdigest()


def load_probe(path: Path | str) -> Probe:
    """Read a probe from a file.

    Raises:
        ConfigError: the file cannot be read, is no probe, has another version, or a field is missing or wrong.
    """
    place = str(path)
    try:
        if Path(path).stat().st_size > _LARGEST:
            raise ConfigError("", None, f"is no probe: larger than {_LARGEST >> 20} MB", place)
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError("", None, f"cannot be read as a probe ({why})", place) from None
    return read_probe(text, place)


def read_probe(text: str, place: str) -> Probe:
    """Return the probe of a text that `to_json` made. place: for messages.

    Raises ConfigError.
    """
    accepted = "is no probe: must be the JSON that `topotrain probe` writes"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError("", None, accepted, place) from None
    if not isinstance(data, dict) or "version" not in data or "batch" not in data:
        raise ConfigError("", None, accepted, place)
    if data["version"] != VERSION:
        raise ConfigError("version", data["version"], f"must be {VERSION}: make it again with this release", place)
    try:
        found = _block("", Probe, data)
        _check(found)
        if data.get("digest", found.digest) != found.digest:
            raise ConfigError("digest", data["digest"], "is not that of the model in the file")
    except ConfigError as error:
        raise error.at(place) from None
    return found


def _check(probe: Probe) -> None:
    """Check what a prediction divides by, or looks up."""
    if not probe.model:
        raise ConfigError("model", None, "must have a parameter")
    for at, parameter in enumerate(probe.model):
        if parameter.dtype not in ITEM_BYTES:
            raise ConfigError(f"model[{at}].dtype", parameter.dtype, f"must be one of {', '.join(ITEM_BYTES)}")
        if parameter.elements > MAX_ELEMENTS:
            raise ConfigError(f"model[{at}].shape", parameter.shape, f"must have at most {MAX_ELEMENTS} elements")
    if probe.batch.size < 1:
        raise ConfigError("batch.size", probe.batch.size, "must be a whole number >= 1")
    if probe.machine.cores < 1:
        raise ConfigError("machine.cores", probe.machine.cores, "must be a whole number >= 1")
    for name in ("shm", "tcp"):
        if name not in probe.transports:
            raise ConfigError(f"transports.{name}", None, "is missing")


def _block(path: str, kind: type[T], data: object) -> T:
    """Return a block of the file, with all its fields checked."""
    if not isinstance(data, Mapping):
        raise ConfigError(path, None, "must be a block with fields")
    values = {}
    for field in fields(cast(Any, kind)):
        name = f"{path}.{field.name}" if path else field.name
        if field.name not in data:
            raise ConfigError(name, None, "is missing")
        values[field.name] = _value(name, field.type, data[field.name])
    return kind(**values)


def _value(path: str, kind: Any, data: object) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        if not isinstance(data, list):
            raise ConfigError(path, None, "must be a list")
        return tuple(_value(f"{path}[{at}]", inner[0], item) for at, item in enumerate(data))
    if origin is dict:
        if not isinstance(data, Mapping):
            raise ConfigError(path, None, "must be a block with fields")
        return {_key(path, inner[0], key): _value(f"{path}.{key}", inner[1], item) for key, item in data.items()}
    if kind is float:
        return _number(path, data)
    if kind is int:
        if not isinstance(data, int) or isinstance(data, bool) or data < 0:
            raise ConfigError(path, data, "must be a whole number >= 0")
        return data
    if kind in (str, bool):
        if not isinstance(data, kind):
            raise ConfigError(path, data, "must be a text" if kind is str else "must be true or false")
        return data
    return _block(path, kind, data)


def _number(path: str, data: object) -> float:
    right = isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data)
    if not right or cast(float, data) < 0:
        raise ConfigError(path, data, "must be a number >= 0")
    return float(cast(float, data))


def _key(path: str, kind: type, key: str) -> Any:
    # JSON has names only, and the number of processes is one.
    if kind is str:
        return key
    if not key.isdecimal() or int(key) < 1:
        raise ConfigError(path, key, "must be numbers of processes >= 1")
    return int(key)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
