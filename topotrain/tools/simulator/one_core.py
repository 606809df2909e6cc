"""A simulation on one core of the machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_core() -> Iterator[None]:
    """Inside, this process runs on one core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    # The threads of a simulation take turns, and switch faster on one core. By pid, so that several runs use several.
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(allowed)[os.getpid() % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
