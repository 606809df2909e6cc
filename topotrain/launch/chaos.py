"""Torment for a running job: its processes are killed and frozen at moments that a seed chooses.

Rule: the dice decide when, how and (among those that live just then) whom, in an order that does not depend on what
the job does. A process is reached through a descriptor that the kernel ties to it, so that a number that was given to
somebody else meanwhile hits nobody.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from topotrain.events import Event, Exited, StepDone

LONGEST_S = 5.0
"""How long a process may be left without a signal of life before it is let go on at the end, whatever happens."""


@dataclass(frozen=True, slots=True)
class Torment:
    """What is to be done.

    Args:
        every_s: mean seconds between two blows; each comes after 0.5 to 1.5 times that.
        for_s: seconds, from the job's first step on, after which it is left alone.
        seed: of the dice.
        freeze: share of the blows (0 to 1) that stop a process for 0.1 to 3 s instead of ending it.
        whom: "worker", "server", or "" for both.
    """

    every_s: float
    for_s: float
    seed: int = 0
    freeze: float = 0.0
    whom: str = ""


@dataclass(frozen=True, slots=True)
class Blow:
    """What was done: SIGKILL, or SIGSTOP for `frozen_s` seconds; `at_s` is seconds since the first step."""

    at_s: float
    who: str
    pid: int
    frozen_s: float = 0.0

    def __str__(self) -> str:
        what = f"frozen for {self.frozen_s:.1f} s" if self.frozen_s else "killed"
        return f"{self.at_s:6.1f} s  {self.who} (pid {self.pid}) {what}"


@dataclass(frozen=True, slots=True)
class Step:
    """One throw of the dice: wait so long, then this. `pick` in [0, 1) says whom among those that live."""

    wait_s: float
    pick: float
    frozen_s: float


def steps(torment: Torment) -> Iterator[Step]:
    """The blows in their order, for ever; the same for the same seed."""
    dice = random.Random(torment.seed)
    while True:
        wait_s, pick = torment.every_s * dice.uniform(0.5, 1.5), dice.random()
        frozen_s = dice.uniform(0.1, 3.0)
        yield Step(wait_s, pick, frozen_s if dice.random() < torment.freeze else 0.0)


class Tormentor:
    """Hears a job's events, and does to its processes what a `Torment` says, on a thread of its own.

    Processes are named after their first resident. `blows` is what has been done so far.
    """

    def __init__(self, torment: Torment) -> None:
        self._torment = torment
        self.seed = torment.seed
        self._lock = threading.Lock()
        self._living: dict[str, tuple[int, int]] = {}  # who -> pid, pidfd
        self._began = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)
        self.blows: list[Blow] = []

    def __enter__(self) -> "Tormentor":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._began.set()
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
                self._began.set()
            case _:
                who, pid = getattr(event, "who", ""), getattr(event, "pid", 0)
                if pid and who.split(" ")[0] in ("worker", "server"):
                    self._came(who, pid)

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

    def _run(self) -> None:
        self._began.wait()
        began = time.monotonic()
        for step in steps(self._torment):
            left_s = began + self._torment.for_s - time.monotonic()
            if left_s <= step.wait_s or self._over.wait(step.wait_s):
                return
            self._strike(step, time.monotonic() - began)

    def _strike(self, step: Step, at_s: float) -> None:
        with self._lock:
            living = sorted(self._living.items())
            if not living:
                return
            who, (pid, descriptor) = living[int(step.pick * len(living))]
            descriptor = os.dup(descriptor)
        try:
            number = signal.SIGSTOP if step.frozen_s else signal.SIGKILL
            signal.pidfd_send_signal(descriptor, number)
            self.blows.append(Blow(at_s, who, pid, step.frozen_s))
            if step.frozen_s:
                self._over.wait(min(step.frozen_s, LONGEST_S))
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
        except ProcessLookupError:
            pass  # it has ended by itself
        finally:
            os.close(descriptor)
