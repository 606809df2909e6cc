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
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
