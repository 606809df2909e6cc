"""The moment of a snapshot: whatever scripts do with one batch, a job that goes on from it repeats nothing.

Scripts make several steps with one batch, of several optimizers, and change values between them (`tt.assign`). A script
goes on where it had asked for a batch. Undisturbed runs are compared with resumed ones, bit for bit.
"""

import random
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from seeds import SOAK, seeds
from sim_disks import PublishedSnapshot
from simulation import STORM, VIEWS, ScriptedCluster, ScriptedWorker, job, parameters, same
from single_servers import ServerHarness, server
from snapshot_archive import Archive
from torch import nn

from topotrain.config.job import Job
from topotrain.core import protocol as m
from topotrain.core.model.schema import Schema, slice_map_for
from topotrain.core.optim.adapter import describe_all, hyper
from topotrain.core.server.consistency import STATIC
from topotrain.extensions.assignment.assignment_client import AssignmentPlace
from topotrain.extensions.checkpointing.checkpoint_extension import snapshots_of
from topotrain.extensions.checkpointing.snapshot_messages import SnapshotRequest
from topotrain.extensions.resume.worker_state_client import WorkerStateClient
from topotrain.extensions.resume.worker_state_store import EPOCH

pytestmark = pytest.mark.simulated

PARAMETERS = parameters(70, 200)
BATCHES, EPOCHS = 5, 2
ASSIGN = -1
"""In the place of an optimizer's number: a change of values."""

Script = tuple[tuple[int, ...], ...]
"""What is done with each batch, in order."""


def drawn(seed: int, optimizers: int) -> Script:
    """Steps and assignments in any order, at least one step with each batch."""
    rng = random.Random(seed)
    script = []
    for _ in range(BATCHES * EPOCHS):
        done = [rng.choice([ASSIGN, *range(optimizers)]) for _ in range(rng.randint(0, 3 if optimizers > 1 else 0))]
        if optimizers == 1:
            done += [ASSIGN] * rng.randint(0, 2)
        done.insert(rng.randint(0, len(done)), rng.randrange(optimizers))
        script.append(tuple(done))
    return tuple(script)


def optimizers_of(count: int) -> tuple[list[nn.Parameter], list[torch.optim.Optimizer]]:
    """Optimizers whose state tells how often each of them has stepped."""
    tensors = [nn.Parameter(torch.zeros(p.shape)) for p in PARAMETERS]
    if count == 1:
        return tensors, [torch.optim.SGD(tensors, lr=0.5, momentum=0.5)]
    adam = torch.optim.Adam(tensors[:1], lr=0.1)
    return tensors, [adam, torch.optim.SGD(tensors[1:], lr=0.5, momentum=0.5)]


@dataclass(frozen=True, kw_only=True)
class Frozen(PublishedSnapshot):
    """A snapshot with the optimizers' state."""

    entries: dict[str, torch.Tensor] = field(default_factory=dict)

    def state(self, parameter: str, entry: str, lo: int, out: torch.Tensor) -> None:
        out.copy_(self.entries[f"{parameter}/{entry}"][lo : lo + out.numel()])


