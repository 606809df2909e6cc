"""Which worker gets which module: stages against every other cut, branches side by side, limits, what the user said."""

import itertools
from dataclasses import replace

import pytest
import torch
from split_workers import cut
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.parallel.auto_placement.cost_model import (
    EVERYWHERE,
    PlacementTask,
    PlacementUnit,
    TaskGraph,
    WorkerSpeeds,
    makespan,
    work_of,
)
from topotrain.parallel.auto_placement.pipeline_stages import SLACK, stages_of
from topotrain.parallel.auto_placement.placement_choice import BRANCHES, STAGES, ChosenPlacement, choose
from topotrain.parallel.estimate.cost_report import CostReport, estimate_costs

FREE = WorkerSpeeds(link=1e30, delay=0.0)
FAST = WorkerSpeeds(link=1e9, delay=1e-6)


def chain(*seconds: float, memory: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> TaskGraph:
    """Modules one after another; `sizes[n]` bytes go from n to n + 1."""
    memory = memory or (100,) * len(seconds)
    sizes = sizes or (1000,) * len(seconds)
    tasks = [PlacementTask(n, s, 2 * s, ((n - 1, sizes[n - 1]),) if n else ()) for n, s in enumerate(seconds)]
    return TaskGraph(tuple(tasks), tuple(PlacementUnit(f"layers.{n}", memory[n]) for n in range(len(seconds))))


def fan(branches: int, depth: int, size: int = 1000) -> TaskGraph:
    """A stem, chains side by side of a second per module, and a head that reads all of them."""
    tasks = [PlacementTask(0, 0.1, 0.2, ())]
    for level in range(depth):  # in this order no cut into stretches has branches side by side
        for _ in range(branches):
            before = 0 if level == 0 else len(tasks) - branches
            tasks.append(PlacementTask(len(tasks), 1.0, 2.0, ((before, size),)))
    ends = tuple((len(tasks) - 1 - branch, size) for branch in range(branches))
    tasks.append(PlacementTask(len(tasks), 0.1, 0.2, ends))
    names = ["stem", *(f"branch{b}.{d}" for d in range(depth) for b in range(branches)), "head"]
    return TaskGraph(tuple(tasks), tuple(PlacementUnit(name, 100) for name in names))


def places(found: ChosenPlacement, work: TaskGraph) -> list[int]:
    return [found.locations[unit.name] for unit in work.units]


# --- how long it takes ------------------------------------------------------------------------------------------------


def test_one_after_another_takes_the_sum_and_the_ways() -> None:
    work, slow = chain(1.0, 2.0, sizes=(1000, 0)), WorkerSpeeds(link=1000.0, delay=0.5)
    assert makespan(work, [0, 0], 2, 1, slow) == pytest.approx(9.0)
    assert makespan(work, [0, 1], 2, 1, slow) == pytest.approx(9.0 + 2 * 1.5)


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_a_pipeline_takes_what_gpipe_takes(microbatches: int) -> None:
    """K even stages, M micro-batches: (M + K - 1) / M of one stage's time, forward and backward."""
    stages = 4
    found = makespan(chain(*[1.0] * stages), list(range(stages)), stages, microbatches, FREE)
    assert found == pytest.approx(3.0 * (microbatches + stages - 1) / microbatches)


def test_what_all_workers_do_together_takes_its_part_of_the_time() -> None:
    work = TaskGraph(
        (PlacementTask(EVERYWHERE, 4.0, 0.0, ()), PlacementTask(0, 1.0, 0.0, ((0, 0),))), (PlacementUnit("a", 0),)
    )
    assert makespan(work, [1], 4, 1, FREE) == pytest.approx(2.0)


# --- stages -----------------------------------------------------------------------------------------------------------


def fullest(work: TaskGraph, cut: tuple[int, ...], workers: int) -> float:
    edges = (0, *cut, len(work.units))
    time = sum(map(work.seconds, range(len(work.units))))
    memory = sum(unit.memory for unit in work.units)
    return max(
        sum(work.seconds(n) / time + work.units[n].memory / memory for n in range(edges[w], edges[w + 1]))
        for w in range(workers)
    )


@pytest.mark.parametrize(("workers", "seed"), [(1, 0), (2, 1), (3, 2), (5, 0), (3, 1)])
def test_no_cut_into_stretches_is_evener(workers: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    seconds = torch.rand(7, generator=rng).tolist()
    memory = tuple(torch.randint(1, 1000, (7,), generator=rng).tolist())
    work = chain(*seconds, memory=memory)
    found = stages_of(work, workers, None)
    assert found == sorted(found or [])
    least = min(fullest(work, cut, workers) for cut in itertools.combinations_with_replacement(range(8), workers - 1))
    mine = tuple(sum(place < worker for place in found or []) for worker in range(1, workers))
    assert fullest(work, mine, workers) <= SLACK * least + 1e-9


def test_of_even_cuts_the_one_with_the_fewest_bytes_is_taken() -> None:
    seconds = [1.0] * 39 + [1.2]
    narrow = [1000] * 40
    narrow[20] = 10  # behind module 20, so that 21 modules are left of it
    assert sum(place == 0 for place in stages_of(chain(*seconds, sizes=tuple(narrow)), 2, None) or []) == 21


def test_what_the_user_placed_stays_and_the_rest_goes_around_it() -> None:
    work = chain(1.0, 1.0, 1.0, 1.0)
    work = replace(work, units=(replace(work.units[0], fixed=1), *work.units[1:]))
    found = places(choose(work, 2, speeds=FREE), work)
    assert found[0] == 1
    assert sorted(found) == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match=r"layers\.0.*7.*must be 0 to 1"):
        choose(replace(work, units=(replace(work.units[0], fixed=7), *work.units[1:])), 2)


def test_a_limit_moves_the_cut_and_one_that_is_too_small_is_told() -> None:
    work = chain(3.0, 1.0, 1.0, 1.0, memory=(10, 10, 10, 10))
    assert places(choose(work, 2, speeds=FREE), work) in ([0, 1, 1, 1], [0, 0, 1, 1])
    assert choose(work, 2, limits=[10, 30], speeds=FREE).memory == (10, 30)
    assert choose(work, 2, limits=[30, 10], speeds=FREE).memory == (30, 10)
    with pytest.raises(ConfigError, match=r"placement.*no cut fits.*layers"):
        choose(work, 2, limits=[19, 19], speeds=FREE)


# --- branches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("branches", "depth"), [(2, 3), (3, 2)])
def test_branches_go_side_by_side(branches: int, depth: int) -> None:
    work = fan(branches, depth)
    found = choose(work, branches, speeds=FAST)
    assert found.way == BRANCHES
    for branch in range(branches):
        assert len({found.locations[f"branch{branch}.{level}"] for level in range(depth)}) == 1
    assert found.seconds == pytest.approx(3 * (depth + 0.2), rel=1e-3)
    assert found.other is not None
    assert found.other > found.seconds


def test_a_chain_and_branches_that_talk_too_much_become_stages() -> None:
    assert choose(chain(*[1.0] * 6), 2, speeds=FAST).way == STAGES
    assert choose(fan(2, 3, size=1 << 40), 2, speeds=FAST).way == STAGES


def test_the_choice_is_told_and_is_the_same_each_time() -> None:
    work = fan(2, 3)
    first, second = choose(work, 2, 4), choose(work, 2, 4)
    assert first == second
    text = first.explain()
    for words in ("8 modules", "worker 0", "worker 1", "% of the work", "ms per step"):
        assert words in text
    assert 'match: "^branch0\\\\.0$" partition_dim: -1 location: ' in first.conf()


def test_a_split_that_is_slower_than_one_worker_says_so() -> None:
    pipeline = choose(chain(*[1.0] * 4), 2, microbatches=4, speeds=FREE)
    assert pipeline.seconds < pipeline.alone and "warning" not in pipeline.explain()
    found = choose(chain(*[1.0] * 4), 2, speeds=FAST)
    assert found.seconds > found.alone
    assert "slower than no split" in found.explain() and "placement: kManual" in found.explain()


# --- from a program ---------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x * 2).relu())  # type: ignore[no-any-return]


def costs_of(model: nn.Module) -> CostReport:
    made, division = cut(model, (), (torch.zeros(8, 6),), 1)
    return estimate_costs(made, model, division, (8,))


def test_steps_go_with_the_module_whose_result_they_read() -> None:
    model = Two()
    costs = costs_of(model)
    work = work_of(costs, model, {}, speeds=WorkerSpeeds(flops=1.0, memory=float("inf")))
    assert [unit.name for unit in work.units] == ["one", "two"]
    assert [task.unit for task in work.tasks] == [EVERYWHERE, 0, 0, 1]
    assert [task.reads for task in work.tasks] == [(), ((0, 8 * 6 * 4),), ((1, 8 * 16 * 4),), ((2, 8 * 16 * 4),)]
    assert [task.forward for task in work.tasks] == [48, 2 * 8 * 6 * 16, 8 * 16, 2 * 8 * 16 * 4]
    kept = costs.steps[0]
    assert work.units[0].memory == 3 * 4 * 7 * 16 + kept[2].kept + kept[3].kept
    assert [unit.memory for unit in work_of(costs, model, {}, copies=0).units] == [8 * 6 * 4 + 8 * 16 * 4, 0]


def test_a_module_that_stays_with_the_samples_is_no_unit() -> None:
    model = Two()
    costs = costs_of(model)
    work = work_of(costs, model, {"one": EVERYWHERE, "two": 1}, measured={"two": (7.0, 9.0)})
    assert [(unit.name, unit.fixed) for unit in work.units] == [("two", 1)]
    assert [task.unit for task in work.tasks] == [EVERYWHERE, EVERYWHERE, EVERYWHERE, 0]
    assert work.seconds(0) == 16.0
    assert choose(work, 2).locations == {"two": 1}
