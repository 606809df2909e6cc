"""A fresh process goes on where the one before it ended: data, random numbers, rates, and what it was asked to keep."""

import gc
import json
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from divided_loaders import KINDS, Numbers, Stream
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process_job import mlp
from reports import TextList
from safetensors.torch import load, save
from script_job import jobs, loader
from seeds import SOAK, examples, seeds, soaked
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from worker_restarts import JobRun, Past, Script, Shape

import topotrain as tt
from topotrain.compat.integrations.external_loop import LoopState, going_on, tie
from topotrain.config.job import ConfigError, Job
from topotrain.core import events
from topotrain.extensions.resume import script_resume
from topotrain.extensions.resume.lr_schedulers import OptimizerRates
from topotrain.extensions.resume.state_serialization import UnserializableState, pack, unpack
from topotrain.extensions.resume.worker_state import WorkerState
from topotrain.extensions.resume.worker_state_client import WorkerStateClient
from topotrain.extensions.resume.worker_state_store import EPOCH
from topotrain.training.data import batch_ranges
from topotrain.training.rng_state import stand

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:Detected call of")

NATURAL = Shape()
REPEATABLE = [kind for kind in KINDS if kind not in ("batch sampler", "stream of items")]


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_search() -> Iterator[None]:
    """A search for schedulers looks at all objects: those of pytest and of torch's compiler are left out."""
    sgd(nn.Linear(1, 1))  # imports the compiler
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def abandoned_loaders_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of a loader that a death has abandoned is waited for when it is collected: five seconds each."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)


