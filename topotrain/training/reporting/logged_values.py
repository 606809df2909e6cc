"""The values of `tt.log`, sent now and then.

A call costs microseconds: it keeps the values, and most calls send nothing.
"""

import math
import threading
from collections.abc import Mapping
from typing import Any, SupportsFloat

import torch

from topotrain.config.job import ConfigError
from topotrain.core.events import EventSink, Logged
from topotrain.training.worker_stats import WorkerStats

Loggable = SupportsFloat | torch.Tensor
Value = float | torch.Tensor
"""A number, or a tensor on a device that is read when it is sent."""

INTERVAL_S = 0.25
"""Seconds between two events of a process, at least."""
MOST_NAMES = 100
"""The number of names in a process. A curve is made of each, and kept by displays."""
_ACCEPTED = "must be a number, or a tensor with one element"


def numbers(values: Mapping[str, Any]) -> dict[str, Value]:
    """Return the values to keep. Raises ConfigError for one that is no number."""
    return {name: _value(name, value) for name, value in values.items()}


def _value(name: str, value: Any) -> Value:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise _refused(name, f"a tensor of {tuple(value.shape)}, {value.dtype}")
        # A copy on the device, which waits for nothing: the script may change its tensor before it is read.
        return float(value.detach()) if value.device.type == "cpu" else value.detach().clone()
    # float("0.5") is a number, and a text is none.
    if isinstance(value, str | bytes | bytearray):
        raise _refused(name, value)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _refused(name, value) from None


def _refused(name: str, value: Any) -> ConfigError:
    # An error shows no value that is None.
    return ConfigError(f"tt.log {name}{' = None' if value is None else ''}", value, _ACCEPTED)


class LoggedValues:
    """The values of one process that are not sent yet, from any thread.

    Args:
        sink: gets the events.
        process: its name.
    """

    def __init__(self, sink: EventSink, process: str) -> None:
        self._sink, self._process = sink, process
        self._lock = threading.Lock()
        self._waiting: dict[str, Value] = {}
        self._names: set[str] = set()
        self._at: tuple[float, int] = (0.0, 0)
        self._due = -math.inf

    def add(self, values: Mapping[str, Value], tally: WorkerStats | None, now: float) -> None:
        """Keep these values, and send all that are kept if it is time.

        Raises:
            ConfigError: there are too many names.
        """
        with self._lock:
            if not values.keys() <= self._names:
                self._learn(values)
            self._waiting.update(values)
            if tally is not None:
                self._at = (now - tally.started if tally.started else 0.0), tally.steps
        self.send_due(now)

    def _learn(self, values: Mapping[str, Value]) -> None:
        """Note new names."""
        known = self._names | values.keys()
        if len(known) > MOST_NAMES:
            new = next(name for name in values if name not in self._names)
            raise ConfigError(f"tt.log {new}", None, f"is one name too many: a process may log {MOST_NAMES} of them")
        self._names = known

    def send_due(self, now: float) -> None:
        """Send what is kept, if it is time."""
        if now >= self._due and self._waiting:
            self._due = now + INTERVAL_S
            self.send()

    def send(self) -> None:
        """Send what is kept."""
        with self._lock:
            values, self._waiting = self._waiting, {}
            time, step = self._at
        if values:
            # This waits for the device of a tensor.
            self._sink.emit(Logged(self._process, time, step, {name: float(value) for name, value in values.items()}))
