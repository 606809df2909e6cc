"""Choice of a worker for each module, from times and sizes (`placement: kAuto`).

Two methods are tried, and the faster placement by the estimate is taken:

- stages: the modules in the order they run are cut into one stretch per worker (`pipeline_stages`).
- branches: modules are placed one by one, each on the worker that would finish it earliest (`heft`).

The choice is a pure function of its arguments, because all workers of a group must choose the same. Measured times may
only be used by one process that writes its result down; the default is an estimate.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topotrain.config.job import ConfigError
from topotrain.parallel.auto_placement.cost_model import EVERYWHERE, USUAL, TaskGraph, WorkerSpeeds, makespan
from topotrain.parallel.auto_placement.heft import branches_of
from topotrain.parallel.auto_placement.pipeline_stages import stages_of

STAGES, BRANCHES = "stages", "branches"

QUICKER = 0.95
"""Branches must save at least a twentieth of the time. Otherwise stages are kept, which are simpler."""

UNEVEN = 1.25
"""Maximum memory of a worker with branches, over that of the fullest worker with stages."""


@dataclass(frozen=True, slots=True)
class ChosenPlacement:
    """A chosen placement. Seconds are estimates per step.

    Attributes:
        locations: worker of each module, including those that the user placed.
        other: seconds of the other method, or None.
        alone: seconds of one worker that computes everything.
        memory: bytes per worker.
        shares: fraction of the work per worker.
        tight: why the fastest placement was not taken, or "".
    """

    locations: Mapping[str, int]
    way: str
    seconds: float
    other: float | None
    alone: float
    memory: tuple[int, ...]
    shares: tuple[float, ...]
    order: tuple[str, ...]
    tight: str = ""

    @property
    def slower(self) -> bool:
        """Whether one worker alone would be at least as fast, by the estimate."""
        return self.seconds >= self.alone

    def explain(self) -> str:
        """Return the choice and its reasons in a few lines."""
        ways = {STAGES: "stages, one stretch of modules per worker", BRANCHES: "branches, side by side where they can"}
        why = ""
        if self.other is not None:
            against = "branches side by side" if self.way == STAGES else "stages"
            why = f"; {against} would take {1000 * self.other:.3g} ms"
        lines = [f"placement kAuto: {len(self.locations)} modules as {ways[self.way]}{why}"]
        for worker, (size, share) in enumerate(zip(self.memory, self.shares, strict=True)):
            mine = [name for name in self.order if self.locations[name] == worker]
            lines.append(f"  worker {worker}: {_few(mine)}; {size / 1e6:,.2f} MB, {share:.0%} of the work")
        if self.tight:
            lines.append(f"  chosen because it fits: {self.tight}")
        lines.append(
            f"  about {1000 * self.seconds:.3g} ms per step by estimate, {1000 * self.alone:.3g} ms on one worker alone"
        )
        if self.slower:
            lines.append(
                "  warning: by this estimate the split is slower than no split: it pays only where the model does not "
                "fit into one worker. With placement: kManual every worker has all of it and its part of the batch"
            )
        return "\n".join(lines)

    def conf(self) -> str:
        """Return the placement as `partition` blocks of a job file."""
        lines = []
        for name, worker in self.locations.items():
            match = re.escape(name).replace("\\", "\\\\")  # strings of job files have escapes themselves
            lines.append(f'partition {{ match: "^{match}$" partition_dim: -1 location: {worker} }}')
        return "\n".join(lines)


def choose(
    work: TaskGraph,
    workers: int,
    microbatches: int = 1,
    limits: Sequence[int] | None = None,
    speeds: WorkerSpeeds = USUAL,
) -> ChosenPlacement:
    """Choose a worker for every unit.

    Args:
        work: the tasks, their times and sizes, for the batch of a group.
        workers: workers of a group.
        microbatches: the number of parts into which a batch is cut.
        limits: bytes that each worker may hold, if known.
        speeds: speeds of workers and of links between them.

    Raises:
        ConfigError: no placement fits into `limits`.
    """
    for unit in work.units:
        if unit.fixed is not None and not 0 <= unit.fixed < workers:
            raise ConfigError(f"location of {unit.name}", unit.fixed, f"must be 0 to {workers - 1}, a worker's number")
    stages = stages_of(work, workers, limits)
    if stages is None:
        raise _does_not_fit(work, workers, limits or ())
    found = {STAGES: (stages, makespan(work, stages, workers, microbatches, speeds))}
    # Without this bound all modules on one worker would be fastest.
    most = int(UNEVEN * max(_memory(work, stages, workers)))
    caps = [min(most, size) for size in limits or [most] * workers]
    branches = branches_of(work, workers, caps, speeds)
    # Branches on fewer workers than stages would split less.
    if branches is not None and branches != stages and len(set(branches)) >= len(set(stages)):
        found[BRANCHES] = (branches, makespan(work, branches, workers, microbatches, speeds))
    quicker = BRANCHES in found and found[BRANCHES][1] < QUICKER * found[STAGES][1]
    way, other = (BRANCHES, STAGES) if quicker else (STAGES, BRANCHES)
    places, seconds = found[way]
    alone = sum(task.forward + task.backward for task in work.tasks)
    times = [work.seconds(unit) for unit in range(len(work.units))]
    # Work that all workers do counts for each by its part.
    shared = sum(task.forward + task.backward for task in work.tasks if task.unit == EVERYWHERE) / workers
    shares = tuple(
        (shared + sum(t for t, place in zip(times, places, strict=True) if place == worker)) / (alone or 1.0)
        for worker in range(workers)
    )
    names = tuple(unit.name for unit in work.units)
    locations = dict(zip(names, places, strict=True))
    against = found[other][1] if other in found else None
    return ChosenPlacement(locations, way, seconds, against, alone, _memory(work, places, workers), shares, names)


def _memory(work: TaskGraph, places: Sequence[int], workers: int) -> tuple[int, ...]:
    held = [work.everywhere] * workers
    for unit, place in zip(work.units, places, strict=True):
        held[place] += unit.memory
    return tuple(held)


def _does_not_fit(work: TaskGraph, workers: int, limits: Sequence[int]) -> ConfigError:
    need = sum(unit.memory for unit in work.units) + workers * work.everywhere
    largest = max(work.units, key=lambda unit: unit.memory)
    words = (
        f"no cut fits: all modules need {need / 1e6:,.1f} MB, {workers} workers may hold "
        f"{sum(limits) / 1e6:,.1f} MB together and {min(limits) / 1e6:,.1f} MB at least each; the largest is "
        f"{largest.name} with {largest.memory / 1e6:,.1f} MB. More workers, a smaller batch, "
        f"microbatches with schedule: k1F1B, or other locations would help"
    )
    return ConfigError("placement", "kAuto", words)


def _few(names: Sequence[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names) or "no module of its own"
    return f"{names[0]}, {names[1]}, … {names[-1]} ({len(names)} modules)"
