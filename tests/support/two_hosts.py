"""Two hosts with an address each, joined by a cable that can be cut: network namespaces of this machine."""

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any

_NOWHERE = "02:00:00:00:00:99"  # the address of no adapter: what is sent there, nobody takes
_libc = ctypes.CDLL(None, use_errno=True)


def ip(*words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)


class Cable:
    """Hosts 0 and 1. `lay` raises OSError or CalledProcessError where namespaces cannot be made."""

    def __init__(self, tag: str) -> None:
        self.names = [f"tt{tag}{os.getpid()}h{number}" for number in range(2)]
        self.addresses = [f"10.93.{os.getpid() % 250}.{number + 1}" for number in range(2)]

    def lay(self) -> None:
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

    def enter(self, number: int) -> list[str]:
        """What stands before a command that is to run on a host."""
        return ["ip", "netns", "exec", self.names[number]]

    def inside(self, number: int, do: Callable[[], Any]) -> Any:
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

    def plug(self, number: int, state: str) -> None:
        """Pull the plug of a host ("down"), or put it in ("up")."""
        ip("-n", self.names[number], "link", "set", "eth0", state)

    def mute(self, number: int) -> None:
        """What this host sends is lost from now on, without a word to anybody; it still hears the other one."""
        other = self.addresses[1 - number]
        ip("-n", self.names[number], "neigh", "replace", other, "lladdr", _NOWHERE, "dev", "eth0", "nud", "permanent")

    def unmute(self, number: int) -> None:
        ip("-n", self.names[number], "neigh", "del", self.addresses[1 - number], "dev", "eth0", check=False)

    def heal(self) -> None:
        """All that was cut is whole again."""
        for number in range(2):
            self.unmute(number)
            self.plug(number, "up")
