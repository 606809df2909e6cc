"""What the plan says that processes of a split model will hold, beside what they have held; and a limit too small.

Processes have limits of their own here, which the forkserver hands on to what it forks.
"""

import resource
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from programs import heavy
from shop import Ended, Shop

from topotrain.front.cutting import cut_of
from topotrain.launch import forkserver
from topotrain.split.room import ITSELF
from topotrain.textproto import load_with_warnings

pytestmark = pytest.mark.journey


@pytest.mark.parametrize("road", ["kShm", "kTcp"])
def test_the_plan_says_what_a_process_holds_at_its_most(shop: Shop, road: str) -> None:
    ended = shop.run(f"nworkers_per_group: 2 nservers_per_group: 2 road: {road}", "heavy.py", extra=heavy.PARTS)
    job, _ = load_with_warnings(str(shop.folder / "job.conf"))
    model, loader = heavy.made()
    found = cut_of(job, model, loader, state_factor=2.0)
    assert found is not None
    need = found.plan.needs[next(n for n, need in enumerate(found.plan.needs) if "worker 0/0" in need.who)]
    told = ITSELF + heavy.DATA + need.resident
    assert need.total > 150_000_000
    assert told == pytest.approx(peak(ended), rel=0.25)


def peak(ended: Ended) -> float:
    """The most that worker (0,0) has had in memory, bytes."""
    return float(ended.report["metrics"]["peak"])


def test_what_does_not_fit_is_refused_before_it_is_made(tmp_path: Path) -> None:
    most = 400 << 20
    with closing(forkserver.start(tmp_path / "forkserver.log")) as served:
        shop = Shop(tmp_path, served.path)
        resource.prlimit(served.process.pid, resource.RLIMIT_DATA, (most, most))
        cluster = "nworkers_per_group: 2 nservers_per_group: 2 road: kTcp"
        command = shop.command(cluster, "deep.py", "--workers", "2", "--each", "5", "--width", "2000")
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    for words in ("memory = '", "does not fit: it would need", "RLIMIT_DATA allows 419.4 MB", "would help"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr
