"""Backup workers on the simulated network: the late workers and the gradients that make a step are known beforehand."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from fault_schedule import CALM, FAR, VIEWS, Fault, FaultSchedule
from fault_trial import Trial
from faulty_network import NetworkFaults
from seeds import SOAK, every, seeds
from simulation import STORM, ScriptedCluster, ScriptedWorker, job, parameters, total
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from topotrain.config.job import Grads, Reduce
from topotrain.core.server.consistency import STATIC
from topotrain.core.server.ordered_sum import ScratchBuffers, canonical_mean
from topotrain.extensions.backup_workers.backup_client import BackupWorkersClient

pytestmark = pytest.mark.simulated

SMALL = parameters(5, 70)
TWICE = NetworkFaults(delay=(0.0005, 0.004), late=0.03, duplicate=1.0, reorder=0.3)


def group(workers: int, spare: int, shards: int = 2, **more):
    return job(1, workers, shards, backup=spare, per_worker_batch=True, grads=Grads.kHidden, **more)


@dataclass
class Told:
    """What a test has noted: whose batch (worker, number) counted in which step, and what was shown at the end."""

    counted: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    late: list[tuple[int, int]] = field(default_factory=list)  # (worker, step)
    end: dict[tuple[int, int], tuple[int, list[torch.Tensor]]] = field(default_factory=dict)


def run(
    cluster: ScriptedCluster,
    batches: Callable[[int], int],
    takes: Callable[[int, int], float],
    gradient: Callable[[int, int, int], list[torch.Tensor]],
    epochs: int = 1,
) -> Told:
    """Every worker does so many batches an epoch; takes(worker, attempt): seconds for a step."""
    told = Told()

    def script(scripted: ScriptedWorker) -> None:
        scripted.visible = False
        me, attempt = scripted.me.index, 0
        scripted.open(3.0)
        for epoch in range(epochs):
            number, stream = 0, (epoch << 32) | STATIC | me
            while number < batches(me):
                cluster.sim.sleep(takes(me, attempt))
                attempt += 1
                step = scripted.steps
                outcome = scripted.step(gradient(epoch, me, number), marks=(stream, number, number))
                if outcome.late:
                    told.late.append((me, step))
                    assert outcome.next > step
                    scripted.steps = outcome.next
                else:
                    told.counted.setdefault(step, set()).add((me, epoch * batches(me) + number))
                    number += 1
            scripted.steps = scripted.client.extension(BackupWorkersClient).catch_up(epoch).next
            told.end[epoch, me] = scripted.steps, scripted.values()
        scripted.finish()

    cluster.play(script)
    return told


def ones(epoch: int, worker: int, number: int) -> list[torch.Tensor]:
    """Whole numbers, of other cells for each batch: sums are exact, and say which batches are in them."""
    parts = [torch.zeros(p.shape) for p in SMALL]
    parts[0][worker] = 1 << 4 * number
    parts[1][worker * 8 + number] = 1.0 + epoch
    return parts


def assert_counted(cluster: ScriptedCluster, *batches: tuple[int, int, int]) -> None:
    """The servers have these batches, each once: (epoch, worker, number)."""
    wanted = total([ones(*batch) for batch in batches])
    assert all(torch.equal(a.double(), 3.0 - b) for a, b in zip(cluster.values(), wanted, strict=True))


def check(cluster: ScriptedCluster, told: Told, workers: int, batches: Callable[[int], int], epochs: int = 1) -> None:
    """Every batch counted once, on every shard; all were shown the same at the end of each epoch."""
    every = [(w, e * batches(w) + n) for e in range(epochs) for w in range(workers) for n in range(batches(w))]
    assert sorted(pair for pairs in told.counted.values() for pair in pairs) == sorted(every)
    assert_counted(cluster, *((e, w, n) for e in range(epochs) for w in range(workers) for n in range(batches(w))))
    for epoch in range(epochs):
        first = told.end[epoch, 0]
        for worker in range(1, workers):
            step, values = told.end[epoch, worker]
            assert step == first[0]
            assert all(torch.equal(a, b) for a, b in zip(values, first[1], strict=True))


# --- the sets, by hand ------------------------------------------------------------------------------------------


def numbers(epoch: int, worker: int, number: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(1000 * epoch + 10 * worker + number)
    return [torch.randn(p.shape, generator=rng) for p in SMALL]


@pytest.mark.parametrize("reduce", [Reduce.kMean, Reduce.kSum])
def test_a_step_is_the_mean_over_exactly_the_workers_that_contributed(reduce):
    """Four workers, of which a step does without one; the reference knows only whose turn it was to be late."""
    slow = {0: 3, 1: 1, 2: 0, 3: 2}  # step -> worker whose work for it takes too long by a little

    def takes(worker: int, attempt: int) -> float:
        return 1.3 if slow.get(attempt) == worker else 1.0

    cluster = ScriptedCluster(group(4, 1, reduce=reduce), schema=SMALL, rate=0.125)
    told = run(cluster, lambda w: 4, takes, numbers)
    assert [step for _, step in told.late[:1]] == [0] and told.late[0][0] == 3
    tree = cluster.topology.sum_tree(0)
    values = [torch.full((p.count,), 3.0) for p in SMALL]
    for step in sorted(told.counted):
        members = dict(sorted(told.counted[step]))
        for index, value in enumerate(values):
            mean = torch.zeros_like(value)
            parts = {w: (1.0, numbers(0, w, n)[index]) for w, n in members.items()}
            canonical_mean(parts, tree, mean, ScratchBuffers(), reduce is Reduce.kMean)
            value.add_(mean, alpha=-0.125)
    assert all(torch.equal(a, b) for a, b in zip(cluster.values(), values, strict=True))


# --- every lateness of a small scope -------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "spare", "attempts"), [(2, 1, 2), (3, 2, 1)])
def test_every_batch_counts_once_whichever_worker_is_late_when(workers, spare, attempts):
    """Each of the first attempts of each worker is in time, late, or very late: all combinations."""
    paces = (1.0, 1.6, 4.1)
    outcomes = set()
    for choice in [*itertools.product(paces, repeat=workers * attempts)][:: 1 if SOAK else attempts]:
        cluster = ScriptedCluster(group(workers, spare), schema=SMALL)

        def takes(worker: int, attempt: int, choice=choice) -> float:
            return (choice[worker * attempts + attempt] if attempt < attempts else 1.0) + worker / 50

        told = run(cluster, lambda w: 2, takes, ones)
        check(cluster, told, workers, lambda w: 2)
        outcomes.add(tuple(told.late))
    assert len(outcomes) > 5, "many different ones must have been late, or this test shows nothing"


@pytest.mark.parametrize("weather", [STORM, TWICE])
def test_a_bad_network_changes_which_worker_is_late_and_nothing_else(weather):
    for seed in seeds(20):
        workers = 2 + seed % 3
        cluster = ScriptedCluster(group(workers, 1 + seed % (workers - 1), 1 + seed % 3), seed, weather, SMALL)

        def batches(worker: int, seed=seed) -> int:
            return 2 + (seed + worker) % 2

        told = run(cluster, batches, lambda *_, cluster=cluster: cluster.random.uniform(0.0, 0.05), ones, epochs=2)
        check(cluster, told, workers, batches, epochs=2)
        assert cluster.server(0, 0).state.version == len(told.counted)


# --- who is waited for ---------------------------------------------------------------------------------------------


def test_who_leaves_an_epoch_early_or_ends_is_not_waited_for():
    """Worker 0 leaves the loop after one batch, worker 1 ends its script; worker 2 does all of its own."""
    cluster = ScriptedCluster(group(3, 1), schema=SMALL)
    ends = {}

    def script(scripted: ScriptedWorker) -> None:
        scripted.visible = False
        scripted.open(3.0)
        me, number = scripted.me.index, 0
        while number < (1, 2, 5)[me]:
            cluster.sim.sleep(1.0 + me)
            outcome = scripted.step(ones(0, me, number), marks=(STATIC | me, number, number))
            scripted.steps = outcome.next if outcome.late else scripted.steps
            number += not outcome.late
        if me == 0:
            scripted.client.extension(BackupWorkersClient).through(0)
            cluster.sim.sleep(50.0)
        elif me == 2:
            scripted.client.extension(BackupWorkersClient).catch_up(0)
        ends[me] = cluster.sim.now
        scripted.finish()

    cluster.play(script)
    assert ends[2] < 40.0, "worker 0 had said that it is through"
    assert_counted(cluster, *((0, w, n) for w in range(3) for n in range((1, 2, 5)[w])))


# --- the real thing ------------------------------------------------------------------------------------------------


class Cells(nn.Module):
    def __init__(self, cells: int) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(cells))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return -self.cells[numbers].sum()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_loader_gives_again_what_came_too_late(streamed):
    """A ledger on real workers: 23 samples in batches of 2, so that the last round has not a batch for everybody."""

    class Flow(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.arange(23))

    cluster = ScriptedCluster(group(3, 1), schema=parameters(23))
    models, late, given = {}, [], []

    def script(scripted: ScriptedWorker) -> None:
        me = scripted.me
        model = models[me.index] = Cells(23)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        worker = cluster.worker(me, model, optimizer)
        data = DataLoader(Flow() if streamed else TensorDataset(torch.arange(23)), batch_size=2)
        loader = cluster.loader(worker, data, "broadcast")
        for epoch in range(2):
            for batch in loader:
                numbers = batch if streamed else batch[0]
                given.append((epoch, me.index, tuple(numbers.tolist())))
                optimizer.zero_grad()
                model(numbers).backward()
                cluster.sim.sleep(1.0 + (2.5 if me.index == 1 else 0.0))
                optimizer.step()
        late.append(worker.tally.late)
        assert worker.tally.samples == sum(
            len(set(n)) for n in {g[::2] for g in given if g[1] == me.index} for n in [n[1]]
        )
        worker.finish()

    cluster.play(script)
    assert torch.equal(cluster.values()[0], torch.full((23,), 2.0))
    assert sum(late) == len(given) - len(set(given)) > 0


@pytest.mark.parametrize("how", ["changed", "two backwards", "two batches", "clipped"])
def test_what_could_not_be_done_again_is_refused(how):
    cluster = ScriptedCluster(group(2, 1), schema=parameters(8))

    def script(scripted: ScriptedWorker) -> None:
        model = Cells(8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        worker = cluster.worker(scripted.me, model, optimizer)
        batches = iter(cluster.loader(worker, DataLoader(TensorDataset(torch.arange(8)), batch_size=2), "broadcast"))
        for (numbers,) in batches:
            optimizer.zero_grad()
            if how == "two batches":
                next(batches)
            if how == "clipped":
                worker.clip(1.0, 2.0)
            model(numbers.remainder_(8) if how == "changed" else numbers).backward()
            if how == "two backwards":
                model(numbers).backward()
            cluster.sim.sleep(1.0 + scripted.me.index)
            optimizer.step()

    words = "changed a batch of its loader in place" if how == "changed" else r"cluster\.backup = 1"
    with pytest.raises(RuntimeError, match=words):
        cluster.play(script)


# --- deaths ------------------------------------------------------------------------------------------------------


def tormented(seed: int, *fates: Fault, batches: int, weather: NetworkFaults) -> Trial:
    schedule = FaultSchedule("", batches, 1 + seed % 2, "static", seed % 3 != 0, fates)
    return Trial(group(3, 1, reduce=Reduce.kSum), seed, schedule, weather)


def test_the_others_go_on_while_one_is_away():
    """Worker 1 of three dies and comes back when all else is done: nobody has waited for it before that."""
    found = tormented(0, Fault(0, index=1, at=0.02, away=50.0), batches=30, weather=CALM).run()
    assert not found.wrong()
    ((death, _),), ((birth, _),) = found.deaths, found.restarts
    before = [moment for moment in found.commits[0] if death < moment < birth]
    assert len(before) > 40
    gaps = [after - start for start, after in itertools.pairwise([death, *before])]
    assert max(gaps) < 0.1, "no survivor ever waited"
    assert before[-1] < death + 2.0
    after = [moment for moment in found.commits[0] if moment > birth]
    assert len(after) >= 20, "what it had left is done by the one that came in its place"


@pytest.mark.parametrize("after", every(0, 40, 4))
def test_a_worker_that_dies_at_every_message_of_its_start_and_of_its_first_steps(after):
    for index in (0, 2):
        fates = (Fault(0, 0, index, after), Fault(0, 1, index, after // 2, away=0.01))
        found = tormented(after, *fates, batches=12, weather=(FAR, VIEWS, CALM)[after // 4 % 3]).run()
        assert found.kills == 2
        assert not found.wrong()
