"""Seeds and cases of a test: some in `make test`, all in `make soak`."""

import os
from collections.abc import Sequence
from typing import Any

import pytest

SOAK = os.environ.get("TOPOTRAIN_SEEDS") == "all"
"""What `make soak` sets."""
FEWEST = 3
"""Seeds of a test at least, since many tests choose the network by the rest of the seed divided by 2 or 3."""


def seeds(count: int, *found: int) -> list[int]:
    """Return an eighth of the seeds up to `count`, or all in `make soak`; `found` are those that showed a defect."""
    few = range(count if SOAK else min(count, max(count // 8, FEWEST)))
    return [*few, *(seed for seed in found if seed not in few)]


def every(first: int, end: int, step: int) -> range:
    """Return moments from `first` on, `step` apart in `make soak`, and some four times as far apart otherwise."""
    return range(first, end, step if SOAK else 4 * step + 1)


def examples(count: int) -> int:
    """Return the number of examples of a property: `count` in `make soak`, a quarter otherwise."""
    return count if SOAK else max(count // 4, FEWEST)


soak_only = pytest.mark.skipif(not SOAK, reason="runs in `make soak`")


def soaked(always: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """Return the cases of `make test`; in the soak the others, too: they show what another case holds."""
    return [*always, *(more if SOAK else ())]
