"""A batch that is divided once more: which samples each worker gets, with and without processes of the loader."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from divided_loaders import Numbers
from torch.utils.data import DataLoader, TensorDataset

from topotrain.config.job import Cluster, Compression, Job, OnFailure, Pull
from topotrain.config.topology import Address, Role, layout
from topotrain.extensions.elastic.eligibility import in_place_refusal
from topotrain.extensions.in_place_recovery.repeated_steps import MOST_SAMPLES, _loader_refusal
from topotrain.training.data.data_messages import DrawnBatches, DrawRequest
from topotrain.training.data.distributed_loader import DataPlan
from topotrain.training.data.lease_queue import LeaseQueue
from topotrain.training.data.map_dataset import LoaderCopy, MapEpoch

A, B, C = (Address(Role.WORKER, 0, index) for index in range(3))
PLAN = DataPlan(0, 1, 0, 3, (), "static", False, 0, 1, True, repeats=True)
PAIRS = Cluster(nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True)


class Applied:
    """The servers have applied nothing."""

    def applied(self, stream: int) -> int:
        return 0


def epoch(index: int, processes: int, **more: object) -> MapEpoch:
    plan = replace(PLAN, index=index, **more)
    loader = DataLoader(Numbers(24), 6, num_workers=processes)
    copy = LoaderCopy(loader, plan)
    assert copy.indices is not None
    return MapEpoch(copy, copy.indices, plan, Applied(), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("processes", [0, 2])
def test_the_last_batch_and_all_later_ones_are_divided_among_the_survivors(processes):
    epochs = [epoch(index, processes) for index in range(3)]
    first = [part.next() for part in epochs]
    second = [part.next() for part in epochs]
    assert [sorted(data.tolist()) for _, _, data in second[:1]] and len({place for place, _, _ in second}) == 1
    before = torch.get_rng_state()
    for part in (epochs[0], epochs[2]):
        part.divide_again((0, 2), True)
    assert torch.equal(torch.get_rng_state(), before), "the script's generators do not notice"
    again = [epochs[index].next() for index in (0, 2)]
    assert {place for place, _, _ in again} == {second[0][0]}, "the same batch"
    whole = sorted(n for _, _, data in second for n in data.tolist())
    assert sorted(n for _, _, data in again for n in data.tolist()) == whole and [n for _, n, _ in again] == [3, 3]
    rest = [[part.next() for _ in range(2)] for part in (epochs[0], epochs[2])]
    seen = Counter(
        n for part in (*[[each] for each in (*first, *again)], *rest) for _, _, data in part for n in data.tolist()
    )
    assert seen == Counter(range(24)), "every sample once"
    for part in (epochs[0], epochs[2]):
        with pytest.raises(StopIteration):
            part.next()


def test_the_last_batch_of_an_epoch_can_be_repeated():
    part = epoch(0, 0)
    last = [part.next() for _ in range(4)][-1]
    part.divide_again((0, 1), True)
    place, samples, data = part.next()
    assert place == last[0] and samples == 3 and len(data) == 3
    with pytest.raises(StopIteration):
        part.next()


def test_with_a_batch_for_each_worker_those_of_the_dead_are_divided_too():
    parts = [epoch(index, 0, per_worker_batch=True) for index in range(3)]
    round_ = [part.next() for part in parts]
    for part in parts[:2]:
        part.divide_again((0, 1), True)
    again = [part.next() for part in parts[:2]]
    assert [n for _, n, _ in again] == [9, 9]
    assert sorted(n for _, _, d in again for n in d.tolist()) == sorted(n for _, _, d in round_ for n in d.tolist())


def test_all_members_are_the_division_without_members():
    assert PLAN.among((0, 1, 2)) is PLAN and PLAN.among((0, 2)).bounds(6) == (0, 3)
    shares = replace(PLAN, shares=(1.0, 5.0, 3.0), index=2).among((0, 2))
    assert shares.bounds(8) == (2, 8)


def test_a_drawn_chunk_is_kept_for_a_worker_that_comes_back():
    queue = LeaseQueue(1, 3)
    chunk = DrawnBatches(0, 0, True, (2,), (7, 9), True)
    queue.handle(A, chunk)
    for worker in (B, C):
        assert queue.handle(worker, DrawRequest(0, 0)) == [(worker, chunk)]
    queue.reset_worker(B)
    assert queue.handle(B, DrawRequest(0, 0)) == [(B, chunk)]
    # One that is not to be kept is dropped with the last worker that has it.
    plain = DrawnBatches(1, 0, True, (2,), (7, 9))
    queue.handle(A, plain)
    for worker in (B, C):
        queue.handle(worker, DrawRequest(1, 0))
    assert queue.kept_chunks == 1
    for worker in (B, C):
        queue.handle(worker, DrawRequest(3, 0))
    assert queue.kept_chunks == 1, "what all have passed by more than one epoch is dropped"
    ((_, answer),) = queue.handle(B, DrawRequest(0, 0))
    assert answer.sizes == (), "no correct worker asks for it, and the queue has an answer"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster": replace(PAIRS, nworkers_per_group=1)}, "one worker"),
        ({"cluster": replace(PAIRS, max_staleness=1)}, "max_staleness"),
        ({"cluster": replace(PAIRS, compression=Compression.kFp16)}, "compressed"),
        ({"cluster": Cluster(nworkers_per_group=2, nservers_per_group=2)}, "among themselves"),
        ({"pull": Pull.kLazy}, "kLazy"),
        ({"on_failure": OnFailure.kStop}, "kStop"),
    ],
)
def test_which_groups_restart_as_a_whole(changes, words):
    job = Job(**{"cluster": PAIRS, **changes})
    assert words in in_place_refusal(job, layout(job.cluster), 0)


def test_which_groups_recover_in_place():
    for cluster in (PAIRS, replace(PAIRS, nworker_groups=2)):
        assert in_place_refusal(Job(cluster=cluster), layout(cluster), 0) == ""


def test_which_loaders_can_be_divided_again():
    data = TensorDataset(torch.arange(8))

    class Own(torch.utils.data.Sampler[int]):
        def __iter__(self):
            return iter(range(8))

        def __len__(self):
            return 8

    assert _loader_refusal(DataLoader(data, 2, shuffle=True), replace(PLAN, mode="broadcast")) == ""
    own = DataLoader(data, 2, sampler=Own())
    assert "Own" not in _loader_refusal(own, PLAN) and "sampler" in _loader_refusal(
        own, replace(PLAN, mode="broadcast")
    )
    assert "itself" in _loader_refusal(DataLoader(data, batch_size=None), PLAN)
    large = DataLoader(Numbers(MOST_SAMPLES + 2), 2)
    assert str(MOST_SAMPLES) in _loader_refusal(large, replace(PLAN, mode="broadcast"))
