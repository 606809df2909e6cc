"""Cases in which each pair of values of two parameters occurs, instead of all combinations."""

import re
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return few of the combinations, the same ones each time, with every pair of values of any two parameters."""

    def pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
        return set(combinations(enumerate(case), 2))

    every = list(product(*(range(len(values)) for values in parameters)))
    missing = {pair for case in every for pair in pairs(case)}
    chosen = []
    while missing:
        best = max(every, key=lambda case: len(missing & pairs(case)))
        chosen.append(best)
        missing -= pairs(best)
    return [tuple(values[at] for values, at in zip(parameters, case, strict=True)) for case in chosen]


def case_id(value: object) -> str:
    """Return the id of a value that is or has functions: the same in each process of a run, without addresses."""
    return re.sub(r"<function (\S+) at 0x[0-9a-f]+>", r"\1", str(value))
