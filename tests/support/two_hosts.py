"""Two hosts with an address each, joined by a network that can be cut: network namespaces of this machine."""

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NOWHERE = "02:00:00:00:00:99"  # the address of no adapter: what is sent there, nobody takes
_libc = ctypes.CDLL(None, use_errno=True)


def ip(*words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)


class VirtualNetwork:
    """Hosts 0 and 1. `create` raises OSError or CalledProcessError where namespaces cannot be made."""

    def __init__(self, tag: str) -> None:
        self.names = [f"tt{tag}{os.getpid()}h{number}" for number in range(2)]
        self.addresses = [f"10.93.{os.getpid() % 250}.{number + 1}" for number in range(2)]

    def create(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        first, second = self.names
        ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        for name, address in zip(self.names, self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def remove(self) -> None:
        for name in self.names:
            ip("netns", "del", name, check=False)

    def prefix(self, number: int) -> list[str]:
        """Return the words before a command that is to run on a host."""
        return ["ip", "netns", "exec", self.names[number]]

    def run_on(self, number: int, do: Callable[[], Any]) -> Any:
        """Call `do` on a thread that is on a host: the sockets that it makes are there."""
        done: list[Any] = []

        def run() -> None:
            descriptor = os.open(f"/run/netns/{self.names[number]}", os.O_RDONLY)
            try:
                assert _libc.setns(descriptor, 0) == 0, os.strerror(ctypes.get_errno())
            finally:
                os.close(descriptor)
            done.append(do())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return done[0]

    def set_link(self, number: int, state: str) -> None:
        """Set the link of a host "down" or "up"."""
        ip("-n", self.names[number], "link", "set", "eth0", state)

    def block(self, number: int) -> None:
        """Drop what this host sends from now on; it still receives from the other one."""
        other = self.addresses[1 - number]
        ip("-n", self.names[number], "neigh", "replace", other, "lladdr", _NOWHERE, "dev", "eth0", "nud", "permanent")

    def unblock(self, number: int) -> None:
        ip("-n", self.names[number], "neigh", "del", self.addresses[1 - number], "dev", "eth0", check=False)

    def restore(self) -> None:
        """Restore every link and direction."""
        for number in range(2):
            self.unblock(number)
            self.set_link(number, "up")


@contextmanager
def created_network(tag: str) -> Iterator[VirtualNetwork]:
    """Yield a network, or skip the test where namespaces cannot be made."""
    network = VirtualNetwork(tag)
    try:
        network.create()
    except (OSError, subprocess.CalledProcessError) as error:
        network.remove()
        pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}")
    yield network
    network.remove()
