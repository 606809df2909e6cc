"""Simulated transport: a seeded network in virtual time, and actors with turns.

A seed determines the run. Exactly one thread runs at any moment: the loop resumes an actor when its condition is true,
and continues when the actor waits again. The loop itself calls residents without a thread of their own (servers).

Unlike a real transport this one may duplicate and reorder messages, and cut a process off between two messages.
"""

import math
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import torch

from topotrain.comm.transport import Endpoint, TransportError
from topotrain.comm.transport.connection import copied
from topotrain.config.topology import Address
from topotrain.core.profiling.spans import Clock
from topotrain.core.protocol import Message, decode, encode


class Deadlock(Exception):
    """No event is left, and some actors still wait. The text names them."""


class StillRuns(Deadlock):
    """A simulation has reached its limit."""


# Not an Exception: a script's own `except Exception` must not catch it.
class _Stopped(BaseException):
    """Ends an actor after its run."""


def forget_frames(error: BaseException) -> None:
    """Let go of the frames of an error, and of all that they hold.

    torch keeps an error that was raised in a backward for as long as the process lives.
    """
    error.__traceback__ = error.__context__ = None


class _Actor:
    """A function with its own thread, which runs only in its turn."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.name = name
        self.function = function
        self.turn = threading.Lock()
        # Held from the start: the actor runs only when the loop has released it.
        self.turn.acquire()
        self.thread: threading.Thread | None = None
        self.ready: Callable[[], bool] = lambda: True
        self.ended = False
        self.error: BaseException | None = None

    def start(self, back: threading.Lock) -> None:
        """Start the thread, which releases `back` at its end."""
        self.thread = threading.Thread(target=self._run, args=(back,), name=self.name, daemon=True)
        self.thread.start()

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Set the condition under which the actor runs on."""
        self.ready = ready

    def _run(self, back: threading.Lock) -> None:
        self.turn.acquire()
        try:
            self.function()
        except _Stopped as stopped:
            forget_frames(stopped)
        # The loop raises it on its own thread, where the test or the command sees it.
        except BaseException as error:
            self.error = error
        self.ended = True
        back.release()


