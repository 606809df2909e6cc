"""The cores and the link of a simulated host, in the virtual time."""

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from topotrain.comm.emulation.link import AHEAD_S, EmulatedRoute, Meter, piece_bytes
from topotrain.config.job import Link
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.probe.probe_file import Probe
from topotrain.tools.simulator.sim_network import Simulation

_PIECES = 24
"""A message takes a link in at most so many pieces, between which those of other connections come."""


def slowdown(processes: int, cores: int, sharing: Mapping[int, float]) -> float:
    """Return how many times longer each of several processes computes.

    sharing: measured factors by the number of processes. Empty: cores are shared without loss.
    """
    if processes <= 1:
        return 1.0
    plain = max(1.0, processes / cores)
    if not sharing:
        return plain
    known = sorted({1: 1.0, **sharing}.items())
    for (low, before), (high, after) in pairwise(known):
        if low <= processes <= high:
            return before + (after - before) * (processes - low) / (high - low)
    most, factor = known[-1]
    # More processes than were measured: the cores are full, and each further process takes its part of them.
    return factor * plain / max(1.0, most / cores)


def sharing_on(machines: Machines, probe: Probe) -> tuple[int, Mapping[int, float]]:
    """Return the cores of a host, and how its processes share them, if measured."""
    probed = probe.machine.cores
    cores = machines.cores or probed
    return cores, probe.sharing if cores == probed else {}


def least_slowdown(processes: int, cores: int, sharing: Mapping[int, float]) -> float:
    """Return how many times longer each process computes at least.

    While some wait, fewer compute at once.
    """
    # Between these numbers the work of a host rises or falls all the way.
    turns = {1, processes, *(number for number in (cores, *sharing) if number < processes)}
    return max(1.0, processes * min(slowdown(number, cores, sharing) / number for number in turns))


class HostCores:
    """The cores of one host, which all computing threads on it share alike."""

    def __init__(self, sim: Simulation, count: int, sharing: Mapping[int, float]) -> None:
        self._sim, self.count, self._sharing = sim, count, sharing
        self._tasks: dict[int, tuple[float, Callable[[], None]]] = {}  # number -> seconds left, what follows
        self._number = self._turn = 0
        self._at = 0.0
        self._busy_s = 0.0

    def run(self, seconds: float, then: Callable[[], None]) -> None:
        if seconds <= 0:
            self._sim.at(self._sim.now, then)
            return
        self._go_on()
        self._number += 1
        self._tasks[self._number] = (seconds, then)
        self._plan()

    def busy(self) -> float:
        """Return the seconds in which cores have worked so far, over all of them."""
        self._go_on()
        return self._busy_s

    def _pace(self) -> float:
        return 1.0 / slowdown(len(self._tasks), self.count, self._sharing)

    def _go_on(self) -> None:
        """Bring the work of all tasks to the present time."""
        passed, self._at = self._sim.now - self._at, self._sim.now
        if not self._tasks or passed <= 0:
            return
        done = passed * self._pace()
        self._tasks = {number: (left - done, then) for number, (left, then) in self._tasks.items()}
        self._busy_s += passed * min(len(self._tasks), self.count)

    def _plan(self) -> None:
        self._turn += 1
        if not self._tasks:
            return
        turn = self._turn
        first = min(left for left, _ in self._tasks.values())
        self._sim.at(self._sim.now + max(0.0, first) / self._pace(), lambda: self._finish(turn))

    def _finish(self, turn: int) -> None:
        if turn != self._turn:  # other tasks have begun or ended since this was planned
            return
        self._go_on()
        # Rounding may leave a little of the task that is over.
        least = min(left for left, _ in self._tasks.values()) + 1e-12
        over = [number for number, (left, _) in self._tasks.items() if left <= least]
        then = [self._tasks.pop(number)[1] for number in over]
        self._plan()
        for follow in then:
            follow()


class LinkTime(Meter):
    """The time until which one direction of a host's link is taken."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0
        self.busy_s = 0.0
        """Seconds for which it was taken."""

    def seconds(self, nbytes: int) -> float:
        return nbytes / self._rate

    def book(self, ready: float, nbytes: int) -> float:
        """Take the link for `nbytes`, from `ready` on at the earliest; return the end."""
        self._free = max(ready, self._free) + self.seconds(nbytes)
        self.busy_s += self.seconds(nbytes)
        return self._free


@dataclass(slots=True)
class _Parcel:
    left: int  # bytes that have not left yet
    piece: int
    then: Callable[[], None]  # follows its arrival

    def leave(self) -> int:
        """Let the next piece leave; return its bytes."""
        size = min(self.left, self.piece)
        self.left -= size
        return size


class LinkQueue:
    """The messages of one connection between two hosts, in their order.

    up, down: the two directions that are used; None: no bandwidth bounds them. dice: draws jitter and losses.
    """

    def __init__(
        self, sim: Simulation, link: Link, up: LinkTime | None, down: LinkTime | None, dice: random.Random
    ) -> None:
        self._sim = sim
        self._route = EmulatedRoute(link, up, down, dice)
        self._piece = 0 if up is None or link.bandwidth is None else piece_bytes(link.bandwidth * 1e6 / 8)
        self._queue: deque[_Parcel] = deque()
        self._active = False

    def send(self, nbytes: int, then: Callable[[], None]) -> None:
        """Send a message behind all earlier ones; call `then` when all of it has arrived."""
        piece = max(self._piece, -(-nbytes // _PIECES)) if self._piece else nbytes
        self._queue.append(_Parcel(nbytes, piece, then))
        if not self._active:
            self._active = True
            self._next()

    def _next(self) -> None:
        if not self._queue:
            self._active = False
            return
        first = self._queue[0]
        go_on, there = self._route.book(self._sim.now, first.leave())
        if not first.left:
            self._queue.popleft()
            self._sim.at(there, first.then)
        # As a writer of an emulated link, which wakes a little before the link is free.
        self._sim.at(max(self._sim.now, go_on - AHEAD_S), self._next)
