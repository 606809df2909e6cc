"""Cost model: a model's steps as tasks, and the time that a placement takes.

Times are estimated from operations and bytes, or measured. Absolute values of estimates mean little: they serve to
compare placements.
"""

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from topotrain.parallel.estimate.cost_report import CostReport
from topotrain.parallel.estimate.fake_run import StepCost, refs
from topotrain.parallel.program.split_program import ProgramStep, StepKind

EVERYWHERE = -1
"""Unit or location of work that all workers do, each its part."""


@dataclass(frozen=True, slots=True)
class WorkerSpeeds:
    """Speeds of a worker and a link, in operations or bytes per second, and seconds.

    The defaults are one slow core and a link of 1 GB/s. Only their ratios matter.
    """

    flops: float = 2e10
    memory: float = 5e9
    link: float = 1e9
    delay: float = 1e-4

    def transfer(self, nbytes: float) -> float:
        """Return the seconds that `nbytes` bytes take from one worker to another."""
        return self.delay + nbytes / self.link


USUAL = WorkerSpeeds()


@dataclass(frozen=True, slots=True)
class PlacementUnit:
    """A module that is placed as one. `memory`: bytes; `fixed`: the user's choice."""

    name: str
    memory: int
    fixed: int | None = None


@dataclass(frozen=True, slots=True)
class PlacementTask:
    """One step: its unit (or EVERYWHERE), seconds, and its inputs as (task, bytes)."""

    unit: int
    forward: float
    backward: float
    reads: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks in an executable order, units in order of first use, and common memory.

    Times and sizes are for the whole batch of a group. `everywhere` is memory in bytes that every worker needs.
    """

    tasks: tuple[PlacementTask, ...]
    units: tuple[PlacementUnit, ...]
    everywhere: int = 0

    def seconds(self, unit: int) -> float:
        """Return the seconds of a unit's tasks, forward and backward."""
        return sum(task.forward + task.backward for task in self.tasks if task.unit == unit)


def work_of(
    whole: CostReport,
    model: nn.Module,
    fixed: Mapping[str, int],
    copies: int = 3,
    speeds: WorkerSpeeds = USUAL,
    measured: Mapping[str, tuple[float, float]] | None = None,
    alive: float = 1.0,
) -> TaskGraph:
    """Turn a cost report into tasks.

    In the program of the report, modules that are not placed are computed by samples.

    Args:
        whole: the cost report. The costs of a step are summed over all workers.
        model: has the modules that the program names.
        fixed: modules that the user has placed: a worker, or EVERYWHERE.
        copies: bytes that training needs per byte of a parameter, for value, gradient and messages in flight.
        speeds: speeds for the estimate.
        measured: seconds of forward and backward by module, used instead of the estimate.
        alive: fraction of the activations that is kept at once.
    """
    units: dict[str, int] = {}
    memory: list[int] = []
    unit_of: dict[int, int] = {}  # step -> unit
    task_of: dict[int, int] = {}
    tasks: list[PlacementTask] = []
    everywhere = 0
    costs = _together(whole)
    made = {step.number: step for step in whole.program.steps}
    for step in whole.program.steps:
        inputs = sorted({ref.number for ref in refs(step)})
        unit = _unit(step, model, fixed, units, memory, copies, [unit_of.get(number, EVERYWHERE) for number in inputs])
        unit_of[step.number] = unit
        cost = costs.get(step.number)
        # Arguments and parameters are no work, and their memory is counted with the units.
        if step.kind in (StepKind.INPUT, StepKind.ATTRIBUTE) or cost is None:
            continue
        if unit == EVERYWHERE:
            everywhere += round(alive * cost.kept)
        else:
            memory[unit] += round(alive * cost.kept)
        seconds = (
            cost.flops / speeds.flops + cost.touched / speeds.memory,
            cost.backward_flops / speeds.flops + cost.backward_touched / speeds.memory,
        )
        known = (measured or {}).get(step.target) if step.kind is StepKind.MODULE else None
        forward, backward = known or seconds
        reads = tuple((task_of[n], _size(made[n], whole, costs)) for n in inputs if n in task_of)
        task_of[step.number] = len(tasks)
        tasks.append(PlacementTask(unit, forward, backward, reads))
    named = tuple(PlacementUnit(name, memory[number], fixed.get(name)) for name, number in units.items())
    return TaskGraph(tuple(tasks), named, everywhere)


def _unit(
    step: ProgramStep,
    model: nn.Module,
    fixed: Mapping[str, int],
    units: dict[str, int],
    memory: list[int],
    copies: int,
    inputs: Sequence[int],
) -> int:
    if step.kind is StepKind.MODULE:
        # A module that the user has left to all workers is no unit.
        module = model.get_submodule(step.target)
        if fixed.get(step.target) == EVERYWHERE:
            return EVERYWHERE
        own = [*module.parameters(), *module.buffers()]
        if step.target in fixed or own:
            if step.target not in units:
                units[step.target] = len(memory)
                memory.append(copies * sum(tensor.numel() * tensor.element_size() for tensor in own))
            return units[step.target]
    # A step without parameters follows its last input, so that no value moves for it.
    placed = [unit for unit in inputs if unit != EVERYWHERE]
    return placed[-1] if placed else EVERYWHERE


