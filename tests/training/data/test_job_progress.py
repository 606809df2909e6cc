"""`tt.progress`: the share of a job's samples that are done, in every layout, after restarts, and without a job."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from divided_loaders import Numbers, Stream
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process_job import cross_entropy, mlp, sgd
from script_job import job as job  # a fixture
from script_job import loader
from seeds import examples
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from worker_restarts import JobRun, Past, Script, Shape

import topotrain as tt
from topotrain.config.job import ConfigError, Job
from topotrain.config.topology import Address, Role
from topotrain.extensions.resume import script_resume
from topotrain.training import context
from topotrain.training.data.data_messages import Lease, LeaseRelease, LeaseRequest
from topotrain.training.data.job_progress import EpochShare
from topotrain.training.data.lease_queue import LeaseQueue
from topotrain.training.data.map_dataset import DataPlan

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:Detected call of")


@pytest.fixture(autouse=True)
def no_loop_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_loop", None)
    monkeypatch.setattr(context, "_plain", None)


def plan(group: int = 0, groups: int = 1, workers: int = 1, mode: Any = "static", rounds: bool = False) -> DataPlan:
    return DataPlan(group, groups, 0, workers, (), mode, rounds, 0, 1, group == 0)


# --- the arithmetic --------------------------------------------------------------------------------------------------


@given(st.integers(1, 120), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_with_whatever_batches_done_the_share_grows_to_one(batches, groups, workers, rounds, rng):
    cuts = sorted(rng.sample(range(batches + 1), min(6, batches + 1)))
    done = tuple((a, b) for a, b in zip(cuts[::2], cuts[1::2]) if a < b)
    for mode in ("static", "lease"):
        for group in range(groups):
            share = EpochShare.of(batches, plan(group, groups, workers, mode, rounds), done)
            figures = [share.behind(k) for k in range(share.left + 1)]
            assert figures == sorted(figures) and figures[0] >= 0 and figures[-1] == 1.0


# --- leases ----------------------------------------------------------------------------------------------------------


class Reader:
    """A group of one worker that reads leases in order; `at` batches of its last lease are read."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self.at = 0

    @property
    def read(self) -> int:
        return sum(lease.last - lease.first for lease in self.leases[:-1]) + self.at

    @property
    def passed(self) -> int:
        whole = bool(self.leases) and self.at == self.leases[-1].last - self.leases[-1].first
        return len(self.leases) - (bool(self.leases) and not whole)


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(1, 4), st.integers(1, 300), st.randoms(use_true_random=False))
def test_a_lease_tells_what_the_other_groups_have_done(groups: int, total: int, rng: random.Random) -> None:
    """Also behind deaths, where what was applied counts, and behind a loop that was left early."""
    queue, readers = LeaseQueue(groups, 2), [Reader() for _ in range(groups)]
    told = [0] * groups  # batches that are known to be done, of each group's present leases
    before = 0  # done by former processes
    gone: set[int] = set()
    for _ in range(120):
        group = rng.randrange(groups)
        reader, who = readers[group], Address(Role.WORKER, group, 0)
        if group in gone:
            continue
        if reader.leases and reader.at < (length := reader.leases[-1].last - reader.leases[-1].first):
            chance = rng.random()
            if chance < 0.05:
                applied = {run.lease: run.last - run.first for run in reader.leases[:-1]}
                applied[reader.leases[-1].lease] = reader.at
                queue.group_restarted(group, applied, False)
                before, told[group], readers[group] = before + reader.read, 0, Reader()
            elif chance < 0.08 and groups > 1 and group:
                free = LeaseRelease(0, len(reader.leases) - 1, reader.leases[-1].first + reader.at)
                assert queue.handle(who, free) is not None
                told[group] = reader.read
                gone.add(group)
            else:
                reader.at = rng.randint(reader.at, length)
            continue
        ask = LeaseRequest(0, len(reader.leases), total, 7, reader.passed, False)
        told[group] = reader.read
        replies = [reply for to, reply in queue.handle(who, ask) if to == who]
        assert len(replies) == 1 and isinstance(replies[0], Lease)
        lease = replies[0]
        if lease.last > lease.first:
            assert lease.done_by_others == before + sum(told) - told[group]
            other = who._replace(index=1)  # of the same group, and perhaps later
            assert queue.handle(other, ask) == [(other, lease)]
            reader.leases.append(lease)
            reader.at = 0
    copy = LeaseQueue(groups, 2)
    copy.load_state_dict(queue.state_dict())
    assert copy.state_dict() == queue.state_dict()


