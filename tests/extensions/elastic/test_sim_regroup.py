"""Worker groups that die and are started again: no group waits for another one.

Deaths at moments that a seed draws are in tests/tools/simulator/test_seeded_runs.py.
"""

import pytest
from fault_schedule import CALM, FAR, STORM, Fault, FaultSchedule
from fault_trial import Trial
from faulty_network import NetworkFaults
from seeded_runs import LAYOUTS
from seeds import SOAK, every, seeds, soaked
from simulation import trace

from topotrain.core import protocol as m
from topotrain.extensions.elastic.membership_messages import AppliedBatchesOfStreams, RestartRequest

pytestmark = pytest.mark.simulated


def place(
    name: str,
    seed: int,
    weather: NetworkFaults = CALM,
    batches: int = 12,
    fates: tuple[Fault, ...] = (),
) -> Trial:
    schedule = FaultSchedule("", batches, 1, "lease", True, fates, survive=0.0)
    return Trial(LAYOUTS[name], seed, schedule, weather)


def left_alone(name: str, seed: int) -> Trial:
    """Group 1 dies in the middle and stays away for long: the others read all there is, and never wait."""
    fates = (Fault(1, at=0.03 + 0.01 * seed, away=100.0),)
    found = place(name, seed, STORM, batches=40, fates=fates).run()
    ((death, _),) = found.deaths
    for group in set(found.commits) - {1}:
        moments = [moment for moment in found.commits[group] if moment > death]
        gaps = [after - before for before, after in zip([death, *moments], moments, strict=False)]
        assert max(gaps, default=0.0) < 0.3, f"seed {seed}, group {group} waited"
    last = max(moment for moments in found.commits.values() for moment in moments)
    assert last < death + 5.0, f"seed {seed}: something was left for when the group is back"
    return found


@pytest.mark.parametrize(
    "name", soaked(["downpour", "hogwild of pairs", "bounded", "in step"], ["downpour of pairs", "hogwild"])
)
def test_the_others_read_what_the_dead_left_and_do_not_wait_for_them(name):
    for seed in seeds(4):
        assert not left_alone(name, seed).wrong(), f"seed {seed}"


def test_when_no_process_dies_none_is_reported():
    found = place("hogwild of pairs", 0)
    kinds = trace(found, m.WorkerRejoined, RestartRequest, AppliedBatchesOfStreams, m.AppliedBatchesRequest)
    assert not found.run().wrong() and not kinds


@pytest.mark.parametrize("after", every(0, 48, 4))
def test_a_group_that_dies_at_every_message_of_its_start_and_of_its_first_steps(after):
    for index in (0, 1):
        fates = (Fault(0, 0, index, after), Fault(0, 1, 1 - index, after // 2, away=0.01))
        found = place("sandblaster", after, STORM, batches=12, fates=fates).run()
        assert found.kills == 2 and not found.wrong()


ENDS = (m.Finish, m.ModelBufferValue, m.FinalRequest, m.BufferRequest)
JOBS = ("downpour of pairs", "sandblaster of three", "hogwild of pairs")
FEW = [(JOBS[number % 3], kind) for number, kind in enumerate(ENDS)]


@pytest.mark.parametrize(
    ("name", "kind"), soaked(FEW, [(name, kind) for name in JOBS for kind in ENDS if (name, kind) not in FEW])
)
def test_a_group_that_dies_at_its_end_comes_to_it_again(name, kind):
    for seed in range(3) if SOAK else (0, 1):
        found = place(name, seed, (STORM, FAR, CALM)[seed], batches=6, fates=(Fault(0, kind=kind, after=seed % 2),))
        found.run()
        assert not found.wrong(), f"seed {seed}"
