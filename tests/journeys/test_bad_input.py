"""What a typo gets: one clear message that names what is wrong and what would be right, code 2, nothing started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.journey


def ask(folder: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "topotrain", *words]
    mark = {**os.environ, "TOPOTRAIN_TEST_MARK": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=mark, timeout=60)
    return done.returncode, done.stdout + done.stderr


def left_behind(folder: Path) -> list[int]:
    """Processes that carry the mark of this test in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            try:
                if f"TOPOTRAIN_TEST_MARK={folder}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ("cluster { nworker_group: 2 }", ["job.conf:1:11", "nworker_group", "nworker_groups"]),
        ('cluster { workspace: "taken/below" }', ["taken"]),
    ],
)
def test_a_wrong_conf(tmp_path: Path, conf: str, words: list[str]) -> None:
    (tmp_path / "job.conf").write_text(conf + "\n")
    (tmp_path / "train.py").write_text("raise SystemExit('started')\n")
    (tmp_path / "taken").write_text("a file where the workspace should be\n")
    code, said = ask(tmp_path, "run", "job.conf", "train.py")
    assert code == 2, said
    assert "Traceback" not in said
    assert "started" not in said
    for word in words:
        assert word in said
    assert left_behind(tmp_path) == []


OUTER = "outer { type: kSGD learning_rate { type: kFixed base_lr: 1 } }"
THREE_TENSORS = """
import torch, topotrain as tt
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
model[0].bias.requires_grad_(False)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
tt.prepare(model, optimizer, torch.utils.data.DataLoader(torch.zeros(8, 2)))
"""


def test_a_plan_refuses_more_fragments_than_the_script_has_parameters(tmp_path: Path) -> None:
    (tmp_path / "job.conf").write_text(f"cluster {{ nworker_groups: 2 sync_freq: 8 fragments: 4 {OUTER} }}\n")
    (tmp_path / "train.py").write_text(THREE_TENSORS)
    code, said = ask(tmp_path, "plan", "job.conf", "train.py")
    words = "cluster.fragments = 4: must be at most 3, the number of parameters that the optimizer has\n"
    assert (code, said.partition("error: ")[2]) == (2, words), said
    assert ask(tmp_path, "plan", "--set", "cluster.fragments=2", "job.conf", "train.py")[0] == 0