def shuffled(n: int = 103, size: int = 3, **more: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(n), size, shuffle=True, **more)


def figure(run: JobRun, who: Address) -> float:
    """What `tt.progress` would be in this process."""
    world = run.worlds.get(who)
    if world is None or not world.loader.passes:
        return 0.0
    passes = world.loader.passes - 1
    return (passes + world.loader.share_since(passes)) / run.script.epochs


MAIN = Address(Role.WORKER, 0, 0)
SHAPES = [
    Shape(),
    Shape(3),
    Shape(2, 1, "broadcast", True),
    Shape(1, 3, "static"),
    Shape(2, 2, "static", True),
    Shape(1, 3, "lease"),
]


def name_of(shape: Shape) -> str:
    return f"{shape.groups} x {shape.workers} {shape.mode}{' in rounds' * shape.per_worker}"


@pytest.mark.parametrize(
    ("shape", "processes"),
    [(shape, 0) for shape in SHAPES] + [(Shape(1, 3, "lease"), 2)],
    ids=lambda value: name_of(value) if isinstance(value, Shape) else str(value),
)
def test_in_every_layout_it_grows_to_one_and_is_the_same_in_a_group(shape: Shape, processes: int) -> None:
    run = JobRun(shape, Script(partial(shuffled, num_workers=processes), epochs=2))
    seen: dict[Address, list[float]] = {who: [] for who in run.lease_server.workers}
    live = list(range(shape.groups))
    rng = random.Random(1)
    while live:
        group = rng.choice(live)
        if not run.step(group):
            live.remove(group)
            continue
        for who in run.group(group):
            seen[who].append(figure(run, who))
    for who, figures in seen.items():
        assert figures == sorted(figures) and 0 < figures[0] < 0.2 and figures[-1] <= 1.0
        assert figures == seen[who._replace(index=0)]
        if shape.mode != "lease":
            # The figures of any other run: k batches of n.
            own = len(figures) // 2
            assert figures == [
                *(k / own / 2 for k in range(1, own + 1)),
                *((1 + k / own) / 2 for k in range(1, own + 1)),
            ]
    # The group with the last batch knows nearly all others to be done. A loader with processes leases them early.
    assert max(figures[-1] for figures in seen.values()) > (0.75 if processes else 0.9)
    if shape.groups == 1:
        assert seen[MAIN][-1] == 1.0


@pytest.mark.parametrize("shape", [Shape(3), Shape(2, 2, "static", True)], ids=name_of)
def test_a_worker_that_comes_back_goes_on_with_the_same_figures(shape: Shape) -> None:
    script = Script(shuffled, epochs=2)
    plain, run = JobRun(shape, script), JobRun(shape, script)
    figures: list[list[float]] = [[], []]
    for at, each in enumerate((plain, run)):
        for step in range(40):
            each.step(step % shape.groups)
            figures[at].append(figure(each, Address(Role.WORKER, step % shape.groups, 0)))
            if each is run and step % 7 == 3:
                each.restart(step % shape.groups)
    assert figures[0] == figures[1]


@pytest.fixture
def snapshots_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_resume, "takes_snapshots", lambda job, topology: True)


@pytest.mark.parametrize("shape", [Shape(2, 1, "broadcast", True), Shape(1, 3, "static")], ids=name_of)
def test_a_job_that_goes_on_from_a_snapshot_has_the_same_figures(snapshots_are_taken: None, shape: Shape) -> None:
    script = Script(shuffled, epochs=2)

    def go(run: JobRun, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            for group in range(shape.groups):
                run.step(group)
                found.append(figure(run, Address(Role.WORKER, group, 0)))
        return found

    plain = JobRun(shape, script)
    wanted = go(plain, 11)
    run = JobRun(shape, script)
    go(run, 4)
    for group in range(shape.groups):
        run.step(group, snapshot=1)
    done = run.positions()
    for group in range(shape.groups):
        run.step(group)
    later = JobRun(shape, script, Past(run.snapshot(1).blobs, done))
    assert go(later, 6) == wanted[5 * shape.groups :]


def test_a_scheduler_that_steps_once_more_when_it_is_restored_has_the_right_figure() -> None:
    """The process died between the optimizer's step and the scheduler's."""
    runs: list[JobRun] = []

    def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda _: 1 - figure(runs[-1], MAIN) if runs else 1.0)

    script = Script(partial(shuffled, 60, 3), epochs=2, schedule=schedule)
    rates = []
    for dies in (100, 12, 26):
        runs.clear()
        run = JobRun(Shape(), script)
        runs.append(run)
        run.run(dies)
        if dies < 100:
            run.restart(0)
            run.run()
        rates.append([step.rates[0] for step in run.seen])
    assert len(set(rates[0])) == 40
    assert rates[0] == rates[1] == rates[2]


