"""Packages that nothing else imports can be deleted: automatic placement, TensorFlow's client session.

A test masks the modules of one package, as if its folder were deleted, in a process that has imported torch and forgets
the package.
"""

from pathlib import Path

import pytest
from process_pool import run_without_package

ROOT = Path(__file__).parents[1]
USERS = {
    "parallel/auto_placement": {"parallel/api/automatic_placement.py"},
    "compat/tensorflow/session": {"compat/tensorflow/train_api.py", "__init__.py"},
}
"""By package: the files that may name its modules. They import them inside functions."""

MASK = """
import importlib, pkgutil, sys
from pathlib import Path

masked = "topotrain." + sys.argv[1].replace("/", ".")
at = Path("topotrain", sys.argv[1])
assert at.is_dir()
gone = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in at.rglob("*.py")}
assert masked in gone and len(gone) > 1
sys.modules.update(dict.fromkeys(gone))
for top in ("config", "core", "comm", "training", "extensions", "parallel", "launch", "compat.tensorflow", "tools"):
    base = importlib.import_module(f"topotrain.{top}")
    for module in pkgutil.walk_packages(base.__path__, f"topotrain.{top}."):
        if module.name not in gone:
            importlib.import_module(module.name)
"""

PLACEMENT = """
import torch
from dataclasses import replace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from topotrain.config.job import Cluster, Job, Partition, Placement
from topotrain.tools.plan.model_cut import cut_of

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
loader = DataLoader(TensorDataset(torch.zeros(8, 4), torch.zeros(8, 2)), batch_size=4)
blocks = (Partition(match="^0$", partition_dim=-1, location=0), Partition(match="^2$", partition_dim=-1, location=1))
job = Job(cluster=Cluster(nworkers_per_group=2), partition=blocks)
assert cut_of(job, model, loader) is not None
try:
    cut_of(replace(job, partition=(), placement=Placement.kAuto), model, loader)
except ImportError as error:
    assert "topotrain.parallel.auto_placement" in str(error), error
else:
    raise AssertionError("kAuto was not refused")
"""

SESSION = """
import topotrain as tt
from topotrain.compat.tensorflow.cluster_spec import ClusterSpec

cluster = tt.train.ClusterSpec({"ps": ["127.0.0.1:2222"], "worker": ["127.0.0.1:2223"]})
assert isinstance(cluster, ClusterSpec) and cluster.num_tasks("worker") == 1
tt.train.Server(cluster, job_name="ps", task_index=0)
for name in ("minimize", "TrainOp"):
    try:
        getattr(tt.train, name)
    except ImportError:
        continue
    raise AssertionError(f"{name} is there")
"""


@pytest.mark.journey
@pytest.mark.parametrize(
    ("package", "then"),
    [
        ("parallel/auto_placement", PLACEMENT),
        ("compat/tensorflow/session", SESSION),
    ],
)
def test_the_rest_works_without(package: str, then: str, warm_at: str) -> None:
    code, out = run_without_package(warm_at, MASK + then, package)
    assert code == 0, out


@pytest.mark.parametrize("package", USERS)
def test_one_place_leads_there(package: str) -> None:
    root, name = ROOT / "topotrain", f"topotrain.{package.replace('/', '.')}."
    files = {
        path.relative_to(root).as_posix() for path in root.rglob("*.py") if name in path.read_text(encoding="utf-8")
    }
    assert {file for file in files if not file.startswith(package)} == USERS[package]
