"""Preloaded by a forkserver: the kernel refuses the forks whose numbers are in an environment variable."""

import errno
import itertools
import os

VARIABLE = "TOPOTRAIN_TEST_REFUSED"
_fork, _count, _refused = os.fork, itertools.count(1), set(os.environ.get(VARIABLE, "").split())


def fork() -> int:
    """As under a limit of processes, which is over after some time."""
    if str(next(_count)) in _refused:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return _fork()


os.fork = fork
