"""Simulated workers with an outer optimizer, each with a speed of its own: which rounds are decided, and of what."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import island_trial
import torch
from fault_schedule import Fault, FaultSchedule
from island_trial import OUTER
from simulation import job

from topotrain.config.job import Job
from topotrain.config.topology import Address
from topotrain.core import protocol as m

STEP_S = 0.01
"""Virtual seconds of a step of a worker with speed 1. A message takes 0.5 to 2 ms."""


@dataclass(frozen=True)
class Round:
    """One update of the values: when, of which fragment, and by which groups with which weights."""

    time: float
    fragment: int
    weights: dict[int, float]

    @property
    def groups(self) -> list[int]:
        return sorted(self.weights)


@dataclass(frozen=True)
class Told:
    """One push of a worker: when it arrived at the coordinator, and what was in it."""

    time: float
    group: int
    fragment: int
    samples: int
    weight: float


class IslandTrial(island_trial.IslandTrial):
    """A simulated job with an outer optimizer, the rounds and pushes of which are noted.

    Args:
        job, faults: what happens.
        batches: of all workers together.
        speeds: of each worker group. Empty: all have speed 1.
        lease: the workers lease their batches.
    """

    jitter = 0.0

    def __init__(
        self, job: Job, batches: int, faults: Sequence[Fault] = (), speeds: Sequence[float] = (), lease: bool = False
    ) -> None:
        schedule = FaultSchedule("calm", batches, 1, "lease" if lease else "static", True, tuple(faults))
        super().__init__(job, 1, schedule)
        for me in self.workers:
            self.lags[me] = STEP_S / speeds[me.group] if speeds else STEP_S
        self.rounds: list[Round] = []
        self.told: list[Told] = []
        self._watch()

    def _watch(self) -> None:
        """Note the rounds on the coordinator, and the pushes that it gets."""
        server = self.server(0, 0)
        carry_out = server.steps.carry_out

        def noted(decisions: Sequence[m.StepDecision]) -> None:
            commits = {each.group: server.state.known.staging[each.group].first for each in decisions}
            (fragment,) = {commit.optimizer for commit in commits.values()}
            weights = {group: commit.weight for group, commit in commits.items()}
            self.rounds.append(Round(self.sim.now, fragment, weights))
            carry_out(decisions)

        def observe(sender: Address, to: Address, message: m.Message) -> None:
            if isinstance(message, m.Commit) and to == server.me:
                told = Told(self.sim.now, sender.group, message.optimizer, message.samples, message.weight)
                self.told.append(told)

        server.steps.carry_out = noted  # type: ignore[method-assign]
        self.transport.observers.append(observe)

    def cells(self) -> torch.Tensor:
        """How often each batch counts, by parameter and batch."""
        return torch.stack([part[: self.batches * self.epochs] for part in self.final])

    def rounds_until(self, push: Told) -> int:
        """So many rounds were decided from a push on until the one that it is in."""
        later = [each for each in self.rounds if each.time >= push.time]
        found = (n for n, each in enumerate(later) if push.group in each.weights and each.fragment == push.fragment)
        return next(found)


def islands(groups: int, sync_freq: int, fragments: int = 1, **cluster: Any) -> Job:
    """A job of so many groups of one worker, the steps of which are added."""
    return job(groups, 1, 2, sync_freq=sync_freq, fragments=fragments, outer=OUTER, **cluster)
