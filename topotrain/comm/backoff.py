"""Jittered pauses, so that processes that failed together retry apart.

The jitter never touches the generator of `random`. Threads of the package pause at any moment, and a script that has
seeded `random` must find its state unchanged.
"""

from random import SystemRandom

_RANDOM = SystemRandom()  # the system's generator has no state that a fork would copy or threads would share


def spread(seconds: float, least: float = 0.5, most: float = 1.5) -> float:
    """Return a pause of `least` to `most` times `seconds`, evenly distributed."""
    return seconds * _RANDOM.uniform(least, most)
