"""A package with relative imports that trains under `topotrain run JOB.conf -m package.module`."""

import json

import pytest
from job_runner import ALLREDUCE, JobRunner

pytestmark = pytest.mark.journey

FILES = {
    "__init__": "",
    "model": """
from torch import nn

def build():
    return nn.Linear(4, 1)
""",
    "train": """
import json
import sys

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

from .model import build

assert __name__ == "__main__" and vars(sys.modules["__main__"]) is globals()
torch.manual_seed(0)
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(24, 4), torch.ones(24, 1)), batch_size=6)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
for _ in tt.epochs(1):
    for x, y in loader:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
if tt.is_main():
    print(json.dumps([__package__, __spec__.name, __file__, sys.argv, sys.path[0]]))
""",
}


@pytest.fixture
def package(runner: JobRunner) -> JobRunner:
    folder = runner.folder / "orchard"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    return runner


def test_a_package_trains_as_python_m_runs_it(package: JobRunner) -> None:
    ended = package.run(ALLREDUCE, "-m", "orchard.train", "--lr", "1")
    file = str(package.folder / "orchard" / "train.py")
    expected = ["orchard", "orchard.train", file, [file, "--lr", "1"], str(package.folder)]
    assert json.loads(ended.out) == expected
    assert ended.report["program"] == "-m orchard.train"
    assert ended.final["weight"].shape == (1, 4)
