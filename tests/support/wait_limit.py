"""A wait that does not end is an error of the test that waits, and no hang of all tests."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_after(seconds: int) -> Iterator[None]:
    """Raise AssertionError where the block still runs after so many seconds; for the main thread."""

    def tell(*_: object) -> None:
        raise AssertionError(f"still waiting after {seconds} s")

    former = signal.signal(signal.SIGALRM, tell)
    outer = signal.alarm(seconds)  # of a block around this one
    try:
        yield
    finally:
        signal.alarm(outer)
        signal.signal(signal.SIGALRM, former)