def _together(whole: CostReport) -> dict[int, StepCost]:
    """Return the cost of each step, summed over its workers."""
    found: dict[int, StepCost] = {}
    for costs in whole.steps:
        for number, cost in costs.items():
            before = found.get(number, StepCost())
            found[number] = StepCost(*(getattr(before, f.name) + getattr(cost, f.name) for f in fields(StepCost)))
    return found


def _size(step: ProgramStep, whole: CostReport, costs: Mapping[int, StepCost]) -> int:
    """Return the bytes of a step's result for the whole batch."""
    if step.shape is None:
        return costs[step.number].made
    size = 1
    for entry in step.shape.at(sum(whole.samples)):
        size *= entry
    return size * int(getattr(torch, step.shape.dtype).itemsize)


# --- how long a placement takes --------------------------------------------------------------------------------------


def makespan(
    work: TaskGraph, places: Sequence[int], workers: int, microbatches: int, speeds: WorkerSpeeds = USUAL
) -> float:
    """Return the seconds of a step with unit u on worker `places[u]`.

    All forwards run before all backwards (GPipe, Huang et al. 2019). A worker runs ready tasks with the lowest
    micro-batch first. Links have no contention.
    """
    nodes = _nodes(work, places, workers)
    ahead = [(node.worker, node.forward, node.reads) for node in nodes]
    readers: list[list[tuple[int, int]]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        for source, size in node.reads:
            readers[source].append((number, size))
    last = len(nodes) - 1
    # The backward runs the same graph from its end, with the readers of a result in the place of its inputs.
    back = [
        (
            nodes[last - n].worker,
            nodes[last - n].backward,
            [(last - reader, size) for reader, size in readers[last - n]],
        )
        for n in range(len(nodes))
    ]
    return _simulate(ahead, microbatches, speeds) + _simulate(back, microbatches, speeds)


@dataclass(frozen=True, slots=True)
class _Node:
    """A task on one of the workers that run it."""

    worker: int
    forward: float
    backward: float
    reads: Sequence[tuple[int, int]]


def _nodes(work: TaskGraph, places: Sequence[int], workers: int) -> list[_Node]:
    nodes: list[_Node] = []
    of_task: list[dict[int, int]] = []  # worker -> node
    for task in work.tasks:
        where = range(workers) if task.unit == EVERYWHERE else (places[task.unit],)
        mine: dict[int, int] = {}
        for worker in where:
            reads: list[tuple[int, int]] = []
            for source, size in task.reads:
                nodes_of = of_task[source]
                # Both are divided among all workers, so each worker reads its own part.
                if len(nodes_of) == workers and len(where) == workers:
                    reads.append((nodes_of[worker], 0))
                else:
                    reads += [(node, size // max(len(nodes_of), len(where))) for node in nodes_of.values()]
            mine[worker] = len(nodes)
            nodes.append(_Node(worker, task.forward / len(where), task.backward / len(where), reads))
        of_task.append(mine)
    return nodes


def _simulate(
    nodes: Sequence[tuple[int, float, Sequence[tuple[int, int]]]], microbatches: int, speeds: WorkerSpeeds
) -> float:
    """Return the time of the last event. Nodes are (worker, seconds, reads)."""
    readers: dict[int, list[tuple[int, int]]] = defaultdict(list)
    waiting = {}
    for number, (_, _, reads) in enumerate(nodes):
        for source, size in reads:
            readers[source].append((number, size))
        for micro in range(microbatches):
            waiting[micro, number] = len(reads)
    events = [(0.0, micro, number, False) for (micro, number), count in waiting.items() if not count]
    heapq.heapify(events)
    ready: dict[int, list[tuple[int, int]]] = defaultdict(list)
    busy: set[int] = set()
    arrival: dict[tuple[int, int], float] = defaultdict(float)
    now = 0.0
    while events:
        now, micro, number, done = heapq.heappop(events)
        worker, _, _ = nodes[number]
        if done:
            busy.discard(worker)
            for reader, size in readers[number]:
                key = micro, reader
                there = now if nodes[reader][0] == worker else now + speeds.transfer(size / microbatches)
                arrival[key] = max(arrival[key], there)
                waiting[key] -= 1
                if not waiting[key]:
                    heapq.heappush(events, (arrival[key], micro, reader, False))
        else:
            heapq.heappush(ready[worker], (micro, number))
        # Tasks start after all events of this time, so that the lowest ready micro-batch goes first.
        soon = bool(events) and events[0][0] == now
        if not soon:
            for idle in [worker for worker, queue in sorted(ready.items()) if queue and worker not in busy]:
                next_micro, next_number = heapq.heappop(ready[idle])
                busy.add(idle)
                took = nodes[next_number][1] / microbatches
                heapq.heappush(events, (now + took, next_micro, next_number, True))
    return now
