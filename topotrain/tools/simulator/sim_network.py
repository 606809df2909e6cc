"""The pretended road: a seeded network in virtual time, and actors that take turns on it.

Rule: one seed, one run. Every chance comes from one generator, time is the time of the next event, and of all threads
exactly one runs at any moment: the loop hands an actor the turn when what it waits for is true and takes it back when
the actor waits again. Residents without a thread of their own (servers) are called by the loop itself.

Unlike a real road this one may drop, double and reorder, and cut a process off between two of its messages.
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
from topotrain.comm.transport.connection import checked
from topotrain.comm.transport.frame import HEADER_BYTES
from topotrain.config.topology import Address
from topotrain.core.protocol import Message, decode, encode


class Deadlock(Exception):
    """Nothing will happen any more, and somebody still waits; the text names who."""


class _Stopped(BaseException):
    """Ends an actor whose run is over; no `except Exception` of a script may swallow it."""


class _Actor:
    """A function with a thread of its own, which runs only while it has the turn."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.name = name
        self.function = function
        self.turn = threading.Lock()
        self.turn.acquire()
        self.thread: threading.Thread | None = None
        self.ready: Callable[[], bool] = lambda: True
        self.ended = False
        self.error: BaseException | None = None


class Simulation:
    """Virtual time and the actors that live in it.

    Args:
        seed: of every chance in the run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._actors: list[_Actor] = []
        self._current: _Actor | None = None
        self._back = threading.Lock()  # held by the loop while an actor runs
        self._back.acquire()
        self._stopping = False

    def actor(self, name: str, function: Callable[[], None]) -> None:
        """Let a function take part. It may call `sleep`, and `wait` of a `waiter()`."""
        self._actors.append(_Actor(name, function))

    def at(self, time: float, do: Callable[[], None]) -> None:
        """Call on the loop's thread at a moment (seconds; the past means now)."""
        self._number += 1
        heappush(self._events, (max(time, self.now), self._number, do))

    def sleep(self, seconds: float) -> None:
        """An actor's computing time: others run meanwhile."""
        over: list[bool] = []
        self.at(self.now + seconds, lambda: over.append(True))
        self.wait(lambda: bool(over))

    def waiter(self) -> "Simulation":
        """How an actor's Exchange waits (`client.Waiter`)."""
        return self

    def update(self) -> AbstractContextManager[object]:
        """Nothing to exclude: nobody else is running."""
        return nullcontext()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Hand the turn back until `ready()`. Raises RuntimeError for anybody who is no actor and would wait."""
        actor = self._current
        while not ready():
            if actor is None or threading.current_thread() is not actor.thread:
                raise RuntimeError("only an actor of the simulation can wait in it")
            actor.ready = ready
            self._back.release()
            actor.turn.acquire()
            if self._stopping:
                raise _Stopped

    def run(self, limit: float = math.inf) -> None:
        """Go on until all actors ended and nothing is under way.

        Args:
            limit: the moment (seconds) at which it is too late.

        Raises:
            Deadlock: no event is left and actors still wait, or it is too late.
            BaseException: whatever an actor or a resident raised; the others are stopped then.
        """
        try:
            self._let_act()
            while self._events:
                if self._events[0][0] > limit:
                    raise Deadlock(f"seed {self.seed}: after {limit:.3f} s it still goes on")
                self.now, _, do = heappop(self._events)
                do()
                self._let_act()
            waiting = ", ".join(actor.name for actor in self._actors if not actor.ended)
            if waiting:
                raise Deadlock(f"seed {self.seed}, {self.now:.3f} s: nothing is under way and these wait: {waiting}")
        finally:
            self._stop()

    def _let_act(self) -> None:
        """Everybody who can go on does, in the order in which they joined, until nobody can."""
        again = True
        while again:
            again = False
            for actor in self._actors:
                if not actor.ended and actor.ready():
                    self._resume(actor)
                    again = True
                    if actor.error is not None:
                        raise actor.error

    def _resume(self, actor: _Actor) -> None:
        if actor.thread is None:
            actor.thread = threading.Thread(target=self._live, args=(actor,), name=actor.name, daemon=True)
            actor.thread.start()
        self._current = actor
        actor.turn.release()
        self._back.acquire()
        self._current = None

    def _live(self, actor: _Actor) -> None:
        actor.turn.acquire()
        try:
            actor.function()
        except _Stopped:
            pass
        except BaseException as error:
            actor.error = error
        actor.ended = True
        self._back.release()

    def _stop(self) -> None:
        self._stopping = True
        for actor in self._actors:
            while actor.thread is not None and not actor.ended:
                self._resume(actor)  # a script may wait again while it cleans up
            if actor.thread is not None:
                actor.thread.join()


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """What the network does to messages. Times in virtual seconds, chances per message.

    delay: shortest and longest; messages of one sender to one receiver keep their order. late: how much longer a
    reordered message, or the second of a doubled one, may take; it overtakes and is overtaken. snapshots: a body is
    what it was when it was sent; otherwise it is read on arrival, as roads that show memory do.
    """

    delay: tuple[float, float] = (0.0005, 0.002)
    late: float = 0.01
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    snapshots: bool = True


@dataclass(slots=True)
class _Fate:
    """A crash to come: after `left` more messages of this kind."""

    kind: type[Message]
    left: int
    tell: bool


class SimulatedTransport:
    """The `Transport` of all residents of a simulation; they use the same object."""

    def __init__(self, simulation: Simulation, weather: NetworkFaults | None = None) -> None:
        self.weather = weather or NetworkFaults()
        self.observers: list[Callable[[Address, Address, Message], None]] = []  # called before each delivery
        self.lost: list[tuple[Address, Address, Message]] = []  # what crashes have swallowed
        self._simulation = simulation
        self._residents: dict[Address, Endpoint] = {}
        self._ways: set[frozenset[Address]] = set()
        self._last: dict[tuple[Address, Address], float] = {}
        self._fates: dict[Address, _Fate] = {}
        self._down: set[Address] = set()
        self._paused: set[Address] = set()
        self._kept: list[tuple[tuple[Address, ...], Callable[[], None]]] = []
        self._sent = self._received = 0

    def attach(self, me: Address, resident: Endpoint) -> str:
        """Make a resident reachable."""
        if me in self._residents:
            raise TransportError(f"{me} is attached already")
        self._residents[me] = resident
        return f"simulated:{me.role.name.lower()}/{me.group}/{me.index}"

    def connect(self, me: Address, peer: Address, url: str) -> None:
        """Open the way between two attached residents."""
        for address in (me, peer):
            if address not in self._residents:
                raise TransportError(f"cannot reach {peer} at {url}: {address} is not attached here")
        self._ways.add(frozenset((me, peer)))

    def send(self, me: Address, to: Address, message: Message, wait: bool = False) -> None:
        """Put a message on its way, or lose it; there is always room. Raises WireError when there is no way there."""
        if frozenset((me, to)) not in self._ways:
            raise TransportError(f"no way from {me} to {to}")
        self._meet_fate(me, message)
        kind, meta = encode(message)
        body = message.body
        if body is not None and self.weather.snapshots:
            body = body.detach().clone()
        self._sent += HEADER_BYTES + len(meta) + (0 if body is None else body.nbytes)
        chance, weather = self._simulation.random.random, self.weather
        message = decode(kind, meta, body)
        if me in self._down:
            self.lost.append((me, to, message))
            return
        if weather.drop and chance() < weather.drop:
            return
        self._depart(me, to, message, late=bool(weather.reorder) and chance() < weather.reorder)
        if weather.duplicate and chance() < weather.duplicate:
            self._depart(me, to, message, late=True)

    def _depart(self, me: Address, to: Address, message: Message, late: bool) -> None:
        uniform, now = self._simulation.random.uniform, self._simulation.now
        time = now + uniform(*self.weather.delay)
        if late:
            time += uniform(0.0, self.weather.late)
        else:
            time = self._last[(me, to)] = max(time, self._last.get((me, to), 0.0))
        self._simulation.at(time, lambda: self._arrive(me, to, message))

    def _arrive(self, me: Address, to: Address, message: Message) -> None:
        if self._paused and not self._paused.isdisjoint((me, to)):
            self.awake(lambda: self._arrive(me, to, message), me, to)
            return
        if to in self._down:
            self.lost.append((me, to, message))
            return
        for observe in self.observers:
            observe(me, to, message)
        resident, body = self._residents[to], message.body
        self._received += HEADER_BYTES + (0 if body is None else body.nbytes)
        if body is not None:
            view = body.detach().view(torch.uint8)
            target = resident.place(me, message, True)
            if target is not None:
                checked(target, message, view.numel()).view(torch.uint8).copy_(view)
            message = replace(message, body=view if target is None else target)
        resident.handle(me, message)

    # --- bad luck on purpose -------------------------------------------------------------------------------------

    def crash(self, who: Address, after: int = 0, kind: type[Message] = Message, tell: bool = False) -> None:
        """Cut a process off: nothing leaves it or reaches it any more; what had left before still arrives.

        Args:
            after: at its first message of this kind after so many of them: between two messages of one burst.
            tell: its peers hear `lost`, as when a connection ends.
        """
        self._fates[who] = _Fate(kind, after, tell)
        if after == 0 and kind is Message:
            self._fall(who)

    def _meet_fate(self, me: Address, message: Message) -> None:
        fate = self._fates.get(me)
        if fate is None or not isinstance(message, fate.kind):
            return
        if fate.left == 0:
            self._fall(me)
        fate.left -= 1

    def _fall(self, who: Address) -> None:
        fate = self._fates.pop(who)
        self._down.add(who)
        for way in sorted(way for way in map(sorted, self._ways) if who in way) if fate.tell else ():
            (peer,) = set(way) - {who}
            time = self._simulation.now + self._simulation.random.uniform(*self.weather.delay)
            self._simulation.at(time, lambda peer=peer: self._residents[peer].lost(who, "closed by the peer"))  # type: ignore[misc]

    def revive(self, who: Address) -> None:
        """The process is reachable again, in the state in which it was. What was lost stays lost."""
        self._fates.pop(who, None)
        self._down.discard(who)

    def pause(self, who: Address) -> None:
        """What is on its way from or to a process is kept until `resume`."""
        self._paused.add(who)

    def resume(self, who: Address) -> None:
        """The kept messages arrive now, in their order."""
        self._paused.discard(who)
        kept, self._kept = self._kept, []
        for whose, do in kept:
            self._simulation.at(self._simulation.now, lambda whose=whose, do=do: self.awake(do, *whose))  # type: ignore[misc]

    def awake(self, do: Callable[[], None], *whose: Address) -> None:
        """Do it now, or when none of these processes is paused any more."""
        if self._paused.isdisjoint(whose):
            do()
        else:
            self._kept.append((whose, do))

    # --- the rest of the contract --------------------------------------------------------------------------------

    def traffic(self) -> tuple[int, int]:
        """Bytes of messages sent and received so far, over all residents."""
        return self._sent, self._received

    def close(self) -> None:
        """Nothing to end: the road lives as long as its simulation."""
