"""The file of a probe: what was measured of one program on one machine.

Times are in seconds, sizes in bytes. Nothing here needs torch. A file may come from another machine, so each field is
checked when it is read.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from topotrain.config.field_checks import ConfigError
from topotrain.config.sharding import ITEM_BYTES, Parameter
from topotrain.tools.probe.checked_block import block

VERSION = 1
_LARGEST = 64 << 20
"""Bytes of the largest file that is read: a model of 100,000 parameters has a smaller one."""

# The bounds are far from anything that was ever measured. They keep a damaged file from an endless prediction.
_MOST_ELEMENTS = 1 << 37
"""Elements of the largest model: half a terabyte of float32."""
_MOST_PROCESSES = 1 << 16
"""Cores of a machine, and processes at once."""
_MOST_BATCH = 1 << 30
"""Samples of a batch."""
_MOST_STEP_S = 86400.0
"""Seconds of a step, and of the start of a job."""
_MOST_MESSAGE_S = 60.0
"""Seconds for a message, or for a small operation."""
_MOST_BYTE_S = 1e-3
"""Seconds for a byte, or for an element."""
_MOST_SPREAD = 10.0
_MOST_SHARING = 1000.0
"""Times that a process may be slower beside others."""
_MOST_STATE = 100.0
"""Elements of an optimizer's state for each element of a parameter."""
_TRAINABLE = tuple(name for name in ITEM_BYTES if name.startswith(("float", "bfloat", "complex")))
"""The types of which torch computes gradients."""


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
            raise another_model(self.program, program)


def another_model(made_with: str, program: str) -> ConfigError:
    """Return the error of a probe that was made with another model.

    program: the present one.
    """
    why = f"a probe of another model, made with {made_with}; `topotrain probe {program}` makes one of this"
    return ConfigError("--probe", None, why)


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
        found = block("", Probe, data)
        _check(found)
        if data.get("digest", found.digest) != found.digest:
            raise ConfigError("digest", data["digest"], "is not that of the model in the file")
    except ConfigError as error:
        raise error.at(place) from None
    return found


def _check(probe: Probe) -> None:
    """Check the values of a probe, which have the right types. Raises ConfigError."""
    _check_model(probe)
    _whole("batch.size", probe.batch.size, 1, _MOST_BATCH)
    _whole("machine.cores", probe.machine.cores, 1, _MOST_PROCESSES)
    for name in ("shm", "tcp"):
        if name not in probe.transports:
            raise ConfigError(f"transports.{name}", None, "is missing")
    for name, value, most in _times(probe):
        if value > most:
            raise ConfigError(name, value, f"must be a number of seconds, 0 to {most:,g}")
    if not probe.batch.forward_s + probe.batch.backward_s > 0:
        accepted = "must be above 0, alone or with batch.backward_s: a step needs time"
        raise ConfigError("batch.forward_s", probe.batch.forward_s, accepted)
    _share("spread", probe.spread, 0.0, _MOST_SPREAD)
    _share("optimizer.state_factor", probe.optimizer.state_factor, 0.0, _MOST_STATE)
    _share("optimizer.momentum", probe.optimizer.momentum, 0.0, 1.0)
    for count, factor in probe.sharing.items():
        _whole("sharing", count, 1, _MOST_PROCESSES)
        _share(f"sharing.{count}", factor, 1.0, _MOST_SHARING)


def _check_model(probe: Probe) -> None:
    if not probe.model:
        raise ConfigError("model", None, "must have a parameter")
    names: set[str] = set()
    elements = 0
    for at, parameter in enumerate(probe.model):
        if parameter.name in names:
            raise ConfigError(f"model[{at}].name", parameter.name, "must not be given twice")
        names.add(parameter.name)
        if parameter.dtype not in ITEM_BYTES:
            raise ConfigError(f"model[{at}].dtype", parameter.dtype, f"must be one of {', '.join(ITEM_BYTES)}")
        if parameter.trainable and parameter.dtype not in _TRAINABLE:
            accepted = f"must be one of {', '.join(_TRAINABLE)} for a parameter that is trainable"
            raise ConfigError(f"model[{at}].dtype", parameter.dtype, accepted)
        _share(f"model[{at}].ready", parameter.ready, 0.0, 1.0)
        elements += parameter.elements
        if elements > _MOST_ELEMENTS:
            accepted = f"must leave the model at most {_MOST_ELEMENTS:,} elements"
            raise ConfigError(f"model[{at}].shape", parameter.shape, accepted)
    if not any(parameter.trainable for parameter in probe.model):
        raise ConfigError("model", None, "must have a parameter that is trainable")


def _times(probe: Probe) -> Iterator[tuple[str, float, float]]:
    """Yield each time of a probe: its field, seconds, and the most accepted."""
    batch, optimizer, kernels = probe.batch, probe.optimizer, probe.kernels
    for name in ("forward_s", "backward_s", "other_s", "optimizer_s", "fixed_s", "per_sample_s"):
        yield f"batch.{name}", getattr(batch, name), _MOST_STEP_S
    yield "optimizer.fixed_s", optimizer.fixed_s, _MOST_MESSAGE_S
    yield "optimizer.element_s", optimizer.element_s, _MOST_BYTE_S
    yield "kernels.operation_s", kernels.operation_s, _MOST_MESSAGE_S
    yield "kernels.byte_s", kernels.byte_s, _MOST_BYTE_S
    yield "kernels.copy_byte_s", kernels.copy_byte_s, _MOST_BYTE_S
    for transport, each in probe.transports.items():
        for name in ("send_message_s", "receive_message_s", "latency_s"):
            yield f"transports.{transport}.{name}", getattr(each, name), _MOST_MESSAGE_S
        for name in ("send_byte_s", "receive_byte_s"):
            yield f"transports.{transport}.{name}", getattr(each, name), _MOST_BYTE_S
    yield "worker_step_s", probe.worker_step_s, _MOST_STEP_S
    yield "server_message_s", probe.server_message_s, _MOST_MESSAGE_S
    yield "start_s", probe.start_s, _MOST_STEP_S


def _whole(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(name, value, f"must be a whole number, {least} to {most:,}")


def _share(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise ConfigError(name, value, f"must be a number, {least:g} to {most:,g}")


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