@pytest.fixture
def snapshots_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs of `worker_restarts` have no servers that would be asked."""
    monkeypatch.setattr(script_resume, "takes_snapshots", lambda job, topology: True)


def shuffled(n: int = 23, size: int = 4, **more: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(n), size, shuffle=True, **more)


class Noisy(Numbers):
    """Items that are not the same twice, as augmented images are not."""

    def __getitem__(self, i: int) -> torch.Tensor:
        return super().__getitem__(i) * 1000 + random.randrange(100) * 10 + torch.randint(10, ())


def told(run: JobRun) -> list[tuple[Any, ...]]:
    return [(step.epoch, step.samples, step.rng, step.rates[0]) for step in run.seen]


def data(run: JobRun) -> list[tuple[int, list[int]]]:
    return [(step.epoch, step.samples) for step in run.seen]


# --- a group's processes come back -----------------------------------------------------------------------------------


BACK = list(zip(REPEATABLE, cycle([False, True]), strict=False))


@pytest.mark.parametrize(("kind", "plain_range"), soaked(BACK[::2], BACK[1::2]))
def test_a_worker_that_comes_back_reads_the_rest_of_the_same_order(kind, plain_range):
    script = Script(KINDS[kind], epochs=2, plain_range=plain_range)
    plain = JobRun(NATURAL, script)
    steps = plain.run()
    slow = "process" in kind or kind == "persistent"
    for dies in (steps // 2 + 1,) if slow else (1, steps // 2 - 1, steps // 2, steps // 2 + 1):
        run = JobRun(NATURAL, script)
        run.run(dies)
        run.step(0, commits=False)  # it dies with a step that is applied nowhere
        run.restart(0)
        run.run()
        # The second epoch's order comes from a generator that the first one's training has moved.
        first = [(e, s) for e, s in data(plain) if e == 0 or dies > steps // 2 - 1]
        assert [(e, s) for e, s in data(run)][: len(first)] == first, dies
        assert Counter(map(sum, (s for e, s in data(run) if e == 1))).total() == steps // 2 or kind == "weighted"


HALVES = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)


def rates(run: JobRun, who: Any = None) -> list[float]:
    return [step.rates[0] for step in run.seen if who is None or step.who == who]


def rates_of(script: Script) -> list[float]:
    """The rates of a run that nothing disturbs."""
    run = JobRun(NATURAL, script)
    run.run()
    return rates(run)


@pytest.mark.parametrize(("size", "per"), soaked([(4, "step"), (23, "epoch")], [(23, "step"), (4, "epoch")]))
def test_a_rate_is_that_of_its_step_where_the_process_dies_between_the_step_and_the_schedulers(per, size):
    """Else the workers of a group would disagree about it, since the others may have saved theirs."""
    script = Script(partial(shuffled, size=size), 3 if size == 4 else 6, HALVES, per)
    expected = rates_of(script)
    for steps in (1, *range(2, len(expected), 1 if SOAK else 3)):
        run = JobRun(NATURAL, script)
        run.run(steps)  # the scheduler's step would follow
        run.restart(0)
        run.run()
        # At the first step it is not known yet that the scheduler steps with each: it is one step behind.
        behind = per == "step" and steps == 1
        assert rates(run) == ([expected[0], *expected[:-1]] if behind else expected), steps


@pytest.mark.parametrize(
    ("per", "ahead"),
    [("step", (0,)), ("step", (1,)), ("step", ()), ("epoch", ()), ("epoch", (0, 1))],
)
def test_workers_agree_about_the_rate_where_one_has_asked_for_the_second_batch(per, ahead):
    """The other one learns from its state what the scheduler does."""
    script = Script(shuffled, 2, HALVES, per)
    run, expected = JobRun(Shape(2), script), rates_of(script)
    run.run(1)
    for who in run.lease_server.workers:
        if who.index in ahead:
            run._advance(who)
    run.restart(0)
    run.run()
    behind = per == "step" and not ahead
    for who in run.lease_server.workers:
        assert rates(run, who) == ([expected[0], *expected[:-1]] if behind else expected), who


LEFT = [Shape(), Shape(2, 1, "broadcast", True), Shape(1, 3, "static"), Shape(2, 2, "static", True)]


@pytest.mark.parametrize("shape", LEFT)
def test_how_many_batches_of_a_pass_are_left_is_known_before_they_are_read(shape):
    script = Script(partial(shuffled, 103, 3), epochs=2)
    run = JobRun(shape, script)
    who = run.lease_server.workers[0]

    run.run(4 * shape.groups)
    run.restart(0)
    run._advance(who)  # its process begins
    told = run.worlds[who].continuing.batches_left(0)
    applied = sum(step.who == who for step in run.seen)
    assert told == len(run.worlds[who].loader) - applied and applied

    run = JobRun(shape, script)
    run.run(3 * shape.groups)
    for group in range(shape.groups):
        run.step(group, snapshot=1)
    done = run.positions()
    run.run(shape.groups)
    past = Past(run.snapshot(1).blobs, done)
    for other in (shape, Shape(1, 2, "static")):
        run = JobRun(other, script, past)
        run._advance(who)  # its process begins
        left = run.worlds[who].continuing.batches_left(0)
        again = JobRun(other, script, past)
        again.run()
        assert left == sum(step.who == who and step.epoch == 0 for step in again.seen) > 0


# --- a job is continued ----------------------------------------------------------------------------------------------


class Average:
    """Something of the script's own that a restart must not lose."""

    def __init__(self) -> None:
        self.total, self.rows = 0, torch.zeros(3)

    def step(self) -> None:
        self.total += 1
        self.rows += torch.rand(3)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.rows = state["total"], state["rows"]


@pytest.mark.parametrize("backup", [0, 1])
def test_with_backup_workers_the_state_at_a_snapshot_is_left_before_the_next_pass(backup):
    """Others may have batches left of this one, which they could draw again from no later state."""
    run = JobRun(Shape(backup=backup), Script(shuffled, epochs=2))
    (who,) = run.lease_server.workers
    run.run(5)
    run.step(0, snapshot=1)  # its last batch of the first pass
    run.run(1)
    condition = WorkerState.from_bytes(run.deposits.snapshot_states(1)[who].numpy().tobytes())
    assert condition.passes == (0 if backup else 1)
    assert bool(condition.now) == bool(backup)


def continued(script: Script, at: int, number: int = 1) -> JobRun:
    """The rest of a job that goes on from a snapshot behind this step."""
    run = JobRun(NATURAL, script)
    run.run(at - 1)
    run.step(0, snapshot=number)
    done = run.positions()
    run.run(1)
    later = JobRun(NATURAL, script, Past(run.snapshot(number).blobs, done))
    later.run()
    return later


