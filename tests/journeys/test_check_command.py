"""`topotrain check` says whether a job is the plain script; if not, the first step that differs and why."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from launch_targets import wait_for
from process_pool import Forked
from seeds import soak_only, soaked
from shells import Shells, alive, ended

pytestmark = pytest.mark.journey
ROOT = Path(__file__).parents[2]
CHECKED = ROOT / "tests/programs/checked.py"
TWO = "cluster { nworkers_per_group: 2 nworkers_per_procs: 2 nservers_per_group: 1 server_worker_separate: true }"
ISLANDS = """cluster {
  nworker_groups: 2 server_worker_separate: true sync_freq: 5
  outer { type: kNesterov momentum: 0.9 learning_rate { type: kFixed base_lr: 0.7 } }
}"""
DOWNPOUR = "cluster { nworker_groups: 2 nworkers_per_group: 2 server_worker_separate: true max_staleness: 4 }"


@pytest.fixture
def check(tmp_path: Path, served_at: str, warm_at: str) -> Any:
    """Run the command; its exit code and what it printed, errors included."""

    def run(cluster: str, *words: str, program: Path = CHECKED, options: tuple[str, ...] = ()) -> tuple[int, str]:
        conf = tmp_path / "job.conf"
        conf.write_text(f'name: "job"\n{cluster}\n')
        said = ["-m", "topotrain", "check", *options, "--forkserver", served_at, str(conf), str(program), *words]
        process = Forked(warm_at, said, tmp_path, os.environ)
        out, _ = process.communicate(300)
        assert process.returncode is not None
        return process.returncode, out

    return run


DIFFERS = "different: step 1: the gradient of 0."
CASES = [  # cluster, arguments of the script, options, and what is printed; the exit code is 1 where a cause is named
    (TWO, "pairs", (), (DIFFERS, "pairs: see tt.gather")),
    (TWO, "share", ("--whole",), ("different", "tt.report", "loss")),
    (TWO, "dropout", ("--eval-mode", "--steps", "3"), ("equal: 3 steps",)),
    (ISLANDS, "plain", ("--steps", "6"), ("equal: 6 steps",)),
]
ALSO = [
    (TWO, "dropout", (), (DIFFERS, "dropout acts on a worker's share")),
    (TWO, "hook", (), (DIFFERS, "a hook bounds")),
    (TWO, "norm", (), (DIFFERS, "BatchNorm acts on a worker's share")),
    (TWO, "sum", (), (DIFFERS, "the loss is a sum over the batch")),
    (TWO, "random", (), (DIFFERS, "each worker draws its own")),
    (TWO, "unstable", ("--whole",), ("equal: ",)),  # it amplifies rounding
    (DOWNPOUR, "plain", ("--steps", "6"), ("equal: 6 steps",)),
    (TWO, "fails", ("--whole",), ("plain Python cannot run", "the script's own error")),
]


@pytest.mark.parametrize(("cluster", "variant", "options", "words"), soaked(CASES, ALSO))
def test_a_job_is_equal_or_differs_first_in_a_step_and_a_parameter_with_a_cause(
    check: Any, cluster: str, variant: str, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    code, out = check(cluster, variant, options=options)
    assert code == (0 if words[0].startswith("equal") else 1), out
    assert all(word in out for word in words), out


def test_equal_scripts_are_equal_to_their_end(check: Any, tmp_path: Path) -> None:
    code, out = check(TWO, "plain", options=("--json", "--quiet", "--whole"))
    found = json.loads(out)
    assert (code, found["equal"], found["steps"], found["parameters"]) == (0, True, 8, 4), out
    assert found["largest"] < 1e-5
    assert [each.name for each in tmp_path.iterdir()] == ["job.conf"]  # it leaves nothing


@soak_only
@pytest.mark.parametrize(("name", "words"), [("gan", "each worker draws its own"), ("digits", "equal: 8 steps")])
def test_the_examples_are_plain_scripts_but_for_their_noise(check: Any, name: str, words: str) -> None:
    _, out = check(TWO, program=ROOT / "examples" / f"{name}.py", options=("--steps", "8"))
    assert words in out


ENDLESS = """
import os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import topotrain as tt
from topotrain.training import context

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = tt.prepare(model, optimizer, DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=12))
in_job = context.current() is not None
for _ in tt.epochs(10**6 if sys.argv[1] == "plain" or in_job else 1):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if in_job or sys.argv[1] == "plain":
            open(f"{sys.argv[2]}/pid-{os.getpid()}", "w").close()
"""


@pytest.mark.parametrize("stage", soaked(["job"], ["plain"]))
def test_ctrl_c_leaves_no_process(shells: Shells, stage: str) -> None:
    (shells.folder / "train.py").write_text(ENDLESS)
    (shells.folder / "job.conf").write_text(TWO)
    # With a forkserver of its own, which must be gone, too.
    words = ("-m", "topotrain", "check", "--whole", "job.conf", "train.py", stage, str(shells.folder))
    shell = shells.python(*words)
    wait_for(lambda: any(shells.folder.glob("pid-*")), 60)
    shell.send_signal(signal.SIGINT)
    ended([shell], [130])
    pids = [int(file.name.removeprefix("pid-")) for file in shells.folder.glob("pid-*")]
    wait_for(lambda: not alive(pids), 20)
