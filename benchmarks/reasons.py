"""Why goals are not met, as far as it is known; printed below the table, each with the rows that it rests on.

The figures are those of the tables of bounds and of passes, which anybody can measure again.
"""

import re
from collections.abc import Mapping

REASONS: Mapping[str, str] = {
    "P1": "A server reads every gradient twice, to look for numbers that are not finite and to update. Torch has no "
    "kernel that adds gradients and updates a value in one pass.",
    "P2": "Bytes over loopback cost more than the yardstick's copies in memory. Two workers move 4 x 40 MB through one "
    "server, Gloo moves 2 x 40 MB.",
    "P3": "Each rank reads all gradients of its share and writes a mean for every rank. Dividing by 3 is slower than "
    "multiplying by 1/2 or 1/4, which has the same bits only there.",
    "P4": "Computing takes most of a step, and the kernels of the servers need the same cores.",
    "P5": "The server needs the same cores as the workers. Over TCP every gradient and every value crosses the "
    "loopback: 4 x 40 MB per step, where DistributedDataParallel moves 2 x 40 MB.",
    "P6": "One server updates for both groups and copies its values once for each, on the same two cores.",
    "P7": "A step costs more than rest and computing, and an old gradient is worth less than a new one; the rows of "
    "the table count both.",
    "P9": "A bucket comes from all workers before it is answered. Four servers are four processes more on the same "
    "cores, and pretending a slow link takes most of their processor time.",
    "P11": "A message takes about 37 calls of Python functions and 43 of built-in ones; an AMD EPYC needed 8.9 us for "
    "one. Beyond its arithmetic a push is looked at, and the mean is written to memory for the workers.",
    "P14": "Eight workers, two servers and the emulated link share two cores. One worker per host sends the same "
    "bytes, and is what the link allows: 0.26 of the step of each for itself.",
}

SOURCES = ("bounds", "passes")
"""Tables with rows about goals, whose names begin with them, as in "P4 and P5, MLP over shared memory: at best"."""


def goals_of(what: str) -> set[str]:
    """The goals that a row of SOURCES is about."""
    head, comma, _ = what.partition(",")
    return set(re.findall(r"\bP\d+\b", head)) if comma else set()
