"""Samples are counted where they are applied: each once, whoever dies, whatever the job goes on from."""

import pytest
from fault_schedule import Fault, FaultKind, FaultSchedule
from fault_trial import Trial
from simulation import job

from topotrain.config.topology import Address, Role, Topology, layout
from topotrain.core.protocol import Commit
from topotrain.core.server.step_execution import SampleCounts


def worker(group: int, index: int = 0) -> Address:
    return Address(Role.WORKER, group, index)


def commit(samples: int) -> Commit:
    return Commit(0, 1, 1.0, 1.0, False, 0.0, 2.0, True, b"", b"", b"", b"", (), samples=samples)


def topology(groups: int = 1, workers: int = 1, server_groups: int = 1) -> Topology:
    return layout(job(groups, workers, nserver_groups=server_groups).cluster)


def test_the_refused_part_of_a_step_does_not_count() -> None:
    samples = SampleCounts(topology(2, 2), 0, {})
    samples.applied(1, {0: commit(4), 1: commit(3)}, [])
    samples.applied(1, {0: commit(4), 1: commit(3)}, [1])
    assert samples.counts == {worker(0): 0, worker(0, 1): 0, worker(1): 8, worker(1, 1): 3}


def test_workers_that_are_no_more_are_counted_with_the_first_one() -> None:
    before = {worker(0): 5, worker(0, 1): 6, worker(1): 7, worker(2): 8}
    assert SampleCounts(topology(2), 0, before).counts == {worker(0): 11 + 8, worker(1): 7}
    assert SampleCounts(topology(4), 0, before).counts == {worker(0): 11, worker(1): 7, worker(2): 8, worker(3): 0}
    apart = topology(2, server_groups=2)
    assert SampleCounts(apart, 0, before).counts == {worker(0): 19}
    assert SampleCounts(apart, 1, before).counts == {worker(1): 7}


@pytest.mark.simulated
@pytest.mark.parametrize("layout", [(2, 2, 2, 1), (3, 1, 1, 3), (1, 2, 2, 1)])
def test_every_sample_counts_once_whichever_process_dies(layout: tuple[int, int, int, int]) -> None:
    groups, workers, shards, server_groups = layout
    kills = crashes = 0
    for seed in range(4):
        faults = [Fault(seed % groups, after=2 + seed % 3, kind=Commit), Fault(0, at=0.05 + 0.01 * seed)]
        faults += [Fault(0, at=0.08 + 0.01 * seed, what=FaultKind.CRASH)] * (seed % 2)
        schedule = FaultSchedule(
            "calm", 6, 2, "lease" if seed % 3 and groups > 1 else "static", True, tuple(faults), 0.01
        )
        trial = Trial(job(groups, workers, shards, nserver_groups=server_groups), seed, schedule).run()
        while trial.crashed:
            crashes += 1
            trial = trial.again().run()
        kills += trial.kills
        assert not trial.wrong(), f"seed {seed}"
        coordinators = [trial.server(group, 0) for group in range(server_groups)]
        counts = {who: count for server in coordinators for who, count in server.steps.samples.items()}
        assert sum(counts.values()) == 6 * 2 * workers, f"seed {seed}: {counts}"
        assert len(counts) == groups * workers
    assert kills and crashes