class Run:
    """One start of a job whose workers do what the script says.

    Args:
        asks: the host asks for a snapshot before these actions of the first worker.
        past: the snapshot and the batch from which the job goes on.
    """

    def __init__(
        self,
        job: Job,
        script: Script,
        optimizers: int,
        seed: int = 0,
        weather=VIEWS,
        asks: frozenset[int] = frozenset(),
        past: tuple[Frozen, int] | None = None,
    ) -> None:
        self.script, self.optimizers, self.asks, self.begin = script, optimizers, asks, 0 if past is None else past[1]
        tensors, made = optimizers_of(optimizers)
        self.hyper = hyper(*made)
        parts = tuple(replace(p, optimizer=i) for i, p in enumerate(PARAMETERS)) if optimizers > 1 else PARAMETERS
        self.cluster = ScriptedCluster(job, seed, weather, parts, resumed=None if past is None else past[0])
        self.cluster.schema = replace(self.cluster.schema, optimizer=describe_all(made, tensors).to_text())
        self.archive = Archive(self.cluster)
        self.cluster.play(self._play)
        self.values = self.cluster.values()

    def _play(self, worker: ScriptedWorker) -> None:
        worker.open()
        known, actions, between = 0, 0, 0
        for number in range(self.begin, len(self.script)):
            epoch, batch = divmod(number, BATCHES)
            if number == self.begin or not batch:
                self._save(worker, EPOCH, number)
                first, between = batch, 0
            if known:
                self._save(worker, known, number)
                known = 0
            stream, marks = epoch << 32 | STATIC, (epoch << 32 | STATIC, batch - first, batch - first)
            assigned = 0
            for what in self.script[number]:
                if worker.me.index == 0 and actions in self.asks:
                    self.archive.ask()
                actions += 1
                if what == ASSIGN:
                    outcome = self._assign(worker, AssignmentPlace(stream, batch, assigned), not marks)
                    assigned += 1
                else:
                    outcome = self._step(worker, number, what, marks)
                    marks = ()
                known = outcome.snapshot or known
            if batch == BATCHES - 1:
                # Between two passes, as a model is averaged or initialised anew.
                self._assign(worker, AssignmentPlace(-2 - epoch, 0, between), True)
        if known:
            self._save(worker, known, len(self.script))
        worker.finish()

    def _step(self, worker: ScriptedWorker, number: int, optimizer: int, marks: tuple[int, ...]):
        worker.sleep(0.0, 0.01)
        value = float(1 + (number * 7 + optimizer * 3 + worker.me.index) % 5)
        gradient = [torch.full(p.shape, value) for p in PARAMETERS]
        return worker.step(gradient, optimizer=optimizer, marks=marks, hyper=self.hyper if not worker.steps else b"")

    @staticmethod
    def _assign(worker: ScriptedWorker, place: AssignmentPlace, follows: bool):
        """Each time counts: values that are changed twice are others."""
        return worker.assign(1, worker.values()[1] * 0.75 + 1.0, place, follows)

    @staticmethod
    def _save(worker: ScriptedWorker, number: int, batch: int) -> None:
        worker.client.extension(WorkerStateClient).save(number, torch.tensor([batch]).view(torch.uint8))

    def snapshots(self) -> list[tuple[Frozen, int]]:
        """What a job can go on from, with the batch that its scripts read first."""
        found = []
        for what in self.archive.published:
            # A worker that has ended is not waited for, and in a storm its end may overtake its state.
            (begin,) = {int(state.view(torch.int64)) for state in what.states.values()} or {len(self.script)}
            assert begin == len(self.script) or what.states.keys() == set(self.cluster.workers)
            facts = what.facts
            frozen = Frozen(
                number=what.number,
                version=facts["version"],
                clocks=dict(facts["clocks"]),
                parameters=self.cluster.schema.parameters,
                optimizer=self.cluster.schema.optimizer,
                first_epoch=facts["first_epoch"],
                passes=begin // BATCHES,
                _steps=dict(facts["steps"]),
                _runs={e: tuple(map(tuple, runs)) for e, runs in facts["epochs"]},
                _values=self.archive.values[what.number],
                table=self.archive.tables[what.number],
                closed=facts["closed"],
                entries=self.archive.state.get(what.number, {}),
            )
            found.append((frozen, begin))
        return found


SYNC = {"workers": 2, "shards": 2}
INLINE = {"workers": 2, "shards": 2, "server_worker_separate": False}


@cache
def undisturbed_values(conf: Job, script: Script, optimizers: int) -> list[torch.Tensor]:
    return Run(conf, script, optimizers).values


