"""Predicted bytes of a step against those that a real job sends, and against its plan."""

from pathlib import Path

import pytest
from job_runner import JobRunner
from made_probe import made_probe
from seeds import soaked

from topotrain.config.job_file import load_with_warnings
from topotrain.tools.plan.layout_plan import PlannedSchema, plan
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.predict import predict
from topotrain.tools.prediction.prediction import Prediction

pytestmark = pytest.mark.journey

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import topotrain as tt

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(40, 500), nn.ReLU(), nn.Linear(500, 9))
samples = 12 * int(sys.argv[1])
data = TensorDataset(torch.randn(samples, 40), torch.randint(0, 9, (samples,)))
loader = DataLoader(data, batch_size=12)
model, optimizer, loader = tt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), loader)
for epoch in tt.epochs(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
"""
COUNTS = (20_000, 500, 4_500, 9)
TCP = "transport: kTcp"
LAYOUTS = {
    "sandblaster": f"nworkers_per_group: 3 nservers_per_group: 2 server_worker_separate: true {TCP}",
    "ring": f"nworkers_per_group: 3 nservers_per_group: 3 algorithm: kRing {TCP}",
    "downpour": f"nworker_groups: 2 nservers_per_group: 2 server_worker_separate: true {TCP}",
    "in memory": "nworkers_per_group: 2 nworkers_per_procs: 2 nservers_per_procs: 1",
    "fp16": f"nworkers_per_group: 2 server_worker_separate: true compression: kFp16 {TCP}",
}


def predicted(runner: JobRunner, cluster: str) -> Prediction:
    runner.command(cluster, "small.py", name="predicted")
    job, _ = load_with_warnings(str(runner.folder / "predicted.conf"), (), None, ())
    return predict(job, made_probe(COUNTS, batch=12), Machines())


@pytest.mark.parametrize("name", soaked(["fp16"], ["ring", "sandblaster", "downpour", "in memory"]))
def test_bytes_of_a_step_are_those_of_a_real_job(name: str, runner: JobRunner, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cluster = LAYOUTS[name]
    # What the start, the end and the begin of an epoch send is in both jobs. Where groups do not wait for each other, a
    # late one is sent values that another has changed. In a job of few steps that is more than is allowed.
    most, groups = (400, 2) if name == "downpour" else (40, 1)
    short, long = (
        runner.run(cluster, str(script), str(batches), name=f"of{batches}").report["bytes_out"] for batches in (4, most)
    )
    found = predicted(runner, cluster)
    steps = 2 * (most - 4) // groups  # each group has its part of the batches
    told = sum(link.nbytes for link in found.links)
    # Groups lease their batches, and numbers of steps have one digit or two.
    assert (long - short) / steps == pytest.approx(told, rel=0.002)


def test_a_job_over_a_link_says_first_what_a_step_sends(runner: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    script = str(tmp_path / "script.py")
    told = runner.run("nworkers_per_group: 2 nservers_per_group: 2 link { bandwidth: 10 }", script, "1").err
    assert told.count("a step moves 0.10 MB over") == told.count("kFp16 it would be 0.05 MB. At 10 Mbit/s") == 1


def test_bytes_are_those_of_the_plan(runner: JobRunner) -> None:
    cluster = (
        "nworker_groups: 3 server_worker_separate: true sync_freq: 4 "
        "outer { type: kSGD learning_rate { type: kFixed base_lr: 1 } }"
    )
    found = predicted(runner, cluster)
    job, _ = load_with_warnings(str(runner.folder / "predicted.conf"), (), None, ())
    traffic = plan(job, PlannedSchema(made_probe(COUNTS).schema())).traffic
    assert traffic is not None
    for worker in range(3):
        pushed = sum(link.nbytes for link in found.links if link.name.startswith(f"worker {worker}/0 >"))
        assert pushed * 4 == pytest.approx(traffic.worker_bytes, rel=0.02)
    received = sum(link.nbytes for link in found.links if link.name.endswith("> server 0/0"))
    assert received * 4 == pytest.approx(traffic.server_bytes, rel=0.02)
