"""A user's project under the type checkers mypy and pyright: types go through, and misspelled names are found."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from seeds import soaked

ROOT = Path(__file__).parents[1]

PROJECT = """\
import torch
import topotrain as tt
from torch.utils.data import DataLoader, TensorDataset


class Net(torch.nn.Linear):
    depth = 1


data = TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1))
loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(data, batch_size=4)
model = Net(2, 1)
prepared, optimizer, batches = tt.prepare(model, torch.optim.Adam(model.parameters()), loader)
reveal_type(prepared)
reveal_type(optimizer)
reveal_type(batches)
reveal_type(tt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))
reveal_type(tt.prepare(model, None)[1])
reveal_type(tt.prepare(model, None, loader))
reveal_type(tt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), None))
judge = torch.nn.Linear(1, 1)
opt_judge = torch.optim.SGD(judge.parameters(), lr=0.1)
reveal_type(tt.prepare(judge, opt_judge))
reveal_type(tt.prepare(opt_judge))
reveal_type(tt.prepare(model, judge, optimizer, opt_judge, loader, torch.amp.GradScaler("cpu")))
reveal_type(len(tt.epochs(3)))
for epoch in tt.epochs(3):
    reveal_type(epoch)
    for inputs, targets in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(prepared(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
with tt.assign(prepared, list(prepared.parameters())):
    prepared.requires_grad_(True)
tt.log(loss=torch.zeros(()), depth=prepared.depth)
tt.report(depth=prepared.depth, loss=lambda: 0.5)
reveal_type(tt.mean(0.5, weight=3))
reveal_type(tt.mean(torch.zeros(2)))
reveal_type(tt.sum(3, over="job"))
reveal_type(tt.max(torch.zeros(2)))
reveal_type(tt.gather(torch.zeros(2), grad=True))
reveal_type(tt.broadcast({"lr": 0.1}))
reveal_type(tt.global_step())
tt.save(tt.state_dict(model), "now.pt")
"""
REVEALED = [
    "Net",
    "Adam",
    "DataLoader[tuple[Tensor, ...]]",
    "tuple[Net, SGD]",
    "Optimizer",
    "tuple[Net, Optimizer, DataLoader[tuple[Tensor, ...]]]",
    "tuple[Net, SGD, None]",
    "tuple[Linear, SGD]",
    "SGD",
    "tuple[Net, Linear, Adam, SGD, DataLoader[tuple[Tensor, ...]], GradScaler]",
    "int",
    "int",
    "float",
    "Tensor",
    "int",
    "Tensor",
    "Tensor",
    "dict[str, float]",
    "int",
]
WRONG = {
    "tt.prepair(model)": "prepair",
    "tt.prepare(3)": "prepare",
    "tt.epochs('3')": "epochs",
    "optimizer.stepp()": "stepp",
    "tt.report(accuracy='high')": "accuracy",
}
"""By wrong line: a word of the error."""

CHECKERS = {
    "mypy": [
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--hide-error-context",
        "--cache-dir",
        str(ROOT / ".mypy_cache"),
    ],
    "pyright": ["-m", "basedpyright", "--pythonpath", sys.executable],
}


@pytest.mark.journey
@pytest.mark.parametrize("checker", soaked(["pyright"], ["mypy"]))
def test_a_project_keeps_its_types(checker: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(PROJECT + "\n".join(WRONG) + "\n")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    command = [sys.executable, *CHECKERS[checker], file.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    first = PROJECT.count("\n") + 1
    problems: dict[int, str] = {}
    revealed = []
    for number, said in re.findall(r"train\.py:(\d+):(.*(?:\n\s{4,}.*)*)", done.stdout):
        if found := re.search(r'(?:Revealed type is|Type of ".*?" is) "(.*)"', said):
            revealed.append(re.sub(r"\w+\.(?=\w)|, fallback=.*", "", found[1]))
        elif " error" in said:
            problems[int(number) - first] = said
    assert revealed == REVEALED
    assert sorted(problems) == list(range(len(WRONG))), done.stdout
    for said, word in zip((problems[line] for line in sorted(problems)), WRONG.values(), strict=True):
        assert word in said
