"""Write the first job file and training script of a new project.

* An existing file is never overwritten: if one exists, nothing is written.
* The script makes its data itself, so it runs without a network.
"""

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from topotrain.config.job import ConfigError

JOB_NAME, SCRIPT_NAME = "job.conf", "train.py"
DEFAULT = "allreduce"


CLUSTERS: Mapping[str, tuple[str, str]] = {
    "sandblaster": (
        "Sandblaster: two workers take each step together. A server in a process of its own has the parameters.",
        """\
  nworker_groups: 1             # one group, so all workers wait for each other at every step
  nworkers_per_group: 2         # add workers here
  nservers_per_group: 1         # several servers share the parameters among them
  server_worker_separate: true  # servers have processes of their own
""",
    ),
    "allreduce": (
        "AllReduce: two workers take each step together. Each of them has a server beside it with its part of the\n"
        "# parameters.",
        """\
  nworker_groups: 1      # one group, so all workers wait for each other at every step
  nworkers_per_group: 2  # add workers here, and as many servers below
  nservers_per_group: 2
""",
    ),
    "downpour": (
        "Downpour: two worker groups send their gradients to the same server. No group waits for the other.",
        """\
  nworker_groups: 2             # add groups here
  nworkers_per_group: 1         # workers of one group wait for each other
  nserver_groups: 1             # all groups use the same values
  nservers_per_group: 1         # several servers share the parameters among them
  server_worker_separate: true  # servers have processes of their own
  # max_staleness: 4            # bounds how many steps a group may be ahead of the slowest one
""",
    ),
    "hogwild": (
        "Distributed Hogwild: two workers have a server with all parameters each. The servers exchange updates.",
        """\
  nworker_groups: 2      # add groups here, and as many server groups below
  nworkers_per_group: 1  # workers of one group wait for each other
  nserver_groups: 2
  nservers_per_group: 1
  sync_freq: 1           # the server groups exchange their updates after so many steps
""",
    ),
}
"""What each cluster block means, and the lines of its fields."""

JOB_FILE = """\
# {meaning}
# The page docs/configuration.md of topotrain lists all fields.
# `topotrain plan {job}` shows the processes that this block makes.
name: "{name}"
program: "{script}"  # a path from the folder in which the command is given
# args: "--epochs"   # words for the script, one field each
# args: "50"
seed: 1
cluster {{
{fields}  workspace: "workspace/{name}"  # logs, snapshots and the final parameters
}}
# snapshot_s: 30            # seconds between two snapshots, from which `topotrain run --resume` goes on
# on_failure: kContinue     # what died starts again; kStop ends the job
# rendezvous: "tcp://10.0.0.1:29400"  # for several machines: where the processes find each other
"""

SCRIPT = '''\
"""Learn to which of three spirals a point belongs; the data is made here.

    python train.py                        # one ordinary process
    topotrain run job.conf train.py        # the same script, under the cluster block of job.conf
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt


def spirals(points: int, seed: int) -> TensorDataset:
    """Return points of three spirals, with the number of the spiral of each."""
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (points,), generator=made)
    radius = torch.rand(points, generator=made)
    noise = 0.15 * torch.randn(points, generator=made)
    angle = 4.0 * radius + 2.0 * math.pi / 3.0 * labels + noise
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels)


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the share of points that the model assigns to the right spiral."""
    points, labels = data.tensors
    right: Tensor = model(points).argmax(dim=1) == labels
    return right.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Tell three spirals apart.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="samples per step, over all workers of a group together")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    options = parser.parse_args()

    torch.manual_seed(0)  # so that a synchronous run can be repeated
    train, held_out = spirals(3000, seed=1), spirals(600, seed=2)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)
    loader = DataLoader(train, batch_size=options.batch, shuffle=True)
    loss_of = nn.CrossEntropyLoss()

    # From here on the loader gives each worker its share of the data, and the optimizer steps with all of them.
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    for _ in tt.epochs(options.epochs):
        for points, labels in loader:
            optimizer.zero_grad()
            loss_of(model(points), labels).backward()
            optimizer.step()

    # A function: it is called with the final parameters, which are the same for all workers.
    tt.report(accuracy=lambda: accuracy(model, held_out))


if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True, slots=True)
class StarterFiles:
    """The files that were written, and the commands to try next."""

    files: tuple[Path, ...]
    commands: tuple[str, ...]


def write_starter(folder: Path, framework: str = DEFAULT) -> StarterFiles:
    """Write a job file and a script into a folder, which is made if it is missing.

    Raises:
        ConfigError: the framework is unknown, a file exists, or one cannot be written.
    """
    if framework not in CLUSTERS:
        raise ConfigError("--framework", framework, f"must be one of {', '.join(CLUSTERS)}")
    contents = {folder / JOB_NAME: job_text(framework), folder / SCRIPT_NAME: SCRIPT}
    # All of them are looked for before the first is written, so that no half of a project is left.
    for path in contents:
        if os.path.lexists(path):
            raise _exists(path)
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in contents.items():
            # Mode x: another process may have made the file meanwhile.
            with open(path, "x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        # Of a full disk nothing is left, so that the command can be given again.
        for path in written:
            with suppress(OSError):
                path.unlink()
        if isinstance(error, FileExistsError) and error.filename != str(folder):
            raise _exists(Path(error.filename)) from None
        raise ConfigError("FOLDER", str(folder), f"cannot be written ({error.strerror})") from None
    return StarterFiles(tuple(contents), _commands(folder))


def job_text(framework: str) -> str:
    """Return the text of a job file for one of CLUSTERS."""
    meaning, fields = CLUSTERS[framework]
    return JOB_FILE.format(meaning=meaning, fields=fields, name=framework, job=JOB_NAME, script=SCRIPT_NAME)


def _exists(path: Path) -> ConfigError:
    return ConfigError("file", str(path), "exists and is not overwritten: choose another FOLDER, or move the file away")


def _commands(folder: Path) -> tuple[str, ...]:
    enter = () if folder.resolve() == Path.cwd() else (f"cd {shlex.quote(str(folder))}",)
    return (
        *enter,
        f"topotrain plan {JOB_NAME}",
        f"topotrain doctor {JOB_NAME}",
        f"python {SCRIPT_NAME}",
        f"topotrain check {JOB_NAME} {SCRIPT_NAME}",
        f"topotrain run {JOB_NAME} {SCRIPT_NAME} --epochs 20",
    )
