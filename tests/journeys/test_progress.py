"""`tt.progress` in real jobs: a schedule over the job, on slow workers, too."""

import json

import pytest
import torch
from job_runner import ALLREDUCE, HOGWILD, JobRunner
from seeds import SOAK
from soak_cases import soaked

pytestmark = pytest.mark.journey

OUTER = "outer { type: kNesterov momentum: 0.9 learning_rate { type: kFixed base_lr: 0.7 } }"
ISLANDS = f"nworker_groups: 3 server_worker_separate: true sync_freq: 5 {OUTER}"

Seen = list[list[tuple[float, float]]]


def trained(runner: JobRunner, cluster: str, *args: str, extra: str = "", name: str = "job") -> tuple[Seen, dict]:
    """What each of three workers has seen behind its steps: progress, and the rate of its next step."""
    folder = runner.folder / f"{name}-seen"
    folder.mkdir()
    ended = runner.run(cluster, "scheduled.py", str(folder), *args, extra=extra, name=name)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)], ended.final


@pytest.mark.parametrize("cluster", soaked([ISLANDS], [ALLREDUCE]))
def test_with_fixed_parts_two_runs_have_the_same_rates_and_bits(runner: JobRunner, cluster: str) -> None:
    first, values = trained(runner, cluster)
    if SOAK:
        again, other = trained(runner, cluster, name="again")
        assert first == again and all(torch.equal(value, other[name]) for name, value in values.items())
    steps = 360 if cluster == ALLREDUCE else 120  # of 120 batches in each epoch
    for seen in first:
        shares = [share for share, _ in seen]
        assert shares == pytest.approx([k / steps for k in range(1, steps + 1)], abs=1e-12) and shares[-1] == 1.0
        assert [rate for _, rate in seen] == pytest.approx([0.01 * (1 - share) for share in shares], abs=1e-12)


@pytest.mark.parametrize(
    ("cluster", "extra"),
    soaked([(f"{ISLANDS} quorum: 1 transport: kTcp", "")], [(ISLANDS, "shard: kLease"), (HOGWILD, "")]),
)
def test_with_leases_a_slow_worker_comes_to_the_end_of_its_schedule(
    runner: JobRunner, cluster: str, extra: str
) -> None:
    seen, _ = trained(runner, cluster, "--slow", "1", extra=extra)
    for each in seen:
        shares = [share for share, _ in each]
        # In the last of three epochs, and each rate is that of the job.
        assert shares == sorted(shares) and 0 < shares[0] < 1 / 3 and 2 / 3 < shares[-1] <= 1.0
        assert [rate for _, rate in each] == pytest.approx([0.01 * (1 - share) for share in shares], abs=1e-12)
    # Where workers wait for each other in each round, all make as many steps.
    assert (
        len(seen[1]) <= len(seen[0]) if "quorum" not in cluster and "outer" in cluster else len(seen[1]) < len(seen[0])
    )
