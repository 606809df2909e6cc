"""Jobs in one process whose workers get all by messages, or see the memory of servers, as on a host's shared memory."""

from collections.abc import Collection
from functools import partial
from itertools import cycle
from typing import Any

import pytest
from in_process_job import run_local
from pairwise import pairwise

BOTH = pytest.mark.parametrize("memory", [False, True], ids=["sent", "shown"], indirect=True)
"""For a test about gradients or values in memory that others see."""


@pytest.fixture(autouse=True)
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's `run_local` sends all; with the parameter True, memory is shown."""
    monkeypatch.setattr(request.module, "run_local", partial(run_local, shared=getattr(request, "param", False)))


def in_turns(names: str, values: Collection[Any], others: Collection[Any], turns: int = 3) -> pytest.MarkDecorator:
    """Parametrize with each value and some of the others in turn, and with either kind of memory."""
    others_in_turn = cycle(others)
    cases = [
        (value, next(others_in_turn), (at // 2 + turn) % 2 == 1)
        for at, value in enumerate(values)
        for turn in range(turns)
    ]
    return pytest.mark.parametrize(f"{names}, memory", cases, indirect=["memory"])


def in_pairs(names: str, *values: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrize with each pair of values, also of a value and a kind of memory."""
    cases = pairwise(*map(list, values), [False, True])
    return pytest.mark.parametrize(f"{names}, memory", cases, indirect=["memory"])
