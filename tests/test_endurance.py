"""What a server keeps does not depend on how many epochs it has seen: containers are counted after few and after many."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from simulation import job

from topotrain import trial
from topotrain.faults import Fault, Schedule, What
from topotrain.message import Commit
from topotrain.trial import Trial
from topotrain.wire.simulated import Weather

pytestmark = pytest.mark.simulated


def fields(value: object) -> Iterator[tuple[str, Any]]:
    """Names and values of an object's own fields."""
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        for name in getattr(cls, "__slots__", ()):
            if isinstance(name, str) and hasattr(value, name):
                yield name, getattr(value, name)


def entries(root: object) -> Counter[str]:
    """How many entries the containers below an object have, by the path that leads there."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    kept: list[object] = []
    todo: deque[tuple[str, object]] = deque([(type(root).__name__, root)])
    while todo:
        path, value = todo.popleft()
        if id(value) in seen or isinstance(value, str | bytes | int | float | torch.Tensor | type):
            continue
        seen.add(id(value))
        kept.append(value)  # or another object may get its id
        if isinstance(value, Mapping):
            found[path] += len(value)
            todo.extend((f"{path}[]", item) for item in value.values())
            todo.extend((f"{path}{{}}", item) for item in value)
        elif isinstance(value, list | tuple | set | frozenset | deque):
            found[path] += len(value)
            todo.extend((f"{path}[]", item) for item in value)
        elif type(value).__module__.startswith("topotrain"):
            todo.extend((f"{path}.{name}", item) for name, item in fields(value))
    return found
