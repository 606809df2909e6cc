"""Simulated transport: a network in virtual time, and actors with turns.

A seed determines the run. Exactly one thread runs at any moment: the loop resumes an actor when its condition is true,
and continues when the actor waits again. The loop itself calls residents without a thread of their own (servers).
"""

import math
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from heapq import heappop, heappush

import torch

from topotrain.comm.transport import Endpoint, TransportError
from topotrain.comm.transport.connection import copied
from topotrain.config.topology import Address
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


class SimulatedTransport:
    """The `Transport` of all residents of a simulation, which share this object."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._residents: dict[Address, Endpoint] = {}
        self._connections: set[frozenset[Address]] = set()

    def attach(self, me: Address, resident: Endpoint) -> str:
        """Make a resident reachable; return its URL."""
        if me in self._residents:
            raise TransportError(f"{me} is attached already")
        self._residents[me] = resident
        return f"simulated:{me.role.name.lower()}/{me.group}/{me.index}"

    def connect(self, me: Address, peer: Address, url: str) -> None:
        for address in (me, peer):
            if address not in self._residents:
                raise TransportError(f"cannot reach {peer} at {url}: {address} is not attached here")
        self._connections.add(frozenset((me, peer)))

    def send(self, me: Address, to: Address, message: Message, wait: bool = False) -> None:
        """Send a message; never blocks. TransportError without a connection."""
        if frozenset((me, to)) not in self._connections:
            raise TransportError(f"no way from {me} to {to}")
        kind, meta = encode(message)
        # Through the codec, as between processes: a receiver never shares an object with the sender.
        self._schedule(me, to, decode(kind, meta, message.body))

    def _schedule(self, me: Address, to: Address, message: Message) -> None:
        """Let a message arrive at its time."""
        self._simulation.at(self._simulation.now, lambda: self._deliver(me, to, message))

    def _deliver(self, me: Address, to: Address, message: Message) -> None:
        resident, body = self._residents[to], message.body
        if body is not None:
            view = body.detach().view(torch.uint8)
            target = resident.place(me, message, self._viewable(me, to))
            if target is not None:
                copied(target, message, view)
            message = replace(message, body=view if target is None else target)
        self._hand_over(me, to, message)

    def _hand_over(self, me: Address, to: Address, message: Message) -> None:
        """Let the receiver handle a message with its body in place."""
        self._residents[to].handle(me, message)

    def _viewable(self, me: Address, to: Address) -> bool:
        """Whether the receiver may read the body in the sender's memory."""
        return True


class SimSender:
    def __init__(self, transport: SimulatedTransport, me: Address) -> None:
        self._transport, self._me = transport, me

    def send(self, to: Address, message: Message) -> None:
        self._transport.send(self._me, to, message)
