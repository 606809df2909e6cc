"""The work of simulated processes: messages, scripts, and operations on tensors.

A process handles one message after another, and may have a script. A rehearsal has tensors of the right sizes in which
every value is zero. So large operations in place are counted in seconds of a core and left out: zero plus zero is zero.
Memory that is never written takes no room.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from topotrain.core.client.client_context import Waiter
from topotrain.core.profiling.spans import Clock
from topotrain.tools.prediction.host_resources import HostCores
from topotrain.tools.probe.probe_file import Probe
from topotrain.tools.simulator.sim_network import Simulation

Action = Callable[[], None]
_SMALL = 8192
"""Elements up to which an operation in place is done: counters of an optimizer, flags, and trials of kernels."""
_FUSED = "_fused_"
_COPIES = frozenset({"copy_", "clone", "_to_copy", "_foreach_copy_"})
_MADE = frozenset({"zeros", "empty", "empty_strided", "zeros_like", "empty_like", "new_empty", "new_zeros"})
"""Memory that is asked for, and written later if at all."""


class WorkMeter:
    """Seconds that a thread of a simulated process has worked, and not spent yet.

    coded: messages are encoded. Otherwise the calls of the few operations for a message are in the probe's time of a
    message. optimizes: its optimizer counts. That of a script is in the probe's time of a step.
    """

    def __init__(self, probe: Probe, coded: bool, optimizes: bool = True) -> None:
        self._kernels, self._optimizer = probe.kernels, probe.optimizer
        self._call_s = probe.kernels.operation_s if coded else 0.0
        self._optimizes, self._counting = optimizes, False
        self.pending = 0.0

    def add(self, seconds: float) -> None:
        self.pending += seconds

    def take(self) -> float:
        taken, self.pending = self.pending, 0.0
        return taken

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, operations on tensors count as work."""
        before, self._counting = self._counting, True
        try:
            yield
        finally:
            self._counting = before

    def note(self, name: str, tensors: Sequence[torch.Tensor], made: Sequence[torch.Tensor] = ()) -> None:
        """Count an operation such as "add_", if operations count now.

        tensors: that are given. made: the results that are none of them.
        """
        if not self._counting or name in _MADE:
            return
        if name in _COPIES:
            # A copy reads as much as it writes, and the probe has seconds for each byte that is copied.
            written = made or tensors[: max(1, len(tensors) // 2)]
            self.pending += self._call_s + self._kernels.copy_byte_s * sum(each.nbytes for each in written)
        else:
            self.pending += self._call_s + self._kernels.byte_s * sum(each.nbytes for each in (*tensors, *made))

    def note_optimizer(self, values: Sequence[torch.Tensor]) -> None:
        """Count a call of the optimizer's kernel for values, if operations count now."""
        if self._counting and self._optimizes:
            self.pending += self._optimizer.fixed_s + self._optimizer.element_s * sum(each.numel() for each in values)


class CountedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of the thread that has entered this context.

    Large ones in place are not done.
    """

    def __init__(self, meter: WorkMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do, or leave out, one operation."""
        name = func.overloadpacket.__name__
        if name.startswith(_FUSED) and sum(each.numel() for each in args[0]) > _SMALL:
            self._meter.note_optimizer(args[0])
            return None
        given = list(_tensors((*args, *(kwargs or {}).values())))
        if _in_place(name) and given and given[0].numel() > _SMALL and given[0].is_floating_point():
            self._meter.note(name, given)
            # A list of tensors in place has no result.
            return args[0] if isinstance(args[0], torch.Tensor) else None
        result = func(*args, **(kwargs or {}))
        if name.startswith(_FUSED):
            self._meter.note_optimizer(args[0])
            return result
        # A view reads nothing.
        if not func.is_view:
            known = set(map(id, given))
            self._meter.note(name, given, [each for each in _tensors((result,)) if id(each) not in known])
        return result


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, torch.Tensor))


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
