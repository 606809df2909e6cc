"""HEFT placement: each module on the worker that finishes it earliest.

Modules are placed one by one. Those on the longest path to the end come first, so branches of a graph run in parallel
where that is faster (Topcuoglu, Hariri and Wu 2002).
"""

from collections.abc import Sequence

from topotrain.parallel.auto_placement.cost_model import EVERYWHERE, TaskGraph, WorkerSpeeds


def branches_of(work: TaskGraph, workers: int, caps: Sequence[float], speeds: WorkerSpeeds) -> list[int] | None:
    """Return the worker of each unit, or None if one has no worker with enough memory."""
    places = [unit.fixed if unit.fixed is not None else EVERYWHERE for unit in work.units]
    held = [float(work.everywhere)] * workers
    # Units that the user has placed take their memory first, since they cannot go elsewhere.
    for unit in work.units:
        if unit.fixed is not None:
            held[unit.fixed] += unit.memory
    free = [0.0] * workers
    done: dict[int, tuple[int, float]] = {}  # task -> worker, when
    for number in _by_rank(work, speeds):
        task = work.tasks[number]
        took = task.forward + task.backward
        if task.unit == EVERYWHERE:
            # All workers do their part of it, so it begins when the last of them is free.
            start = max([_there(done[source], EVERYWHERE, size, speeds) for source, size in task.reads], default=0.0)
            end = max(start, *free) + took / workers
            free = [end] * workers
            done[number] = EVERYWHERE, end
            continue
        options = []
        here = places[task.unit]
        for worker in range(workers) if here == EVERYWHERE else (here,):
            if here == EVERYWHERE and held[worker] + work.units[task.unit].memory > caps[worker]:
                continue
            ready = max([_there(done[source], worker, size, speeds) for source, size in task.reads], default=0.0)
            # The first task of a unit places it, and the later tasks of the unit follow.
            options.append((max(ready, free[worker]) + took, worker))
        if not options:
            return None
        # A tie goes to the lower number, so that all workers choose the same.
        end, worker = min(options)
        if here == EVERYWHERE:
            places[task.unit] = worker
            held[worker] += work.units[task.unit].memory
        free[worker] = end
        done[number] = worker, end
    return [0 if place == EVERYWHERE else place for place in places]


def _there(done: tuple[int, float], worker: int, size: int, speeds: WorkerSpeeds) -> float:
    """Return when a result can be read on a worker; its gradient takes as long again."""
    where, when = done
    return when if where == worker else when + 2 * speeds.transfer(size)


def _by_rank(work: TaskGraph, speeds: WorkerSpeeds) -> list[int]:
    """Return tasks with the longest path to the end first, each after all its inputs."""
    rank = [0.0] * len(work.tasks)
    for number in reversed(range(len(work.tasks))):
        task = work.tasks[number]
        rank[number] += task.forward + task.backward
        for source, size in task.reads:
            rank[source] = max(rank[source], rank[number] + 2 * speeds.transfer(size))
    # A task that reads another has a lower rank, so the inputs come first. The number decides a tie.
    return sorted(range(len(work.tasks)), key=lambda number: (-rank[number], number))
