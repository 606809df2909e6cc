"""The state of random number generators: to swap, to save and to restore."""

import random
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy
import torch

from topotrain.config.job import ConfigError

Stand = dict[str, torch.Tensor]
"""Where generators stand: tensors under names, as they can be written to a file."""
_ONE_THREAD = threading.Lock()
"""torch holds the lock of the generator while Python may go on with another thread: two would wait for each other."""


def torch_state() -> torch.Tensor:
    with _ONE_THREAD:
        return torch.get_rng_state()


def set_torch_state(state: torch.Tensor) -> None:
    with _ONE_THREAD:
        torch.set_rng_state(state)


def seed_torch(seed: int) -> None:
    with _ONE_THREAD:
        torch.default_generator.manual_seed(seed)


class RngState:
    """The global random number generators of torch (CPU), numpy and Python, to swap.

    Inside `with`, they continue from the end of the last `with` of this object, the first time from `start`: a seed, or
    a saved state. Afterwards they are as they were.
    """

    def __init__(self, start: int | Stand) -> None:
        self._inner: tuple[Any, ...] | None = None
        self._outer: tuple[Any, ...] = ()
        self._start = start

    def __enter__(self) -> None:
        self._outer = self._read()
        if self._inner is not None:
            self._write(self._inner)
        elif isinstance(self._start, int):
            seed_torch(self._start)
            # numpy takes seeds of 32 bits only.
            numpy.random.seed(self._start % (1 << 32))
            random.seed(self._start)
        else:
            put_back(self._start)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._inner = self._read()
        self._write(self._outer)

    @staticmethod
    def _read() -> tuple[Any, ...]:
        return torch_state(), numpy.random.get_state(), random.getstate()

    @staticmethod
    def _write(state: tuple[Any, ...]) -> None:
        set_torch_state(state[0])
        numpy.random.set_state(state[1])
        random.setstate(state[2])


def stand(own: Sequence[torch.Generator] = (), device: torch.device | None = None) -> Stand:
    """The state of the global generators, of a used GPU's, and of these."""
    _, words, gauss = random.getstate()
    _, key, at, has_gauss, cached = numpy.random.get_state()
    found = {
        "torch": torch_state(),
        # Tensors, because a snapshot stores nothing else.
        "python": torch.tensor(words, dtype=torch.int64),
        "python gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(numpy.append(key, at).astype(numpy.int64)),
        "numpy gauss": torch.tensor([cached] if has_gauss else [], dtype=torch.float64),
    }
    # Reading the state would set the GPU up for a script that never uses it.
    if device is not None and device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found | {f"own {number}": generator.get_state() for number, generator in enumerate(own)}


def put_back(
    noted: Mapping[str, torch.Tensor], own: Sequence[torch.Generator] = (), device: torch.device | None = None
) -> None:
    """Restore a saved state; a generator that is not in it stays as it is.

    Raises ConfigError: this is no such state.
    """
    try:
        set_torch_state(noted["torch"])
        gauss = noted["python gauss"].tolist()
        # 3 is the version of Python's own format.
        random.setstate((3, tuple(noted["python"].tolist()), gauss[0] if gauss else None))
        words, gauss = noted["numpy"].tolist(), noted["numpy gauss"].tolist()
        key = numpy.array(words[:-1], dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", key, words[-1], int(bool(gauss)), gauss[0] if gauss else 0.0))
        if "cuda" in noted and device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(noted["cuda"], device)
        for number, generator in enumerate(own):
            if f"own {number}" in noted:
                generator.set_state(noted[f"own {number}"])
    except (KeyError, ValueError, TypeError, OverflowError, IndexError, RuntimeError) as error:
        raise ConfigError("the state of random number generators", str(error), "must be one that was noted") from None
