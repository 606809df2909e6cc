"""Worker groups that die and are started again: every batch counts once, a step on all shards or none, nobody waits."""

import random

import pytest
from fault_schedule import CALM, FAR, STORM, VIEWS, Fault, FaultSchedule
from fault_trial import Trial
from faulty_network import NetworkFaults
from seeds import SOAK, every, seeds
from simulation import job, trace
from soak_cases import soaked

from topotrain.config.job import Compression
from topotrain.core import protocol as m
from topotrain.extensions.elastic.membership_messages import AppliedBatchesOfStreams, RestartRequest

pytestmark = pytest.mark.simulated

LAYOUTS = {
    "downpour": (3, 1, 1, {}),
    "downpour of pairs": (2, 2, 2, {}),
    "downpour on three shards": (3, 1, 3, {}),
    "sandblaster": (1, 2, 2, {}),
    "sandblaster of three": (1, 3, 3, {}),
    "hogwild": (2, 1, 2, {"nserver_groups": 2}),
    "hogwild of pairs": (4, 2, 1, {"nserver_groups": 2}),
    "bounded": (3, 1, 2, {"max_staleness": 1}),
    "in step": (2, 2, 2, {"max_staleness": 0}),
    "warming up": (3, 1, 2, {"warmup_steps": 3}),
    "encoded": (2, 2, 2, {"compression": Compression.kFp16}),
    # With a bound the servers restart a group by themselves, and do not wait for the launcher.
    "two with a bound": (1, 2, 2, {"max_staleness": 1}),
    "three with a bound": (1, 3, 3, {"max_staleness": 1}),
}

FOUND = {
    "downpour of pairs": (6,),
    "downpour on three shards": (7, 39),
    "hogwild": (11,),
    "hogwild of pairs": (35,),
    "two with a bound": (10,),
    "three with a bound": (22, 34),
}
"""Seeds that show a defect which others do not: a mutant of tests/soak/mutants.txt survives without them."""


def place(
    name: str,
    seed: int,
    weather: NetworkFaults = CALM,
    batches: int = 12,
    epochs: int = 1,
    mode: str = "lease",
    tells: bool = True,
    fates: tuple[Fault, ...] = (),
) -> Trial:
    groups, workers, shards, settings = LAYOUTS[name]
    schedule = FaultSchedule("", batches, epochs, mode, tells, fates, survive=0.0)
    return Trial(job(groups, workers, shards, **settings), seed, schedule, weather)  # type: ignore[arg-type]


def drawn(name: str, seed: int) -> tuple[Fault, ...]:
    """One to three deaths at moments drawn by the seed, or of all groups at once."""
    rng, (groups, workers, _, _) = random.Random(f"{name} {seed}"), LAYOUTS[name]
    if seed % 8 == 7:
        at = rng.uniform(0.0, 0.12)
        return tuple(Fault(group, at=at, away=rng.choice((0.0, 0.05, 3.0))) for group in range(groups))
    fates = []
    for number in range(rng.randint(1, 3)):
        group, away = rng.randrange(groups), rng.choice((0.0, 0.003, 0.05, 3.0))
        if rng.random() < 0.5:
            fates.append(Fault(group, at=rng.uniform(0.0, 0.15), away=away))
        else:
            fates.append(Fault(group, number, rng.randrange(workers), rng.randint(0, 60), away=away))
    return tuple(fates)


def one(name: str, seed: int) -> Trial:
    weather = (FAR, STORM, VIEWS, CALM, FAR)[seed % 5]
    mode = "static" if seed % 4 == 1 else "lease"
    found = place(name, seed, weather, epochs=1 + seed % 2, mode=mode, tells=seed % 3 != 0, fates=drawn(name, seed))
    return found.run()


LATER = ("sandblaster of three", "bounded", "in step", "warming up")


@pytest.mark.parametrize("name", soaked([name for name in LAYOUTS if name not in LATER], LATER))
def test_every_batch_counts_once_whichever_process_dies_when(name):
    kills = 0
    drawn_seeds = seeds(30, *FOUND.get(name, ()))
    for seed in drawn_seeds:
        found = one(name, seed)
        assert not found.wrong(), f"{name}, seed {seed}: {found.wrong()[:5]}"
        kills += found.kills
    assert kills >= 0.8 * len(drawn_seeds)


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
