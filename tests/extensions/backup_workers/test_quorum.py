"""Backup workers, piece by piece: whom a step waits for, what a decision names, and whose contributions it adds up."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from faulty_cluster import parameters
from torch.utils.data import DataLoader, TensorDataset

from tests.support.reporter_parts import context_of, no_connections, worker_of
from topotrain.config.job import Cluster, ConfigError
from topotrain.config.sharding import cut
from topotrain.config.topology import Address, Role, layout
from topotrain.core.client.client_context import StepOutcome
from topotrain.core.events import Notice
from topotrain.core.model.schema import FlatBuffers, PrivateMemory
from topotrain.core.protocol import NO_REVISION, Commit, Push, StepVote
from topotrain.core.server.consistency import DecisionLog
from topotrain.core.server.gradients.gradient_source import GroupBuffers, SourceSettings, StepError
from topotrain.extensions.backup_workers.backup_messages import StepCatchUp
from topotrain.extensions.backup_workers.quorum import Quorum
from topotrain.extensions.backup_workers.quorum_pushes import QuorumPushes
from topotrain.extensions.backup_workers.replay_batches import LateBatchReplay, LateSteps
from topotrain.tools.monitor.process_tally import stragglers
from topotrain.training.data.distributed_loader import ShardedLoader
from topotrain.training.data.map_dataset import PLAIN, DataPlan
from topotrain.training.step_progress import ProgressReporter
from topotrain.training.worker_stats import StepBatches, WorkerStats


def test_a_step_needs_all_but_the_spare_ones_and_no_worker_that_has_nothing():
    quorum = Quorum(4, 1)
    assert quorum.needed == 3
    assert quorum.ask(3, StepCatchUp(1, 0)) == [] and quorum.needed == 3
    assert quorum.ask(2, StepCatchUp(1, 0)) == [] and quorum.needed == 2
    assert quorum.ask(1, StepCatchUp(1, 0)) == [] and quorum.needed == 1
    assert quorum.ask(0, StepCatchUp(1, 0)) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert quorum.needed == 3


# --- what the coordinator decides ------------------------------------------------------------------------------------


def staged(*members: int, step: int = 0, refused: tuple[int, ...] = ()) -> StepVote:
    return StepVote(0, step, True, 0.0, False, 0, 0, refused, members)


def test_only_a_members_gradient_is_refused():
    log = DecisionLog(2)
    log.staged(0, staged(0, 1, refused=(1, 7)))
    log.staged(1, staged(0, 1, 2, refused=(2, 3)))
    decision = log.decide(0, 0)
    assert (decision.members, decision.refused) == ((0, 1), (1, 7))


# --- what a shard adds up --------------------------------------------------------------------------------------------


def staging(workers: int, divide: bool = True) -> QuorumPushes:
    slices = cut(parameters(4), 1, 1)
    buffers = GroupBuffers(FlatBuffers(slices, 0, PrivateMemory()), 0)
    tree = layout(Cluster(nworkers_per_group=workers)).sum_tree(0)
    return QuorumPushes(SourceSettings(workers, tree, slices.buckets, buffers, divide=divide, checked=True))


def contribute(home: QuorumPushes, worker: int, value: float, weight: float = 1.0, **more) -> None:
    bucket = home._buckets[0]
    body = torch.full((bucket.hi - bucket.lo,), value)
    home.push(worker, Push(0, 1, bucket.id, weight, b"\x01"), body)
    said = {"hyper": b"a", "marks": (worker, 0, 0), **more}
    home.commit(worker, Commit(0, 1, weight, 1.0, False, 0.0, 2.0, True, b"\x01", b"", b"", **said))


def test_the_mean_is_over_the_weight_that_is_in_it():
    home = staging(4)
    for worker, weight in enumerate((1.0, 3.0, 2.0, 5.0)):
        contribute(home, worker, float(worker + 1), weight)
        assert home.try_stage() and not home.try_stage()
    assert home.members == (0, 1, 2, 3)
    assert home.choose((1, 2)) == [0, 3]
    assert torch.equal(home.gradient(home._buckets[0])[:4], torch.full((4,), (3 * 2.0 + 2 * 3.0) / 5))
    assert home.marks == (1, 0, 0, 2, 0, 0)


def test_a_worker_that_has_committed_and_not_sent_all_is_not_complete():
    home = staging(2)
    home.commit(1, Commit(0, 1, 1.0, 1.0, False, 0.0, 2.0, True, b"\x01", b"", b"", b"", (1, 0, 0)))
    assert not home.try_stage()
    home.push(1, Push(0, 1, 0, 1.0, b"\x01"), torch.ones(4))
    assert home.try_stage() and home.members == (1,)


def test_a_worker_without_a_gradient_counts_as_zero():
    home = staging(2)
    contribute(home, 0, 6.0)
    said = (b"a", (1, 0, 0))
    home.commit(1, Commit(0, 1, 1.0, 1.0, False, 0.0, 2.0, True, bytes([NO_REVISION]), b"", b"", *said))
    assert home.try_stage()
    home.choose((0, 1))
    assert torch.equal(home.gradient(home._buckets[0])[:4], torch.full((4,), 3.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_what_could_make_a_sum_infinite_is_refused_before_it_is_known_whose_sum(value):
    home = staging(3)
    contribute(home, 0, 1.0)
    contribute(home, 2, value)
    assert home.try_stage()
    assert list(home.nonfinite_workers()) == [2]
    contribute(home, 1, 1e19)  # its square is infinite in float32, and no sum of three such is
    assert home.try_stage()
    assert list(home.nonfinite_workers()) == [2]


def test_hyper_parameters_are_those_that_most_say():
    for members, others, said in (((0, 1, 2), [], b"b"), ((0, 1), [2], b"a")):
        home = staging(3)
        for worker, text in enumerate((b"a", b"b", b"b")):
            contribute(home, worker, 1.0, hyper=text)
        home.try_stage()
        assert home.choose(members) == others and home.first.hyper == said


def test_what_all_must_agree_about_is_still_compared():
    home = staging(2)
    contribute(home, 0, 1.0)
    with pytest.raises(StepError, match="the gradient clipping"):
        home.commit(1, Commit(0, 1, 1.0, 1.0, False, 2.0, 2.0, True, b"\x01", b"", b"", b"a", (1, 0, 0)))


# --- who is slow -----------------------------------------------------------------------------------------------------


def test_a_straggler_takes_half_as_long_again_as_the_others_of_its_group():
    topology = layout(Cluster(nworker_groups=2, nworkers_per_group=3))
    own = {"worker 0/0": 1.0, "worker 0/1": 1.5, "worker 0/2": 1.0, "worker 1/0": 4.0, "worker 1/1": 6.0}
    assert stragglers(topology, own) == []
    own |= {"worker 0/1": 1.51, "worker 1/1": 9.0, "worker 1/2": 4.0}
    assert [(slow.who, slow.factor) for slow in stragglers(topology, own)] == [
        ("worker 0/1", 1.51),
        ("worker 1/1", 2.25),
    ]


def test_steps_of_milliseconds_make_no_straggler():
    topology = layout(Cluster(nworkers_per_group=3))
    own = {"worker 0/0": 0.003, "worker 0/1": 0.009, "worker 0/2": 0.003}
    assert stragglers(topology, own) == []
    slow = own | {"worker 0/1": 0.003 + 0.021}
    assert [found.who for found in stragglers(topology, slow)] == ["worker 0/1"]


# --- the data ---------------------------------------------------------------------------------------------------------


class CallRecorder:
    """Stands for all that a loader calls; records the calls in their order."""

    first = 0

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.verdict: bool | None = None

    def __getattr__(self, name: str):
        def noted(*args):
            self.calls.append(name)
            return PLAIN, False

        return noted

    def counts_given(self) -> bool | None:
        verdict, self.verdict = self.verdict, None
        return verdict


def loader(recorder: CallRecorder, index: int = 0) -> ShardedLoader:
    plan = DataPlan(0, 1, index, 2, (), "broadcast", True, 0, 1, index == 0, own_streams=True)
    made = ShardedLoader(
        DataLoader(TensorDataset(torch.arange(9)), batch_size=2), plan, recorder, recorder, LateBatchReplay(recorder)
    )
    made.resume_with(recorder)
    return made


def test_what_a_script_does_not_wait_to_be_given_again_is_counted_and_told():
    """It leaves its loop behind a step that came too late, and another time behind one that counted."""
    told, tally = [], WorkerStats(started=1.0)
    recorder = CallRecorder()
    worker = worker_of(tally, batches=StepBatches())
    steps = LateSteps(worker, SimpleNamespace(through=lambda epoch: None))
    recorder.left_early = lambda epoch, batches: steps.leave_epoch(epoch)
    passes = loader(recorder)
    for late in (True, False, True):
        for _ in passes:
            steps.after_commit(StepOutcome(0, (), False, -1.0, late=late))
            break
    assert tally.dropped == 2
    ProgressReporter(context_of(Address(Role.WORKER, 0, 1), told), worker, no_connections()).job_over()
    (notice,) = [event for event in told if isinstance(event, Notice)]
    assert notice.text.startswith("2 batches came too late for their step and count for nothing")


def test_an_epoch_without_a_length_cannot_be_drawn_at_once():
    class Endless(torch.utils.data.Sampler):
        def __iter__(self):
            return itertools.count()

    plan = DataPlan(0, 1, 0, 2, (), "broadcast", True, 0, 1, True, own_streams=True)
    data = DataLoader(TensorDataset(torch.arange(9)), batch_sampler=Endless())
    with pytest.raises(ConfigError, match=r"loader\.sampler = 'Endless': must have a length"):
        ShardedLoader(data, plan, CallRecorder(), CallRecorder(), LateBatchReplay(CallRecorder()))
