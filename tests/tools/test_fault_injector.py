"""Random faults: the same seed gives the same faults, which hit living processes of the job and no other."""

import itertools
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from topotrain.config.job import ConfigError
from topotrain.core.events import Exited, Recovered, Serving, Started, StepDone
from topotrain.tools.amounts import seconds
from topotrain.tools.fault_injector import FaultInjector, FaultPlan, steps

FIRST_STEP = StepDone("worker 0/0", 0.0, 1, 1, None, 0.0, 0, 0, 0)


@pytest.fixture
def sleepers() -> Iterator[list["subprocess.Popen[bytes]"]]:
    children = [subprocess.Popen(["sleep", "1000"]) for _ in range(3)]
    yield children
    for child in children:
        child.kill()
        child.wait()


def test_the_faults_of_a_seed():
    first, again, other = (list(itertools.islice(steps(FaultPlan(2.0, 60.0, seed, 0.5)), 40)) for seed in (7, 7, 8))
    assert first == again != other
    assert all(1.0 <= step.wait_s <= 3.0 and 0 <= step.pick < 1 for step in first)
    assert any(step.frozen_s for step in first) and not all(step.frozen_s for step in first)
    assert not any(step.frozen_s for step in itertools.islice(steps(FaultPlan(2.0, 60.0, 7)), 40))


def test_all_are_killed_once_the_job_has_begun(sleepers):
    with FaultInjector(FaultPlan(0.01, 1000.0, 1)) as tormentor:
        for number, child in enumerate(sleepers):
            tormentor(Started(f"worker {number}/0", child.pid))
        assert all(child.poll() is None for child in sleepers)  # before the first step nobody is hurt
        tormentor(FIRST_STEP)
        assert [child.wait(30) for child in sleepers] == [-signal.SIGKILL] * 3
    assert {blow.pid for blow in tormentor.injected} == {child.pid for child in sleepers}
    assert not any(blow.frozen_s for blow in tormentor.injected)


def test_only_workers_and_servers_that_live_are_hit_and_only_those_it_is_told(sleepers):
    with FaultInjector(FaultPlan(0.01, 1000.0, 1, role="server")) as tormentor:
        tormentor(Started("unit 0", sleepers[0].pid))
        tormentor(Started("worker 0/0", sleepers[1].pid))
        tormentor(Serving("server 0/0", (), sleepers[0].pid))
        tormentor(Exited("server 0/0", sleepers[0].pid, 0))
        tormentor(Started("server 0/0", sleepers[2].pid))  # it comes again
        tormentor(Started("server 0/1", sleepers[2].pid))  # the same process
        tormentor(FIRST_STEP)
        assert sleepers[2].wait(30) == -signal.SIGKILL
    assert [child.poll() for child in sleepers[:2]] == [None, None]


def test_who_is_frozen_goes_on(sleepers):
    (child, *_) = sleepers
    with FaultInjector(FaultPlan(0.01, 1000.0, 1, freeze=1.0)) as tormentor:
        tormentor(Started("worker 0/0", child.pid))
        tormentor(FIRST_STEP)
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        _, status = os.waitpid(child.pid, os.WCONTINUED)
        assert os.WIFCONTINUED(status)
    assert tormentor.injected[0].frozen_s > 0


def test_whoever_was_started_again_is_killed_for_it_some_time(sleepers):
    with FaultInjector(FaultPlan(1000.0, 1000.0, 3, moments=frozenset({"again"}))) as tormentor:
        for number, child in enumerate(sleepers):
            for _ in range(2 + 20 * number):
                tormentor(Started(f"worker {number}/0", child.pid))
        assert sleepers[2].wait(30) == -signal.SIGKILL
    assert {blow.moment for blow in tormentor.injected} == {"again"}


def test_each_blow_waits_for_the_one_before_and_two_may_fall_at_once_until_there_were_enough(sleepers):
    torment = FaultPlan(0.001, 1000.0, 1, pairs=1.0, moments=frozenset({"back"}), kills=2)
    with FaultInjector(torment) as tormentor:
        for number, child in enumerate(sleepers):
            tormentor(Started(f"worker {number}/0", child.pid))
        tormentor(FIRST_STEP)
        while sum(child.poll() is not None for child in sleepers) < 2:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        tormentor(Recovered(0, 0.1, 0.0))  # two were killed: enough
    assert len({blow.pid for blow in tormentor.injected}) == len(tormentor.injected) == 2
    assert sum(child.poll() is None for child in sleepers) == 1


def test_the_resources_of_survivors_are_counted_when_one_is_back_and_no_descriptor_is_left(sleepers):
    before = set(os.listdir("/proc/self/fd"))
    with FaultInjector(FaultPlan(1000.0, 1.0, 1)) as tormentor:
        for child in sleepers:
            tormentor(Started("worker 0/0", child.pid))
        for _ in range(2):
            tormentor(Recovered(0, 0.1, 0.0))
    (held,) = tormentor.held.values()
    assert held[0] == held[1] and len(held) == 2
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_time():
    times = {"2s": 2.0, "500ms": 0.5, "1min": 60.0, "3": 3.0, ".5s": 0.5, "2h": 7200.0}
    assert {text: seconds("--for", text) for text in times} == times
    for text in ("", "0s", "2 hours", "-1s", "s", "1e3s"):
        with pytest.raises(ConfigError, match="--for"):
            seconds("--for", text)
