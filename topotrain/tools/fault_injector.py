"""Torment for a running job: its processes are killed and frozen at moments that a seed chooses.

Rule: the dice decide when, how and (among those that live just then) whom, in an order that does not depend on what
the job does. A process is reached through a descriptor that the kernel ties to it, so that a number that was given to
somebody else meanwhile hits nobody.

Moments that no clock finds (a process has just been started, has just come again, has just finished) are struck as they
are told, by dice of their own.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType

from topotrain.core.events import Event, Exited, Finished, Recovered, Started, StepDone

MOMENTS = ("start", "again", "end", "back")
"""A process has been started for the first time; has been started again; a worker has finished its script; those who
were started again have made a step."""
_MOMENT = 0.25


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What is to be done.

    Args:
        every_s: mean seconds between two blows; each comes after 0.5 to 1.5 times that.
        for_s: seconds, from the job's first step on, after which it is left alone.
        seed: of the dice.
        freeze: share of the blows (0 to 1) that stop a process for 0.1 to 3 s instead of ending it.
        whom: "worker", "server", or "" for both.
        pairs: share of the kills (0 to 1) that hit a second process at once, if there is one.
        moments: some of MOMENTS. At "back", and at the first step, comes the next blow, and `every_s` counts no more.
            At the others the process concerned is killed with a chance of 1 in 4, until `for_s` is over: so low that
            the job gets through some time.
        kills: after so many blows it is left alone, too; 0: there is no such number.
    """

    every_s: float
    for_s: float
    seed: int = 0
    freeze: float = 0.0
    whom: str = ""
    pairs: float = 0.0
    moments: frozenset[str] = frozenset()
    kills: int = 0


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """What was done: SIGKILL, or SIGSTOP for `frozen_s` seconds; `at_s` is seconds since the first step.

    moment: one of MOMENTS; "" where the clock chose.
    """

    at_s: float
    who: str
    pid: int
    frozen_s: float = 0.0
    moment: str = ""

    def __str__(self) -> str:
        what = f"frozen for {self.frozen_s:.1f} s" if self.frozen_s else "killed"
        return f"{self.at_s:6.1f} s  {self.who} (pid {self.pid}) {what}{self.moment and f' ({self.moment})'}"


@dataclass(frozen=True, slots=True)
class FaultStep:
    """One throw of the dice: wait so long, then this. `pick` in [0, 1) says whom among those that live.

    second: in [0, 1), whom else at once among the others; -1: nobody.
    """

    wait_s: float
    pick: float
    frozen_s: float
    second: float = -1.0


def steps(torment: FaultPlan) -> Iterator[FaultStep]:
    """The blows in their order, for ever; the same for the same seed."""
    dice = random.Random(torment.seed)
    while True:
        wait_s, pick = torment.every_s * dice.uniform(0.5, 1.5), dice.random()
        frozen_s = dice.uniform(0.1, 3.0)
        freezes = dice.random() < torment.freeze
        second = dice.random()
        pairs = dice.random() < torment.pairs and not freezes
        yield FaultStep(wait_s, pick, frozen_s if freezes else 0.0, second if pairs else -1.0)


@dataclass(slots=True)
class HeldResources:
    """How many descriptors and threads a process had, each time that somebody had come again beside it."""

    looked: list[tuple[int, int]] = field(default_factory=list)

    @property
    def grown(self) -> tuple[int, int]:
        """By how much both have grown, from the first look (when somebody has come again already) to the last."""
        (fds, threads), (last_fds, last_threads) = self.looked[0], self.looked[-1]
        return last_fds - fds, last_threads - threads


