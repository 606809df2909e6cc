"""A simulated network with faults.

Unlike a real transport it may duplicate and reorder messages, and cut a process off between two messages.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from topotrain.config.topology import Address
from topotrain.core.profiling.spans import Clock
from topotrain.core.protocol import Message
from topotrain.tools.simulator.sim_network import SimulatedTransport, Simulation


class SimClock(Clock):
    """The time of a simulation, as the clock of its processes."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim

    def now(self) -> int:
        return int(self._sim.now * 1e9)

    def thread(self) -> str:
        return "simulated"


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """The faults of the network, in virtual seconds and probabilities per message."""

    delay: tuple[float, float] = (0.0005, 0.002)  # the shortest and the longest
    late: float = 0.01  # longest additional delay of a reordered or duplicated message
    duplicate: float = 0.0
    reorder: float = 0.0
    snapshots: bool = True  # a body is copied when it is sent; else read on arrival, as with shared memory


@dataclass(slots=True)
class _PendingCrash:
    """A future crash, after `left` more messages of this kind."""

    kind: type[Message]
    left: int
    tell: bool

    def is_due(self) -> bool:
        """Count a message; return whether the crash comes before it."""
        self.left -= 1
        return self.left < 0


class FaultyTransport(SimulatedTransport):
    """A transport whose messages have delays, and whose processes crash and pause."""

    def __init__(self, simulation: Simulation, network_faults: NetworkFaults | None = None) -> None:
        super().__init__(simulation)
        self.network_faults = network_faults or NetworkFaults()
        self.observers: list[Callable[[Address, Address, Message], None]] = []  # called before each delivery
        self.lost: list[tuple[Address, Address, Message]] = []  # messages lost in crashes
        self._last: dict[tuple[Address, Address], float] = {}
        self._crashes: dict[Address, _PendingCrash] = {}
        self._down: set[Address] = set()
        self._paused: set[Address] = set()
        self._kept: list[tuple[tuple[Address, ...], Callable[[], None]]] = []

    def _schedule(self, me: Address, to: Address, message: Message) -> None:
        """Let a message travel, or lose it."""
        crash = self._crashes.get(me)
        if crash is not None and isinstance(message, crash.kind) and crash.is_due():
            self._disconnect(me)
        if message.body is not None and self.network_faults.snapshots:
            message = replace(message, body=message.body.detach().clone())
        # The crash may have come at this very message.
        if me in self._down:
            self.lost.append((me, to, message))
            return
        if self._in_order(me, to):
            self._travel(me, to, message, late=False)
            return
        chance, faults = self._simulation.random.random, self.network_faults
        # A fault that a network does not have draws no number, so it shifts no later draw.
        self._travel(me, to, message, late=bool(faults.reorder) and chance() < faults.reorder)
        if faults.duplicate and chance() < faults.duplicate:
            self._travel(me, to, message, late=True)

    def _in_order(self, me: Address, to: Address) -> bool:
        """Whether messages between these two always arrive in order and once.

        The faults of the network then do not affect them.
        """
        return False

    def _travel(self, me: Address, to: Address, message: Message, late: bool) -> None:
        self._simulation.at(self._arrival_time(me, to, late), lambda: self._deliver(me, to, message))

    def _arrival_time(self, me: Address, to: Address, late: bool) -> float:
        """Draw the time; a message that is not `late` arrives after all earlier ones."""
        uniform, now = self._simulation.random.uniform, self._simulation.now
        time = now + uniform(*self.network_faults.delay)
        # Not recorded: later messages may overtake it, and it may overtake earlier ones.
        if late:
            return time + uniform(0.0, self.network_faults.late)
        time = self._last[me, to] = max(time, self._last.get((me, to), 0.0))
        return time

    def _deliver(self, me: Address, to: Address, message: Message) -> None:
        # At arrival, too: a process may have been paused after the message left.
        if self._paused and not self._paused.isdisjoint((me, to)):
            self.when_resumed(lambda: self._deliver(me, to, message), me, to)
            return
        if to in self._down:
            self.lost.append((me, to, message))
            return
        for observe in self.observers:
            observe(me, to, message)
        super()._deliver(me, to, message)

    # --- injected faults -----------------------------------------------------------------------------------------

    def crash(self, process: Address, after: int = 0, kind: type[Message] = Message, tell: bool = False) -> None:
        """Cut a process off: no message leaves or reaches it; earlier ones still arrive.

        after, kind: cut it at its first message of this kind after so many of them: between two messages of a burst.
        tell: its peers are notified by `lost`, as when a connection ends.
        """
        self._crashes[process] = _PendingCrash(kind, after, tell)
        if after == 0 and kind is Message:
            self._disconnect(process)

    def _disconnect(self, process: Address) -> None:
        crash = self._crashes.pop(process)
        self._down.add(process)
        # Sorted: the order of a set would change the draws of a seed.
        for pair in sorted(pair for pair in map(sorted, self._connections) if process in pair) if crash.tell else ():
            (peer,) = set(pair) - {process}
            time = self._simulation.now + self._simulation.random.uniform(*self.network_faults.delay)
            self._simulation.at(time, lambda peer=peer: self._residents[peer].lost(process, "closed by the peer"))  # type: ignore[misc]

    def revive(self, process: Address) -> None:
        """Make the process reachable again, in its former state. Lost messages stay lost."""
        self._crashes.pop(process, None)
        self._down.discard(process)

    def pause(self, process: Address) -> None:
        """Hold back messages from and to a process until `resume`."""
        self._paused.add(process)

    def resume(self, process: Address) -> None:
        """Deliver the held messages now, in their order."""
        self._paused.discard(process)
        kept, self._kept = self._kept, []
        for whose, do in kept:
            # As events, which the loop's thread runs; another process of the message may still be paused.
            self._simulation.at(self._simulation.now, lambda whose=whose, do=do: self.when_resumed(do, *whose))  # type: ignore[misc]

    def when_resumed(self, do: Callable[[], None], *whose: Address) -> None:
        """Call `do` now, or when none of these processes is paused any more."""
        if self._paused.isdisjoint(whose):
            do()
        else:
            self._kept.append((whose, do))