EXACT = [kind for kind in KINDS if kind != "persistent"]


@pytest.mark.parametrize("kind", soaked(EXACT[1::2], EXACT[::2]))
def test_a_job_that_is_continued_has_the_bits_of_one_that_was_not_interrupted(kind):
    script = Script(KINDS[kind], 2, partial(lr_scheduler.StepLR, step_size=2, gamma=0.5), kept=lambda: {"a": Average()})
    plain = JobRun(NATURAL, script)
    steps = plain.run()
    (who,) = plain.lease_server.workers
    average = plain.worlds[who].here.kept["a"]
    for at in (steps // 2 + 1,) if "process" in kind else (1, steps // 2, steps // 2 + 1, steps):
        later = continued(script, at)
        assert told(later) == told(plain)[at:], at
        assert [step.rates for step in later.seen] == [step.rates for step in plain.seen][at:]
        kept = later.worlds[who].here.kept["a"]
        assert kept.total == average.total and torch.equal(kept.rows, average.rows)
        assert later.worlds[who].worker.tally.steps == steps


@pytest.mark.parametrize(
    ("processes", "ahead"), soaked([(0, None), (0, 3), (2, 1)], [(2, None), (0, 0), (0, 1), (2, 3)])
)
def test_augmented_samples_are_the_same_when_a_job_is_continued(snapshots_are_taken, processes, ahead):
    """Also where a loop reads ahead: random numbers of later batches are drawn before the model draws its own."""
    more = {} if ahead is None else {"ahead": ahead}
    script = Script(lambda: DataLoader(Noisy(20), 3, shuffle=True, num_workers=processes), 2, **more)
    plain = JobRun(NATURAL, script)
    plain.run()
    for at in (10,) if processes else (3, 7, 8, 13):
        assert told(continued(script, at, 4)) == told(plain)[at:], at


SHAPES = [
    Shape(),
    Shape(3),
    Shape(2, 1, "broadcast", True),
    Shape(3, 3, "static"),
    Shape(2, 2, "static", True),
    Shape(1, 3, "lease"),
]


@pytest.mark.parametrize("seed", seeds(40))
def test_whatever_dies_and_on_another_layout_every_sample_of_an_epoch_is_read_once(snapshots_are_taken, seed):
    """Loops may read ahead. A stream is read again up to what is applied."""
    rng = random.Random(seed)
    stream, n = rng.random() < 0.3, rng.randint(30, 90)
    make = (lambda: DataLoader(Stream(n, shuffle=True), 3)) if stream else partial(shuffled, n, 3)
    script = Script(make, epochs=3, plain_range=rng.random() < 0.5, ahead=rng.choice((-1, -1, 1, 3)))
    run = JobRun(rng.choice(SHAPES), script)
    seen: list[Any] = []
    for number in range(1, rng.randint(1, 3) + 1):
        for _ in range(rng.randint(0, 3)):
            run.run(rng.randint(0, 9))
            run.restart(rng.randrange(run.shape.groups))
        for group in range(run.shape.groups):
            run.step(group, snapshot=number)
        done, applied = run.positions(), list(run.seen)
        for group in range(run.shape.groups):
            run.step(group)
        past = Past(run.snapshot(number).blobs, done)
        if len(past.blobs) < len(run.lease_server.workers):
            break  # a script had ended: no such snapshot
        seen += applied
        run = JobRun(rng.choice(SHAPES), script, past)
    run.run()
    seen += run.seen
    for epoch in range(3):
        assert sorted(s for step in seen if step.epoch == epoch for s in step.samples) == list(range(n)), epoch


# --- the real thing --------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path, monkeypatch):
    """As test_front.jobs, in a folder for each."""
    folders = (tmp_path / str(number) for number in range(9))
    made = []

    def enter(past: Past | None = None, **fields: Any) -> Any:
        folder = next(folders)
        folder.mkdir()
        made.append(jobs(folder, monkeypatch))
        here = next(made[-1])(**fields)
        here.context.resumed = past
        return here

    yield enter
    for one in made:
        next(one, None)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Servers bring back an optimizer's state; here it has none."""
    return torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.parametrize(
    ("fields", "leaves"),
    [
        ({"on_failure": "kStop"}, True),
        ({"on_failure": "kStop", "snapshot_s": 0}, False),
        ({"on_failure": "kContinue", "snapshot_s": 0}, True),
    ],
)
def test_a_snapshot_waits_for_workers_that_have_begun_a_pass_whatever_follows_a_death(job, monkeypatch, fields, leaves):
    """A worker of which nobody knows that it has begun would be missing in a snapshot, unnoticed."""
    left: list[int] = []
    monkeypatch.setattr(WorkerStateClient, "save", lambda _, number, data: left.append(number))
    here = job(**fields)
    model, optimizer, batches = tt.prepare(made := mlp(), sgd(made), loader())
    for _ in tt.epochs(1):
        x, y = next(iter(batches))
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    here.close()
    assert (EPOCH in left) == leaves


def test_keep_takes_what_has_a_state_under_one_name_each(job):
    tt.keep(anything=Average())
    with pytest.raises(ConfigError, match=r"tt.keep number.*int.*must have state_dict"):
        tt.keep(number=3)
    job()
    average = Average()
    tt.keep(average=average)
    tt.keep(average=average)
    with pytest.raises(ConfigError, match=r"tt.keep average.*must be the object that has the name"):
        tt.keep(average=Average())


class Counted(LoopState):
    """The state of a library's loop."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}


def test_the_state_of_another_librarys_loop_comes_back(job):
    left = WorkerState(2, 7, kept={"loop of the library": pack({"count": 5}, {})}, groups=[{"lr": 0.1}])
    here = job(Past({(0, 0): left.to_bytes()}, {2: ((0, 2),)}), on_failure="kContinue")
    model, state = mlp(), Counted()
    share, _ = tie(model, [sgd(model)], loader(), counted=True, state=state)
    position = going_on()
    assert state.restored == {"count": 5} and position is not None
    assert (position.first, position.steps, position.batches_left(2), len(share)) == (2, 7, 3, 5)
    assert not here.heard(events.Unrepeatable)


@pytest.mark.parametrize("why", ["", "this version resumes in another way"])
def test_a_loop_that_counts_batches_does_not_come_back_where_they_have_no_number(job, why):
    model, batches = mlp(), loader() if why else DataLoader(Stream(40), 8)
    here = job()
    here.context.place = replace(here.context.place, identity=replace(here.context.place.identity, incarnation=0))
    tie(model, [sgd(model)], batches, counted=True, unrepeatable=why)
    assert here.heard(events.Unrepeatable)[0].text == why or "the loader has no length" in here.told[0].text
    assert here.context.continuing is None
    job()  # its worker is of a later incarnation
    with pytest.raises(ConfigError, match=r"restart.*must not happen here: (this version|the library's loop counts)"):
        tie(model, [sgd(model)], batches, counted=True, unrepeatable=why)


def fitted(steps: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model of a Trainer that has made some steps, and where the generator stands."""
    torch.manual_seed(3)
    model = mlp()
    tt.Trainer(model, nn.CrossEntropyLoss(), loader(), job=Job(train_steps=steps), optimizer=sgd(model)).fit()
    now = stand()
    tt.leave()
    return model, now


def test_a_trainer_goes_on_with_the_step_that_is_next(job):
    """Its first epoch has five steps."""
    (expected, _), (_, begin), (model, now) = fitted(12), fitted(5), fitted(7)
    groups = [{"lr": sgd(model).param_groups[0]["lr"]}]
    left = WorkerState(1, 7, epoch_pass=1, now=now, begin=begin, groups=groups)
    here = job(Past({(0, 0): left.to_bytes()}, {1: ((0, 2),)}), train_steps=12)
    tt.Trainer(model, nn.CrossEntropyLoss(), loader(), optimizer=sgd(model)).fit()
    here.finish()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in expected.state_dict().items())
    assert here.heard(events.Finished)[0].steps == 12


