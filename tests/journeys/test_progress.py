"""`tt.progress` in real jobs: a schedule over the job, on slow workers, too."""

import json

import pytest
from job_runner import JobRunner

pytestmark = pytest.mark.journey

OUTER = "outer { type: kNesterov momentum: 0.9 learning_rate { type: kFixed base_lr: 0.7 } }"
ISLANDS = f"nworker_groups: 3 server_worker_separate: true sync_freq: 5 {OUTER}"


def trained(runner: JobRunner, cluster: str, *args: str) -> list[list[tuple[float, float]]]:
    """What each of three workers has seen behind its steps: progress, and the rate of its next step."""
    folder = runner.folder / "seen"
    folder.mkdir()
    runner.run(cluster, "scheduled.py", str(folder), *args)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def test_with_fixed_parts_the_rate_follows_the_schedule(runner: JobRunner) -> None:
    steps = 120  # of 120 batches in each epoch
    for seen in trained(runner, ISLANDS):
        shares = [share for share, _ in seen]
        assert shares == pytest.approx([k / steps for k in range(1, steps + 1)], abs=1e-12) and shares[-1] == 1.0
        assert [rate for _, rate in seen] == pytest.approx([0.01 * (1 - share) for share in shares], abs=1e-12)


def test_with_leases_a_slow_worker_comes_to_the_end_of_its_schedule(runner: JobRunner) -> None:
    seen = trained(runner, f"{ISLANDS} quorum: 1 transport: kTcp", "--slow", "1")
    for each in seen:
        shares = [share for share, _ in each]
        # In the last of three epochs, and each rate is that of the job.
        assert shares == sorted(shares) and 0 < shares[0] < 1 / 3 and 2 / 3 < shares[-1] <= 1.0
        assert [rate for _, rate in each] == pytest.approx([0.01 * (1 - share) for share in shares], abs=1e-12)
    assert len(seen[1]) < len(seen[0])
