"""What plans say that processes will hold, beside what they have held; and a limit too small.

Processes have limits of their own here, which the forkserver hands on to what it forks.
"""

import resource
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from job_runner import JobRunner
from programs import heavy, weighed

from topotrain.config.job_file import load_with_warnings
from topotrain.config.sharding import Parameter
from topotrain.launch.agent import forkserver
from topotrain.parallel.estimate.memory_check import ITSELF
from topotrain.tools.plan.layout_plan import PlannedSchema, plan
from topotrain.tools.plan.model_cut import cut_of

pytestmark = pytest.mark.journey

OPEN = 0.04
"""What the test leaves open, as a part of the whole: mostly what Python and torch take while they train."""


@pytest.fixture(scope="module")
def taken_anyway(tmp_path_factory: pytest.TempPathFactory, served_at: str, warm_at: str) -> float:
    """What a process takes of its own when it trains next to nothing, bytes: it differs between machines."""
    runner = JobRunner(tmp_path_factory.mktemp("empty"), served_at, warm_at)
    cluster = "nworkers_per_group: 2 nservers_per_group: 2 transport: kTcp"
    own: float = runner.run(cluster, "heavy.py", "empty", extra=heavy.PARTS).report["metrics"]["own"]
    return own


def test_the_plan_says_what_a_process_holds_at_its_most(runner: JobRunner, taken_anyway: float) -> None:
    """All of it is held at once, so a plan that says too much is found out as well as one that forgets something: each
    of parameters, gradients, state and a snapshot's copy is more than the test leaves open."""
    extra = f"{heavy.PARTS} snapshot_s: 0.05"  # if at all, behind a step before the last: they take longer
    ended = runner.run("nworkers_per_group: 2 nservers_per_group: 2 transport: kShm", "heavy.py", extra=extra)
    job, _ = load_with_warnings(str(runner.folder / "job.conf"))
    model, loader = heavy.made()
    found = cut_of(job, model, loader, state_factor=2.0)
    assert found is not None
    # Pages of libraries that a process maps only when it trains are counted in the process itself.
    measured = ended.report["metrics"]
    itself = measured["itself"] + measured["files"] + taken_anyway
    need = found.plan.needs[next(n for n, need in enumerate(found.plan.needs) if "worker 0/0" in need.who)]
    told = itself + heavy.DATA + need.resident
    assert measured["apart"] + taken_anyway < 1.2 * ITSELF  # the tests' forkserver has more modules than a job's
    smallest = min(filter(None, (need.values, need.gradients, need.state, need.snapshot)))
    assert smallest > OPEN * told
    assert told == pytest.approx(measured["peak"], rel=OPEN)


DEEP = """
import torch
from torch import nn
import topotrain as tt
model = nn.Sequential()
for worker in range(2):
    with tt.device(f"/job:worker/task:{worker}"):
        model.extend(nn.Linear(2000, 2000, bias=False) for _ in range(5))
model, optimizer = tt.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
model(torch.ones(4, 2000))
"""


def test_what_does_not_fit_is_refused_before_it_is_made(tmp_path: Path) -> None:
    most, script = 400 << 20, tmp_path / "deep.py"
    script.write_text(DEEP)
    with closing(forkserver.start(tmp_path / "forkserver.log")) as served:
        runner = JobRunner(tmp_path, served.path)
        resource.prlimit(served.process.pid, resource.RLIMIT_DATA, (most, most))
        cluster = "nworkers_per_group: 2 nservers_per_group: 2 transport: kTcp"
        command = runner.command(cluster, str(script))
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    for words in ("memory = '", "does not fit: it would need", "RLIMIT_DATA allows 419.4 MB", "would help"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr


SERVER_ITSELF = 25e6
"""What Python, torch and the connections take in a server's process that it does not share with the forkserver."""


def test_a_process_holds_its_own_server_and_the_second_copy_of_another(runner: JobRunner) -> None:
    cluster = "nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true transport: kTcp replicas: 2"
    ended = runner.run(cluster, "weighed.py", str(runner.folder / "job"), extra="snapshot_s: 0")
    job, _ = load_with_warnings(str(runner.folder / "job.conf"))
    weights = weighed.made()[0].named_parameters()
    parameters = tuple(Parameter(name, tuple(w.shape), w.stride(), "float32", True) for name, w in weights)
    found = plan(job, PlannedSchema(parameters, state_factor=2.0))
    for memory in found.memory[2:]:
        smallest = min(memory.values, memory.state, memory.exchange, memory.second)
        # On one host both copies of a server read gradients in memory that they share, and a process shares those of
        # its own server and of the other one.
        shared = 2 * 2 * memory.values
        told = memory.total + SERVER_ITSELF - shared
        assert smallest > 0.1 * told
        assert told == pytest.approx(ended.report["metrics"][memory.who], rel=0.1)