def test_schedulers_of_one_class_need_names():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    told = TextList()
    kept: dict[str, object] = {}
    rates = OptimizerRates((optimizer,), kept, told)
    rates.find()
    ones = [lr_scheduler.StepLR(optimizer, n) for n in (2, 3)]
    whole = lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.LinearLR(optimizer)], [2]
    )
    rates.find()
    assert rates.pack(WorkerState(0, 0)).schedulers.keys() == {"SequentialLR"}
    assert len(told) == 1 and "several LR schedulers StepLR" in told[0]
    kept |= {"first": ones[0], "second": ones[1]}
    rates = OptimizerRates((optimizer,), kept, told)
    rates.find()
    assert rates.pack(WorkerState(0, 0)).schedulers.keys() == {"SequentialLR", "tt.keep first", "tt.keep second"}
    assert len(told) == 1
    mark = rates.mark()
    ones[1].step()
    assert rates.mark() != mark and whole is not None


# --- the blob --------------------------------------------------------------------------------------------------------


def test_states_are_packed_without_loss_and_nothing_else_is_packed():
    state = {
        "milestones": Counter({30: 1, 80: 2}),
        "order": OrderedDict(b=(1, 2.5, None), a=[True, "x", float("inf")]),
        3: torch.arange(4, dtype=torch.int16),
    }
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(pack(state, tensors)))
    found = unpack(packed, tensors)
    assert torch.equal(found.pop(3), state.pop(3)) and found == state
    assert [type(found[name]) for name in found] == [Counter, OrderedDict]
    for bad in (print, {1, 2}, object(), [lambda: 0], {"a": 1j}):
        with pytest.raises(UnserializableState):
            pack(bad, {})
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(UnserializableState, match="too deeply"):
        pack(deep, {})


