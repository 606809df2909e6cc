"""Pauses of unequal length, so that processes that failed together do not try again together.

Rule: this is no die of the script's. Threads of ours pause at any moment, and a script that has seeded `random` must
find it where it left it.
"""

from random import SystemRandom

_DICE = SystemRandom()  # the system's: it has no state that a fork would double or threads would share


def spread(seconds: float, least: float = 0.5, most: float = 1.5) -> float:
    """A pause of `least` to `most` times so many seconds, evenly distributed."""
    return seconds * _DICE.uniform(least, most)
