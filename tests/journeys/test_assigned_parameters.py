"""Jobs of real processes whose scripts change parameters (`tt.assign`)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from job_runner import JobRunner

pytestmark = pytest.mark.journey

PROGRAM = "assigning.py"
TWO_BY_TWO = "nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true"
ALLREDUCE = "nworkers_per_group: 2 nservers_per_group: 2"


def plainly(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """What `python assigning.py` leaves."""
    out = folder / "plain.pt"
    program = str(Path(__file__).parents[1] / "programs" / PROGRAM)
    subprocess.run([sys.executable, program, kind, "--out", str(out)], check=True, capture_output=True, timeout=120)
    return torch.load(out, weights_only=True)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    a, b = (torch.cat([v.double().flatten() for _, v in sorted(each.items())]) for each in (one, other))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("kind", ["after", "before", "average", "anew"])
def test_synchronous_jobs_equal_plain_python(runner: JobRunner, kind: str) -> None:
    expected = plainly(runner.folder, kind)
    for name, cluster in (("two", TWO_BY_TWO), ("tcp", f"{TWO_BY_TWO} transport: kTcp"), ("all", ALLREDUCE)):
        final = runner.run(cluster, PROGRAM, kind, name=name).final
        assert distance(final, expected) < 1e-6, (kind, name)