class FaultInjector:
    """Hears a job's events, and does to its processes what a `FaultPlan` says, on a thread of its own.

    Processes are named after their first resident. `blows` is what has been done so far; `held` what each process that
    lives held when it was looked at first and last, see `HeldResources`.
    """

    def __init__(self, torment: FaultPlan) -> None:
        self._torment = torment
        self.seed = torment.seed
        self._lock = threading.Lock()
        self._living: dict[str, tuple[int, int]] = {}  # who -> pid, pidfd
        self._known: set[str] = set()
        self._chance = random.Random(f"{torment.seed} moments")
        self._until: float | None = None  # when the torment ends; None: nobody has stepped yet
        self._began = threading.Event()
        self._back = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)
        self.blows: list[InjectedFault] = []
        self.held: dict[int, HeldResources] = {}

    def __enter__(self) -> "FaultInjector":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._began.set()
        self._back.set()
        self._thread.join()
        with self._lock:
            for _, descriptor in self._living.values():
                os.close(descriptor)
            self._living.clear()

    def __call__(self, event: Event) -> None:
        """Hear an event."""
        match event:
            case Exited(who=who):
                with self._lock:
                    self._forget(who)
            case StepDone():
                self._until = self._until or time.monotonic() + self._torment.for_s
                if not self._began.is_set():
                    self._began.set()
                    self._back.set()
            case Recovered():
                self._look()
                self._back.set()
            case Finished(who=who):
                self._moment("end", who)
            case _:
                who, pid = getattr(event, "who", ""), getattr(event, "pid", 0)
                if pid and who.split(" ")[0] in ("worker", "server"):
                    self._came(who, pid)
                if isinstance(event, Started):
                    self._moment("again" if who in self._known else "start", who)
                    self._known.add(who)

    def _came(self, who: str, pid: int) -> None:
        if self._torment.whom and not who.startswith(self._torment.whom):
            return
        with self._lock:
            if self._living.get(who, (0, 0))[0] == pid or any(pid == known for known, _ in self._living.values()):
                return  # a process of several residents counts once
            self._forget(who)
            with contextlib.suppress(ProcessLookupError):
                self._living[who] = pid, os.pidfd_open(pid)

    def _forget(self, who: str) -> None:
        known = self._living.pop(who, None)
        if known is not None:
            os.close(known[1])

    def _moment(self, moment: str, who: str) -> None:
        """Something has just happened to somebody, who may be killed for it."""
        over = self._until is not None and time.monotonic() > self._until
        if over or self._enough or moment not in self._torment.moments or self._chance.random() >= _MOMENT:
            return
        with self._lock:
            known = self._living.get(who)
            if known is None:
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(known[1], signal.SIGKILL)
                began = time.monotonic() if self._until is None else self._until - self._torment.for_s
                self.blows.append(InjectedFault(time.monotonic() - began, who, known[0], 0.0, moment))

    def _look(self) -> None:
        """What those hold that live, now that somebody has come again."""
        with self._lock:
            pids = [pid for pid, _ in self._living.values()]
        for pid in pids:
            with contextlib.suppress(OSError):
                now = tuple(len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task"))
                self.held.setdefault(pid, HeldResources()).looked.append((now[0], now[1]))

    def _run(self) -> None:
        self._began.wait()
        began = time.monotonic()
        for step in steps(self._torment):
            left_s = began + self._torment.for_s - time.monotonic()
            if "back" in self._torment.moments:
                came = self._back.wait(max(0.0, left_s))
                self._back.clear()
                over = not came or self._over.is_set()
            else:
                over = left_s <= step.wait_s or self._over.wait(step.wait_s)
            if over or self._enough:
                return
            self._strike(step, time.monotonic() - began)

    @property
    def _enough(self) -> bool:
        return 0 < self._torment.kills <= len(self.blows)

    def _strike(self, step: FaultStep, at_s: float) -> None:
        with self._lock:
            living = sorted(self._living.items())
            if not living:
                return
            hit = [living.pop(int(step.pick * len(living)))]
            if step.second >= 0 and living:
                hit.append(living[int(step.second * len(living))])
            hit = [(who, (pid, os.dup(descriptor))) for who, (pid, descriptor) in hit]
        for who, (pid, descriptor) in hit:
            self._hit(step, InjectedFault(at_s, who, pid, step.frozen_s), descriptor)

    def _hit(self, step: FaultStep, blow: InjectedFault, descriptor: int) -> None:
        try:
            number = signal.SIGSTOP if step.frozen_s else signal.SIGKILL
            signal.pidfd_send_signal(descriptor, number)
            self.blows.append(blow)
            if step.frozen_s:
                self._over.wait(step.frozen_s)
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
        except ProcessLookupError:
            pass  # it has ended by itself
        finally:
            os.close(descriptor)