class Simulation:
    """Virtual time, and the actors in it; `seed` determines all random choices.

    It is the `client.Waiter` of each actor's Client.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        # One generator for everything, and time is that of the next event: so a seed determines the run.
        self.random = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._actors: list[_Actor] = []
        self._current: _Actor | None = None
        self._back = threading.Lock()  # held by the loop while an actor runs
        self._back.acquire()
        self._stopping = False

    def continue_from(self, before: "Simulation") -> None:
        """Take over the time and the random state of an earlier simulation."""
        self.now = before.now
        self.random.setstate(before.random.getstate())

    def actor(self, name: str, function: Callable[[], None]) -> None:
        """Add an actor. Its function may call `sleep` and `wait`."""
        self._actors.append(_Actor(name, function))

    def at(self, time: float, do: Callable[[], None]) -> None:
        """Call `do` on the loop's thread at a time (seconds; a past time means now)."""
        self._number += 1
        # The number keeps events of equal times in their order, and functions are never compared.
        heappush(self._events, (max(time, self.now), self._number, do))

    def sleep(self, seconds: float) -> None:
        """Simulate computing time of an actor, during which others run."""
        over: list[bool] = []
        self.at(self.now + seconds, lambda: over.append(True))
        self.wait(lambda: bool(over))

    def update(self) -> AbstractContextManager[object]:
        """Return an empty context: no other thread is running."""
        return nullcontext()

    def look(self) -> None:
        """Do nothing: the loop delivers the messages."""

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let others run until `ready()`. RuntimeError if a resident would have to wait."""
        actor = self._current
        while not ready():
            if actor is None or threading.current_thread() is not actor.thread:
                raise RuntimeError("only an actor of the simulation can wait in it")
            actor.wait_for(ready)
            self._back.release()
            actor.turn.acquire()
            if self._stopping:
                raise _Stopped

    def run(self, limit: float = math.inf) -> None:
        """Run until all actors have ended and no event is left, or until `limit` seconds.

        Raises:
            Deadlock: no event is left and actors still wait.
            StillRuns: the limit is reached.
            BaseException: an error of an actor or a resident; the other actors are stopped then.
        """
        try:
            self._run_actors()
            while self._events:
                if self._events[0][0] > limit:
                    raise StillRuns(f"seed {self.seed}: after {limit:.3f} s it still runs")
                self.now, _, do = heappop(self._events)
                do()
                # Before the next event: an actor that can go on must not see a later time.
                self._run_actors()
            waiting = ", ".join(actor.name for actor in self._actors if not actor.ended)
            if waiting:
                raise Deadlock(f"seed {self.seed}, {self.now:.3f} s: no event is left and these wait: {waiting}")
        finally:
            self._stop()

    def _run_actors(self) -> None:
        """Run all actors that are ready, in the order of addition, until none is."""
        again = True
        while again:
            again = False
            # From the beginning again: each actor may have made an earlier one ready.
            for actor in self._actors:
                if not actor.ended and actor.ready():
                    self._resume(actor)
                    again = True
                    if actor.error is not None:
                        raise actor.error

    def _resume(self, actor: _Actor) -> None:
        if actor.thread is None:
            actor.start(self._back)
        self._current = actor
        # Of the two locks one is free at any time, so either the loop runs or one actor.
        actor.turn.release()
        self._back.acquire()
        self._current = None

    def _stop(self) -> None:
        self._stopping = True
        for actor in self._actors:
            while actor.thread is not None and not actor.ended:
                self._resume(actor)  # a script may wait again while it cleans up
            if actor.thread is not None:
                actor.thread.join()


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


class SimulatedTransport:
    """The `Transport` of all residents of a simulation, which share this object."""

    def __init__(self, simulation: Simulation, network_faults: NetworkFaults | None = None) -> None:
        self.network_faults = network_faults or NetworkFaults()
        self.observers: list[Callable[[Address, Address, Message], None]] = []  # called before each delivery
        self.lost: list[tuple[Address, Address, Message]] = []  # messages lost in crashes
        self._simulation = simulation
        self._residents: dict[Address, Endpoint] = {}
        self._connections: set[frozenset[Address]] = set()
        self._last: dict[tuple[Address, Address], float] = {}
        self._crashes: dict[Address, _PendingCrash] = {}
        self._down: set[Address] = set()
        self._paused: set[Address] = set()
        self._kept: list[tuple[tuple[Address, ...], Callable[[], None]]] = []

    def attach(self, me: Address, resident: Endpoint) -> str:
        """Make a resident reachable; return its URL."""
        if me in self._residents:
            raise TransportError(f"{me} is attached already")
        self._residents[me] = resident
        return f"simulated:{me.role.name.lower()}/{me.group}/{me.index}"

    def connect(self, me: Address, peer: Address, url: str) -> None:
        """Connect two attached residents."""
        for address in (me, peer):
            if address not in self._residents:
                raise TransportError(f"cannot reach {peer} at {url}: {address} is not attached here")
        self._connections.add(frozenset((me, peer)))

    def send(self, me: Address, to: Address, message: Message, wait: bool = False) -> None:
        """Send a message, or lose it; never blocks. TransportError without a connection."""
        if frozenset((me, to)) not in self._connections:
            raise TransportError(f"no way from {me} to {to}")
        self._crash_if_due(me, message)
        kind, meta = encode(message)
        body = message.body
        if body is not None and self.network_faults.snapshots:
            body = body.detach().clone()
        chance, network_faults = self._simulation.random.random, self.network_faults
        # Through the codec, as between processes: a receiver never shares an object with the sender.
        message = decode(kind, meta, body)
        # The crash may have come at this very message.
        if me in self._down:
            self.lost.append((me, to, message))
            return
        if self._in_order(me, to):
            self._schedule(me, to, message, late=False)
            return
        # A fault that a network does not have draws no number, so it shifts no later draw.
        self._schedule(me, to, message, late=bool(network_faults.reorder) and chance() < network_faults.reorder)
        if network_faults.duplicate and chance() < network_faults.duplicate:
            self._schedule(me, to, message, late=True)

    def _in_order(self, me: Address, to: Address) -> bool:
        """Whether messages between these two always arrive in order and once.

        The faults of the network then do not affect them.
        """
        return False

    def _schedule(self, me: Address, to: Address, message: Message, late: bool) -> None:
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
        resident, body = self._residents[to], message.body
        if body is not None:
            view = body.detach().view(torch.uint8)
            target = resident.place(me, message, self._viewable(me, to))
            if target is not None:
                copied(target, message, view)
            message = replace(message, body=view if target is None else target)
        resident.handle(me, message)

    def _viewable(self, me: Address, to: Address) -> bool:
        """Whether the receiver may read the body in the sender's memory."""
        return True

    # --- injected faults -----------------------------------------------------------------------------------------

    def crash(self, process: Address, after: int = 0, kind: type[Message] = Message, tell: bool = False) -> None:
        """Cut a process off: no message leaves or reaches it; earlier ones still arrive.

        after, kind: cut it at its first message of this kind after so many of them: between two messages of a burst.
        tell: its peers are notified by `lost`, as when a connection ends.
        """
        self._crashes[process] = _PendingCrash(kind, after, tell)
        if after == 0 and kind is Message:
            self._disconnect(process)

    def _crash_if_due(self, me: Address, message: Message) -> None:
        crash = self._crashes.get(me)
        if crash is None or not isinstance(message, crash.kind):
            return
        if crash.is_due():
            self._disconnect(me)

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


class SimSender:
    """Sends the messages of one simulated process."""

    def __init__(self, transport: SimulatedTransport, me: Address) -> None:
        self._transport, self._me = transport, me

    def send(self, to: Address, message: Message) -> None:
        self._transport.send(self._me, to, message)
