"""Slow networks for the peers: namespaces of the kernel with a token bucket on the link between them (needs root).

topotrain pretends its slow link in user space (`cluster { link }`); Gloo's sockets do not pass through that, so for DDP
the kernel shapes a link of the same bandwidth. Without root there are no namespaces, and a table says by which
arithmetic it stands in for them.
"""

import os
import subprocess
from dataclasses import dataclass
from itertools import count
from typing import Self

_NUMBERS = count()
_BURST = "128kb"


def _run(*words: str) -> bool:
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Networks that exist until `close`; `commands[i]` begins the command of a process inside the i-th.

    `addresses` are theirs, and `interface` is the name of the shaped link in each of them.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    interface: str

    @property
    def commands(self) -> list[list[str]]:
        return [["ip", "netns", "exec", name] for name in self.names]

    @classmethod
    def hosts(cls, number: int, mbit: float, delay_ms: float = 0.0) -> Self | None:
        """`number` networks on one switch; each sends and receives `mbit` Mbit/s at most. None if not permitted.

        delay_ms: from one host to another, one way.
        """
        tag = f"{os.getpid() % 10000}x{next(_NUMBERS)}"
        names = tuple(f"bench{tag}h{n}" for n in range(number))
        made = cls((*names, f"bench{tag}sw"), tuple(f"10.77.0.{n + 1}" for n in range(number)), "wire0")
        if made._build() and made._wire(number, mbit, delay_ms):
            return made
        made.close()
        return None

    def _build(self) -> bool:
        for name in self.names:
            if not (_run("ip", "netns", "add", name) and _run("ip", "-n", name, "link", "set", "lo", "up")):
                return False
        return True

    def _wire(self, number: int, mbit: float, delay_ms: float) -> bool:
        switch = self.names[-1]
        done = _run("ip", "-n", switch, "link", "add", "name", "switch0", "type", "bridge")
        done = done and _run("ip", "-n", switch, "link", "set", "switch0", "up")
        for n in range(number):
            host, port = self.names[n], f"p{n}"
            steps = (
                ("ip", "-n", host, "link", "add", "wire0", "type", "veth", "peer", "name", port, "netns", switch),
                ("ip", "-n", host, "addr", "add", f"{self.addresses[n]}/24", "dev", "wire0"),
                ("ip", "-n", host, "link", "set", "wire0", "up"),
                ("ip", "-n", switch, "link", "set", port, "master", "switch0", "up"),
                ("tc", "-n", host, *(_delayed("wire0", mbit, delay_ms) if delay_ms else _bucket("wire0", mbit))),
                ("tc", "-n", switch, *_bucket(port, mbit)),
            )
            done = done and all(_run(*step) for step in steps)
        return done

    def sent(self, host: int) -> int:
        """Return the bytes that a host has sent over the link so far."""
        file = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        return int(subprocess.run([*self.commands[host], "cat", file], capture_output=True, check=True).stdout)

    def close(self) -> None:
        """Take the networks away; what is not there is passed over."""
        for name in self.names:
            _run("ip", "netns", "del", name)


def _bucket(device: str, mbit: float) -> tuple[str, ...]:
    return ("qdisc", "add", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst", _BURST, "latency", "100ms")


def _delayed(device: str, mbit: float, delay_ms: float) -> tuple[str, ...]:
    # The limit is in packets, of which more than the default of 1000 may be under way.
    path = ("delay", f"{delay_ms:g}ms", "rate", f"{mbit}mbit", "limit", "20000")
    return ("qdisc", "add", "dev", device, "root", "netem", *path)