def blob() -> bytes:
    rng = {"torch": torch.get_rng_state()}
    groups = [{"lr": 0.1}]
    return WorkerState(3, 40, 0, 3, 3, "seed", groups=groups, begin=rng, buffers={"n": torch.ones(2)}).to_bytes()


def test_hostile_bytes_are_refused():
    good = blob()
    rng = random.Random(1)
    for _ in range(400):
        bad = bytearray(good[: rng.randrange(len(good))] if rng.random() < 0.5 else good)
        for _ in range(rng.randrange(1, 4)):
            if bad:
                bad[rng.randrange(min(len(bad), 900))] = rng.randrange(256)
        try:
            WorkerState.from_bytes(bytes(bad))
        except ConfigError:
            continue  # what is read all the same has other numbers in it: a blob has no checksum of its own
    held = load(good)
    for change in ({"json": torch.zeros(3)}, {"other/x": torch.zeros(1)}, {"json": torch.tensor([123, 125]).byte()}):
        with pytest.raises(ConfigError, match="a worker's state"):
            WorkerState.from_bytes(save(held | change))
    for field, value in (
        ("passes", -5),
        ("passes", "3"),
        ("steps", 1 << 63),
        ("drawn", "x"),
        ("kept", []),
        ("more", 1),
    ):
        text = json.loads(held["json"].numpy().tobytes()) | {field: value}
        wrong = {"json": torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)}
        with pytest.raises(ConfigError, match="a worker's state"):
            WorkerState.from_bytes(save(held | wrong))


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40))),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))),
)
def test_runs(done, positions):
    done = batch_ranges.merged(done)
    gone = {n for first, last in done for n in range(first, last)}
    rest = list(batch_ranges.left(range(60), done))
    assert rest == [n for n in range(60) if n not in gone]
    assert [batch_ranges.nth(done, i) for i in range(10)] == [n for n in range(60) if n not in gone][:10]
    assert all(batch_ranges.left_below(done, n) == len([x for x in rest if x < n]) for n in range(60))
    more = {batch_ranges.nth(done, i) for first, last in positions for i in range(first, last)}
    assert {n for a, b in batch_ranges.origin(done, positions) for n in range(a, b)} == gone | more
