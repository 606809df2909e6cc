"""Packages that nothing else imports can be deleted: automatic placement, TensorFlow's client session, exports.

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
    "tools/dashboard": {"tools/cli/watch.py"},
    "tools/replay": {"tools/cli/run.py"},
    "tools/exporters": {
        "tools/cli/export_arguments.py",
        "tools/cli/unit.py",
        "tools/monitor/monitored_run.py",
        "tools/dashboard/web_routes.py",
        "__init__.py",
    },
    "tools/advice": {
        *(f"tools/cli/performance/{name}.py" for name in ("advise_command", "automatic_job", "shown_search")),
        "__init__.py",
    },
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
from topotrain.config.job import Cluster, ConfigError, Job, Partition, Placement
from topotrain.tools.plan.model_cut import cut_of

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
loader = DataLoader(TensorDataset(torch.zeros(8, 4), torch.zeros(8, 2)), batch_size=4)
blocks = (Partition(match="^0$", partition_dim=-1, location=0), Partition(match="^2$", partition_dim=-1, location=1))
job = Job(cluster=Cluster(nworkers_per_group=2), partition=blocks)
assert cut_of(job, model, loader) is not None
try:
    cut_of(replace(job, partition=(), placement=Placement.kAuto), model, loader)
except ConfigError as error:
    assert "placement" in str(error) and "topotrain.parallel.auto_placement" in str(error), error
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

DASHBOARD = """
from pathlib import Path
from topotrain.tools.cli.job_arguments import BadInput
from topotrain.tools.cli.watch import serve, watched, write_page

with watched(None, "127.0.0.1", "."):
    pass
open_page = lambda: watched(0, "127.0.0.1", ".").__enter__()
for use in (open_page, lambda: serve([Path()], 0, ""), lambda: write_page(Path(), ())):
    try:
        use()
    except BadInput as error:
        assert "this installation has no page (package topotrain.tools.dashboard)" in str(error), error
    else:
        raise AssertionError("not refused")
"""


EXPORTS = """
from topotrain.config.job import ConfigError, Job
from topotrain.tools.cli.export_arguments import exports_of

with exports_of(Job(), [], "") as none:
    assert none is None
for logs, metrics, option in ((["jsonl"], "", "--log"), ([], "0", "--metrics")):
    try:
        with exports_of(Job(), logs, metrics):
            raise AssertionError("was not refused")
    except ConfigError as error:
        assert option in str(error) and "needs topotrain.tools.exporters" in str(error), error
"""


REPLAY = """
from pathlib import Path
from topotrain.config.job import Job
from topotrain.config.topology import layout
from topotrain.tools.cli import app, run
from topotrain.tools.cli.job_arguments import BadInput

names = [command.name for command in app.app.registered_commands]
assert "replay" not in names and "run" in names
try:
    run._recording(Job(), layout(Job().cluster), False, Path("job.record"))
except BadInput as error:
    assert "--record needs topotrain.tools.replay" in str(error), error
else:
    raise AssertionError("was not refused")
"""


ADVICE = """
from topotrain.config.job import Cluster, ConfigError
from topotrain.tools.cli import app

try:
    Cluster(auto=True)
except ConfigError as error:
    assert "cluster.auto = true: needs topotrain.tools.advice" in str(error), error
else:
    raise AssertionError("auto was not refused")
try:
    app.main(["advise", "train.py"])
except SystemExit as ended:
    assert ended.code == 2, ended.code
"""


@pytest.mark.journey
@pytest.mark.parametrize(
    ("package", "then"),
    [
        ("parallel/auto_placement", PLACEMENT),
        ("compat/tensorflow/session", SESSION),
        ("tools/dashboard", DASHBOARD),
        ("tools/exporters", EXPORTS),
        ("tools/replay", REPLAY),
        ("tools/advice", ADVICE),
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
