"""Ports of tests that no other process has: not now, and not until this process ends."""

import fcntl
import os
import socket
import tempfile
from functools import cache
from pathlib import Path
from typing import IO

_PORTS = range(20000, 32000)
"""Below the ports that the kernel gives to connections."""
_reserved: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Return ports next to one another on which no process listens.

    They stay with this process until it ends: the tests run in several processes, which look at the same time.
    """
    for first in range(_PORTS.start, _PORTS.stop - count):
        ports = range(first, first + count)
        if all(map(_reserve, ports)):
            return list(ports)
    raise AssertionError("no free ports")


def free_port() -> int:
    """Return one of them."""
    return free_ports(1)[0]


def _reserve(port: int) -> bool:
    """Return whether the port is this process's from now on."""
    if port in _reserved:
        return False
    try:
        # Locks of this kind are not inherited: a process that a test leaves behind keeps no port.
        fcntl.lockf(_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        _reserved.add(port)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


@cache
def _locks() -> IO[bytes]:
    """Return the file whose byte n is locked by the process that has port n."""
    return (Path(tempfile.gettempdir()) / f"topotrain-test-ports-{os.getuid()}.lock").open("ab")