def check_goes_on(fields: dict, script: Script, optimizers: int, seed: int, weather, asks: frozenset[int]) -> int:
    """Go on from every snapshot; return their number."""
    conf = replace(job(**fields), snapshot_s=1.0)
    undisturbed = undisturbed_values(conf, script, optimizers)
    disturbed = Run(conf, script, optimizers, seed, weather, asks)
    assert same(disturbed.values, undisturbed)
    snapshots = disturbed.snapshots()
    for frozen, begin in snapshots:
        again = Run(conf, script, optimizers, past=(frozen, begin))
        assert same(again.values, undisturbed), (seed, frozen.number, frozen.version, begin, script)
    return len(snapshots)


@pytest.mark.parametrize(
    ("optimizers", "fields", "weather"), [(1, SYNC, VIEWS), (1, INLINE, STORM), (2, SYNC, STORM), (2, INLINE, VIEWS)]
)
def test_a_job_goes_on_with_the_same_bits_whatever_its_script_does_with_a_batch(optimizers, fields, weather):
    taken, few = 0, seeds(6)[: 6 if SOAK else 2]
    for seed in few:
        script = drawn(seed, optimizers)
        actions = sum(map(len, script))
        asks = frozenset(random.Random(seed).sample(range(actions), actions // 3))
        taken += check_goes_on(fields, script, optimizers, seed, weather, asks)
    # Most requests lead to a snapshot: a schedule without any would show nothing.
    assert taken >= len(few)


@pytest.mark.parametrize(
    "batch",
    [(0, 1), (1, 0, 0), (0, ASSIGN, 1), (ASSIGN, 0, 1), (0, 1, ASSIGN), (ASSIGN, 1, ASSIGN, 0, ASSIGN)],
    ids=str,
)
def test_a_snapshot_has_all_of_a_batch_or_nothing(batch):
    """Requested before any action of a batch: before its first step, between two, before an assignment."""
    script = (batch,) * (BATCHES * EPOCHS)
    for at in range(2 * len(batch), 3 * len(batch), 1 if SOAK else 2):
        assert check_goes_on(SYNC, script, 2, at, VIEWS, frozenset([at])) == 1


# --- a group that starts again ---------------------------------------------------------------------------------------


class _NoHost:
    """A host that writes nothing."""

    def execute(self, order: object) -> None:
        pass


def test_new_processes_learn_of_a_snapshot_that_waits_for_the_end_of_a_batch():
    harness = ServerHarness(join=False, snapshot_s=1.0, server_worker_separate=True)
    # The second optimizer has the only parameter.
    first, second = (torch.optim.SGD([p], lr=1.0) for p in (nn.Parameter(torch.zeros(1)), harness.model.weight))
    spec = describe_all([first, second], harness.parts.tensors, aside=first.param_groups[0]["params"])
    parts = tuple(replace(p, optimizer=1) for p in harness.schema.parameters)
    digest = slice_map_for(parts, harness.topology).digest
    harness.schema = Schema(parts, (), spec.to_text(), digest)
    (who,), (only,) = harness.workers, harness.servers.values()
    snapshots_of(only).attach_host(_NoHost())
    stream = STATIC

    def step(number: int, **more: object) -> int:
        harness.step(who, 1.0, number, optimizer=1, hyper=hyper(first, second) if not number else b"", **more)
        return harness.heard(who, m.Applied)[-1].snapshot

    harness.join(who)
    harness.give_values()
    harness.fetch(who)
    assert step(0, marks=(stream, 0, 0)) == 0
    harness.say(server(), server(), SnapshotRequest())
    assert step(1, marks=(stream, 1, 1)) == 1
    # Another process of the worker, in the middle of the batch.
    harness.say(who, server(), m.WorkerRejoined(1))
    harness.join(who)
    harness.fetch(who)
    assert step(0) == 1, "the new process has to leave its state, too"
    assert snapshots_of(only).due == 1
    step(1, marks=(stream, 2, 2))
    assert snapshots_of(only).due == 0
