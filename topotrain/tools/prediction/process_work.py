"""The work of simulated processes, which handle one message after another."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from topotrain.core.client.client_context import Waiter
from topotrain.core.profiling.spans import Clock
from topotrain.tools.prediction.counted_operations import CountedOperations, WorkMeter
from topotrain.tools.prediction.host_resources import HostCores
from topotrain.tools.simulator.sim_network import Simulation

Action = Callable[[], None]


class SerialWork:
    """Work of one thread on the cores of its host, piece by piece in its order."""

    def __init__(self, cores: HostCores) -> None:
        self._cores = cores
        self._queue: deque[tuple[float, Action]] = deque()
        self._active = False

    def put(self, seconds: float, then: Action) -> None:
        """Work for so many seconds after all earlier work; call `then`."""
        self._queue.append((seconds, then))
        if not self._active:
            self._active = True
            self._next()

    def _next(self) -> None:
        if not self._queue:
            self._active = False
            return
        seconds, then = self._queue.popleft()

        def over() -> None:
            then()
            self._next()

        self._cores.run(seconds, over)


class ProcessWork(Waiter):
    """One endpoint's work: its messages, and of a worker the script with its waits.

    A message takes the time of its receipt, then it is handled. Messages that are sent then leave when the
    work before them is done.

    meters: of the messages' thread, and of the script's. on_script: messages are handled on the script's thread, while
    it waits.
    """

    def __init__(self, sim: Simulation, cores: HostCores, meters: tuple[WorkMeter, WorkMeter], on_script: bool) -> None:
        self.cores = cores
        self.meter, self.script_meter = meters
        self.handling = False  # a message is being handled at this moment of the virtual time
        self.busy = False  # the thread that handles messages works
        self.busy_s = 0.0  # for which it has worked
        self._sim, self._on_script = sim, on_script
        self._operations = CountedOperations(self.meter)
        self._queue: deque[tuple[float, Action]] = deque()
        self._handled = SerialWork(cores)
        self._out: list[tuple[float, Action]] = []
        self._script_runs = on_script
        self._since = self._elapsed = 0.0
        self._news = True

    # --- messages ------------------------------------------------------------------------------------------------

    def receive(self, seconds: float, handle: Action) -> None:
        """A message is here, and is handled after its receipt. seconds: of that."""
        self._queue.append((seconds, handle))
        self._next()

    def _next(self) -> None:
        if self.busy or self._script_runs or not self._queue:
            return
        self.busy, self._since = True, self._sim.now
        seconds, handle = self._queue.popleft()
        self.cores.run(seconds, lambda: self._handle(handle))

    def _handle(self, handle: Action) -> None:
        self.handling, self._elapsed = True, 0.0
        try:
            with self._operations:
                handle()
        finally:
            self.handling, self._news = False, True
        # What was sent leaves, each behind the work before it.
        out, self._out = [*self._out, (self.meter.take(), self._end)], []
        for seconds, then in out:
            self._handled.put(seconds, then)

    def _end(self) -> None:
        self.busy = False
        self.busy_s += self._sim.now - self._since
        self._news = True
        self._next()

    def send(self, seconds: float, leave: Action) -> None:
        """Send a message, and call `leave`. seconds: of the sender's thread."""
        if not self.handling:
            self.script_meter.add(seconds)
            self.spend()
            leave()
            return
        self.meter.add(seconds)
        before = self.meter.take()
        self._elapsed += before
        self._out.append((before, leave))

    # --- the script ------------------------------------------------------------------------------------------------

    def spend(self) -> None:
        """Let the time pass that the script has worked for since it last did so."""
        self.compute(self.script_meter.take())

    def compute(self, seconds: float, idle: float = 0.0) -> None:
        """Let the script compute for seconds of a core, and then stand still."""
        if seconds > 0:
            over: list[bool] = []
            self.cores.run(seconds, lambda: over.append(True))
            self._sim.wait(lambda: bool(over))
        if idle > 0:
            self._sim.sleep(idle)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let the script wait.

        Only a message that is handled here can make `ready()` true.
        """
        self.spend()
        self._news = True
        self._script_runs = False
        self._next()
        self._sim.wait(lambda: self._goes_on(ready))
        self._script_runs = self._on_script

    def update(self) -> AbstractContextManager[object]:
        return nullcontext()  # no other thread is running

    def look(self) -> None:
        """Do nothing: the simulation delivers the messages."""

    def _goes_on(self, ready: Callable[[], bool]) -> bool:
        # The simulation asks after each event, most of which are of other processes.
        # With messages on the script's thread, it goes on only when the one at hand is done.
        self._news = self._news and not (self._on_script and self.busy) and ready()
        return self._news

    def now(self) -> float:
        """Return the time with the running code's own work since the last event."""
        if self.handling:
            return self._sim.now + self._elapsed + self.meter.pending
        return self._sim.now + self.script_meter.pending


class VirtualClock(Clock):
    """The virtual time as one process measures it."""

    def __init__(self, work: ProcessWork) -> None:
        self._work = work

    def now(self) -> int:
        return round(self._work.now() * 1e9)

    def thread(self) -> str:
        return "messages" if self._work.handling else "MainThread"
