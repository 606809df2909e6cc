"""Fault injection into a running job: processes are killed and stopped at random.

A seed chooses the times, the kinds of faults and the targets among the living processes, independently of what the job
does. Moments that no clock finds (a process has just started, restarted or finished) are chosen as they are reported.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from topotrain.core.events import Event, Exited, Finished, Recovered, Started, StepDone

MOMENTS = ("start", "again", "end", "back")
"""A process has started for the first time, has restarted, a worker has finished its script, or restarted workers have
made a step."""
# So low that a job makes progress although every restart is a moment again.
_MOMENT_CHANCE = 0.25


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults to inject.

    Args:
        every_s: mean seconds between two faults; each comes after 0.5 to 1.5 times that.
        for_s: seconds, from the job's first step on, after which no fault is injected.
        freeze: share of the faults (0 to 1) that stop a process for 0.1 to 3 s instead of killing it.
        role: "worker", "server", or "" for both.
        pairs: share of the kills (0 to 1) that kill a second process at once, if there is one.
        moments: some of MOMENTS. With "back" the next fault comes at that moment, and at the first step, instead of
            after `every_s`. At the others the process concerned is killed with a chance of 1 in 4.
        kills: the number of faults after which no more are injected. 0: no limit.
    """

    every_s: float
    for_s: float
    seed: int = 0
    freeze: float = 0.0
    role: str = ""
    pairs: float = 0.0
    moments: frozenset[str] = frozenset()
    kills: int = 0


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault that was injected: SIGKILL, or SIGSTOP for `frozen_s` seconds."""

    at_s: float  # seconds since the first step
    who: str
    pid: int
    frozen_s: float = 0.0
    moment: str = ""  # one of MOMENTS; "": the clock chose


@dataclass(frozen=True, slots=True)
class FaultStep:
    """A planned fault: when, which process, and for how long."""

    wait_s: float
    pick: float  # in [0, 1), chooses the process among the living ones
    frozen_s: float
    second: float = -1.0  # in [0, 1), chooses another one to be killed at once; -1: none


def steps(plan: FaultPlan) -> Iterator[FaultStep]:
    """Yield the faults in their order, without end. They depend on the seed only."""
    rng = random.Random(plan.seed)
    while True:
        wait_s, pick = plan.every_s * rng.uniform(0.5, 1.5), rng.random()
        # All numbers are drawn for every fault, so that no option shifts the later ones.
        frozen_s = rng.uniform(0.1, 3.0)
        freezes = rng.random() < plan.freeze
        second = rng.random()
        pairs = rng.random() < plan.pairs and not freezes
        yield FaultStep(wait_s, pick, frozen_s if freezes else 0.0, second if pairs else -1.0)


class FaultInjector:
    """Injects the faults of a `FaultPlan` into a job, on a thread of its own.

    It receives the job's events. Processes are named after their first resident. `injected` holds the faults so far,
    and `held` the numbers of descriptors and threads of each process after each recovery, by pid.
    """

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self.seed = plan.seed
        self._lock = threading.Lock()
        self._living: dict[str, tuple[int, int]] = {}  # who -> pid, pidfd
        self._known: set[str] = set()
        # A generator of its own: events come at any time, and must not shift the draws of the clock.
        self._random = random.Random(f"{plan.seed} moments")
        self._until: float | None = None  # when the faults end; None: no worker has made a step yet
        self._began = threading.Event()
        self._back = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)
        self.injected: list[InjectedFault] = []
        self.held: dict[int, list[tuple[int, int]]] = {}

    def __enter__(self) -> "FaultInjector":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        # The thread may be waiting for any of the three.
        self._began.set()
        self._back.set()
        self._thread.join()
        with self._lock:
            for _, descriptor in self._living.values():
                os.close(descriptor)
            self._living.clear()

    def __call__(self, event: Event) -> None:
        match event:
            case Exited(who=who):
                with self._lock:
                    self._forget(who)
            case StepDone():
                # The time of a fault counts from the first step: the start of a job takes seconds of its own.
                self._until = self._until or time.monotonic() + self._plan.for_s
                if not self._began.is_set():
                    self._began.set()
                    self._back.set()
            case Recovered():
                self._count_resources()
                self._back.set()
            case Finished(who=who):
                self._on_moment("end", who)
            case _:
                who, pid = getattr(event, "who", ""), getattr(event, "pid", 0)
                if pid and who.split(" ")[0] in ("worker", "server"):
                    self._on_process(who, pid)
                if isinstance(event, Started):
                    self._on_moment("again" if who in self._known else "start", who)
                    self._known.add(who)

    def _on_process(self, who: str, pid: int) -> None:
        if self._plan.role and not who.startswith(self._plan.role):
            return
        with self._lock:
            if self._living.get(who, (0, 0))[0] == pid or any(pid == known for known, _ in self._living.values()):
                return  # a process of several residents counts once
            self._forget(who)
            # A process that has ended meanwhile is no target.
            with contextlib.suppress(ProcessLookupError):
                # A pidfd never signals another process, also when the kernel has reused the pid.
                self._living[who] = pid, os.pidfd_open(pid)

    def _forget(self, who: str) -> None:
        known = self._living.pop(who, None)
        if known is not None:
            os.close(known[1])

    def _on_moment(self, moment: str, who: str) -> None:
        """Kill the process of this moment, by chance."""
        over = self._until is not None and time.monotonic() > self._until
        if over or self._exhausted or moment not in self._plan.moments or self._random.random() >= _MOMENT_CHANCE:
            return
        began = time.monotonic() if self._until is None else self._until - self._plan.for_s
        self._strike([who], time.monotonic() - began, moment=moment)

    def _count_resources(self) -> None:
        """Record the resources of all living processes after a recovery."""
        with self._lock:
            pids = [pid for pid, _ in self._living.values()]
        for pid in pids:
            # A process may end while it is looked at.
            with contextlib.suppress(OSError):
                fds, threads = (len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task"))
                self.held.setdefault(pid, []).append((fds, threads))

    def _run(self) -> None:
        self._began.wait()
        began = time.monotonic()
        for step in steps(self._plan):
            left_s = began + self._plan.for_s - time.monotonic()
            # A fault at this moment hits a job that has hardly recovered from the last one.
            if "back" in self._plan.moments:
                came = self._back.wait(max(0.0, left_s))
                self._back.clear()
                over = not came or self._over.is_set()
            else:
                over = left_s <= step.wait_s or self._over.wait(step.wait_s)
            if over or self._exhausted:
                return
            self._inject(step, time.monotonic() - began)

    @property
    def _exhausted(self) -> bool:
        return 0 < self._plan.kills <= len(self.injected)

    def _inject(self, step: FaultStep, at_s: float) -> None:
        with self._lock:
            # Sorted, so that a draw means the same process whatever the order of their starts.
            living = sorted(self._living)
        hit = [living.pop(int(step.pick * len(living)))] if living else []
        if step.second >= 0 and living:
            hit.append(living[int(step.second * len(living))])
        self._strike(hit, at_s, step.frozen_s)

    def _strike(self, names: Iterable[str], at_s: float, frozen_s: float = 0.0, moment: str = "") -> None:
        """Kill processes, or stop them for a while."""
        with self._lock:
            # Duplicates: the process may end, and its descriptor be closed, before the signal is sent.
            hit = [(who, known[0], os.dup(known[1])) for who in names if (known := self._living.get(who))]
        for who, pid, descriptor in hit:
            # It may have ended by itself.
            with contextlib.suppress(ProcessLookupError), contextlib.ExitStack() as stack:
                stack.callback(os.close, descriptor)
                signal.pidfd_send_signal(descriptor, signal.SIGSTOP if frozen_s else signal.SIGKILL)
                self.injected.append(InjectedFault(at_s, who, pid, frozen_s, moment))
                if frozen_s:
                    # The end of the job ends the freeze: a stopped process would outlive it.
                    self._over.wait(frozen_s)
                    signal.pidfd_send_signal(descriptor, signal.SIGCONT)
