"""`topotrain probe` on small scripts: what it measures, what it refuses, and what it leaves behind."""

import json
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from launch_targets import wait_for
from shells import Shell, Shells, alive, ended

from topotrain.tools.cli.app import main
from topotrain.tools.probe.forked_processes import ProcessEnded, forked_processes
from topotrain.tools.probe.probe_file import load_probe, parse_probe

pytestmark = pytest.mark.journey

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import topotrain as tt

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 4))
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(4096, 256), torch.randint(4, (4096,))), batch_size=256)
BEFORE
model, optimizer, loader = tt.prepare(model, optimizer, loader)
for epoch in tt.epochs(10000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        STEP
print("the script went on to its end")
"""


def script(folder: Path, before: str = "", step: str = "optimizer.step()") -> Path:
    file = folder / "train.py"
    file.write_text(SCRIPT.replace("BEFORE", before).replace("STEP", step))
    return file


def probing(shells: Shells, served_at: str, *words: str) -> Shell:
    return shells.python("-m", "topotrain", "probe", "--forkserver", served_at, "--seconds", "10", *words)


def test_a_probe_of_a_script(shells: Shells, served_at: str) -> None:
    script(shells.folder)
    (said,) = ended([probing(shells, served_at, "--out", "here.json", "--json", "--quiet", "train.py")], [0])
    found = load_probe(shells.folder / "here.json")
    assert parse_probe(json.loads(said)) == found
    assert [p.name for p in found.model] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    # The gradients of the last layer are there first.
    assert found.model[2].ready < found.model[0].ready <= 1.0
    batch = found.batch
    assert batch.size == 256 and batch.steps >= 3
    assert 0 < batch.per_sample_s * batch.size <= 1.01 * (batch.forward_s + batch.backward_s)
    assert batch.compute_s(256) == pytest.approx(batch.forward_s + batch.backward_s, rel=0.01)
    assert min(batch.forward_s, batch.backward_s, batch.other_s, batch.optimizer_s) > 0
    assert (found.optimizer.name, found.optimizer.state_factor) == ("Adam", 2.0)
    assert min(found.optimizer.fixed_s, found.optimizer.element_s, found.kernels.byte_s) > 0
    for transport in found.transports.values():
        assert min(transport.send_message_s, transport.receive_message_s) > 1e-6
    # The bytes of a body travel over TCP, and are seen where they are in shared memory.
    assert found.transports["tcp"].send_byte_s > 3 * found.transports["shm"].send_byte_s
    assert found.worker_step_s > 0 and found.start_s > 0
    # Steps that are shorter than a turn on a core are made undisturbed, and yet so many copies share the cores.
    assert all(factor >= max(1, count / found.machine.cores) for count, factor in found.sharing.items())
    assert 2 in found.sharing


def test_a_script_that_cannot_be_measured(shells: Shells, served_at: str) -> None:
    script(shells.folder, "tt.epochs = lambda count: range(1)", "optimizer.step(); break")
    (said,) = ended([probing(shells, served_at, "--quiet", "train.py")], [2])
    assert "made 1 step" in said
    assert said.startswith("topotrain: error: program = 'train.py': ") and said.count("\n") == 1
    # Where it was to be written was checked before the script ran. Nothing is left there.
    assert not (shells.folder / "probe.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seconds", "1", "train.py"], "--seconds = 1.0: must be a number >= 10"),
        (["none.py"], "program none.py: cannot be read"),
        ([], "no program"),
        (["--out", "train.py/probe.json", "train.py"], "--out train.py/probe.json: cannot be written"),
    ],
)
def test_bad_options(tmp_path: Path, monkeypatch: Any, capsys: Any, options: list[str], words: str) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["probe", *options])
    said = capsys.readouterr().err
    assert left.value.code == 2 and words in said and said.count("\n") == 1


@pytest.mark.parametrize(("call", "words"), [("json:loads", "TypeError: loads"), ("builtins:print", "socket")])
def test_a_process_that_fails_or_ends_has_given_no_answer(served_at: str, call: str, words: str) -> None:
    with (
        forked_processes(served_at) as processes,
        closing(processes.start(call, {}, "one")) as process,
        pytest.raises(ProcessEnded, match=words),
    ):
        process.answer(60.0)


def test_ctrl_c_leaves_no_process(shells: Shells) -> None:
    script(shells.folder, before="import os; open(f'pid-{os.getpid()}', 'w').close()")
    # With a forkserver of its own, which must be gone, too.
    shell = shells.python("-m", "topotrain", "probe", "--seconds", "30", "train.py")
    wait_for(lambda: any(shells.folder.glob("pid-*")), 60)
    shell.send_signal(signal.SIGINT)
    ended([shell], [130])
    pids = [int(file.name.removeprefix("pid-")) for file in shells.folder.glob("pid-*")]
    wait_for(lambda: not alive(pids), 20)