# --- what a script sees ----------------------------------------------------------------------------------------------


def rates(batches: DataLoader[Any], epochs: int = 3, accumulate: int = 1) -> tuple[list[float], list[float]]:
    """A script with a schedule over the whole job: the rate of each step, and the progress behind it."""
    torch.manual_seed(3)
    model = mlp()
    optimizer = sgd(model)
    schedule = LambdaLR(optimizer, lambda _: 1 - tt.progress())
    model, optimizer, batches = tt.prepare(model, optimizer, batches)
    found, shares = [], []
    for _ in tt.epochs(epochs):
        for at, (x, y) in enumerate(batches, 1):
            cross_entropy(model, x, y).backward()
            if at % accumulate == 0:
                found.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            shares.append(tt.progress())
    assert tt.progress() == 1.0
    return found, shares


def test_a_schedule_over_the_job_is_the_same_with_and_without_a_job(job: Any) -> None:
    plain = rates(loader())
    assert plain[1] == [(e + k / 5) / 3 for e in range(3) for k in range(1, 6)]
    assert [rate / plain[0][0] for rate in plain[0]] == pytest.approx([1 - k / 15 for k in range(15)])
    here = job()
    assert tt.progress() == 0.0
    assert rates(loader()) == plain
    here.finish()


def test_before_a_loop_nothing_is_done_and_behind_it_all() -> None:
    assert tt.progress() == 0.0
    model = mlp()
    tt.prepare(model, sgd(model), loader())
    assert tt.progress() == 0.0
    for number in tt.epochs(4):
        assert tt.progress() == number / 4
    assert tt.progress() == 1.0
    for _ in tt.epochs(0):
        pass
    assert tt.progress() == 1.0
    for number in tt.epochs(2):  # of several loops, that of the present one
        assert tt.progress() == number / 2
        if number == 1:
            break
    assert tt.progress() == 0.5


def test_it_does_not_fall_where_a_pass_begins_again(job: Any) -> None:
    here, model = job(), mlp()
    model, optimizer, batches = tt.prepare(model, sgd(model), loader())
    found = []
    for _ in tt.epochs(1):
        for most in (4, 2):
            for x, y in islice(batches, most):
                optimizer.zero_grad()
                cross_entropy(model, x, y).backward()
                optimizer.step()
                found.append(tt.progress())
    assert found == sorted(found) and found[3] == 0.8
    here.finish()


def test_a_trainer_goes_by_its_train_steps() -> None:
    found: list[float] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found.append(tt.progress())
        return cross_entropy(model, *batch)

    model = mlp()
    tt.Trainer(model, loss, loader(), job=Job(train_steps=8), optimizer=sgd(model)).fit()
    assert found == [k / 8 for k in range(1, 9)]


class Counted(Stream):
    def __len__(self) -> int:
        return self.n


NUMBER = "tt.progress: needs the number of batches in an epoch: give the loader to tt.prepare"


@pytest.mark.parametrize(
    ("data", "epochs", "words"),
    [
        (lambda: DataLoader(Stream(12), 4), tt.epochs, f"{NUMBER}, and the dataset"),
        (lambda: None, tt.epochs, NUMBER),
        (
            lambda: DataLoader(Counted(12), 4),
            range,
            r"needs the number of epochs: .* in tt.epochs\(count\)",
        ),
        (lambda: DataLoader(Counted(12), 4), tt.epochs, ""),
    ],
    ids=["a stream without a length", "no loader", "a loop over range", "a stream with a length"],
)
@pytest.mark.parametrize("in_a_job", [False, True])
def test_a_job_of_unknown_length_is_an_error_that_says_what_to_write(
    job: Any, in_a_job: bool, data: Callable[[], Any], epochs: Any, words: str
) -> None:
    if in_a_job:
        job()
    model, found = nn.Linear(1, 1), []
    _, optimizer, batches = tt.prepare(model, sgd(model), data())
    for _ in epochs(2):
        for x in batches if batches is not None else [torch.ones(4)]:
            model(x.float().unsqueeze(1)).sum().backward()
            with pytest.raises(ConfigError, match=words) if words else nullcontext():
                found.append(tt.progress())
            optimizer.step()
    # Without a job, the batches are counted by the backwards; with one, by the loader.
    assert found == ([] if words else [(epoch + k / 3) / 2 for epoch in range(2) for k in (1, 2, 3)])
