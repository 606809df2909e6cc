"""The examples: each has a row on its page, and measures and results of the larger ones are what their names say."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from seeds import soak_only
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 150


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_row_and_is_short() -> None:
    rows = re.findall(r"^\| (\[.*?\]\(.*?) \|", (ROOT / "docs" / "examples.md").read_text(encoding="utf-8"), re.M)
    named = re.findall(r"\(\.\./examples/(\w+)\.py\)", "\n".join(rows))
    assert sorted(named) == [path.stem for path in EXAMPLES]
    for path in EXAMPLES:
        assert path.read_text(encoding="utf-8").count("\n") <= MOST_LINES, path.name


# ---- a language model ------------------------------------------------------------------------------------------------


def test_letters_go_into_numbers_and_back() -> None:
    example = load("language_model")
    numbers = example.encode("a\nb é")
    assert "".join(example.LETTERS[number] for number in numbers) == "a\nb  "
    train, held_out = example.read_pages()
    text, following = train[0]
    assert len(text) == example.CONTEXT and torch.equal(text[1:], following[:-1])
    assert len(train) * example.CONTEXT > 10 * len(held_out) > 100_000


def test_the_bits_of_a_model_that_knows_nothing_and_of_one_that_learns() -> None:
    example = load("language_model")
    train, held_out = example.read_pages()

    class Nothing(nn.Module):
        def forward(self, text: Tensor) -> Tensor:
            return torch.zeros(*text.shape, len(example.LETTERS))

    assert example.bits_per_character(Nothing(), held_out) == pytest.approx(6.585, abs=1e-3)  # log2(96)
    torch.manual_seed(0)
    model = example.Transformer()
    before = example.bits_per_character(model, held_out[:5000])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(40):
        text, following = train[16 * step : 16 * step + 16]
        optimizer.zero_grad()
        cross_entropy(model(text).flatten(0, 1), following.flatten()).backward()
        optimizer.step()
    assert example.bits_per_character(model, held_out[:5000]) < before - 1.5
    written = example.write(model, "The ", 20)
    assert written.startswith("The ") and len(written) == 24


def test_a_letter_depends_on_those_before_it_alone() -> None:
    example = load("language_model")
    torch.manual_seed(0)
    model = example.Transformer()
    text = torch.randint(len(example.LETTERS), (1, example.CONTEXT))
    other = text.clone()
    other[0, 40:] = 3
    first, second = model(text), model(other)
    assert torch.allclose(first[0, :40], second[0, :40], atol=1e-5)
    assert not torch.allclose(first[0, 40:], second[0, 40:], atol=1e-2)


# ---- a GAN -----------------------------------------------------------------------------------------------------------


def test_clouds_are_counted_and_drawn() -> None:
    example = load("gan")
    (real,) = example.points(4000).tensors
    reached, share = example.quality(real)
    assert reached == example.CLOUDS and share > 0.97
    one = real[torch.cdist(real, example.centers()).argmin(dim=1) == 0]
    assert example.quality(one)[0] == 1
    assert example.quality(torch.zeros(100, 2)) == (0, 0.0)
    drawn = example.picture(one).split("\n")
    marks = [(row, line.index("#")) for row, line in enumerate(drawn) if "#" in line]
    assert marks and all(row in (7, 8, 9) and column > 24 for row, column in marks)  # the first cloud is on the right
    assert example.picture(torch.full((10, 2), 99.0)).strip() == ""


@soak_only
@pytest.mark.journey
def test_the_gan_trains_in_an_ordinary_process(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "examples" / "gan.py"), "--epochs", "10"]
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^epoch 10: [5-8] of 8 clouds", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^in_clouds: 0\.\d+$", done.stdout, re.MULTILINE)


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_recommendations_and_their_measure() -> None:
    example = load("embedding")

    class Knows(nn.Module):
        def forward(self, user: Tensor, thing: Tensor) -> Tensor:
            return (user // example.FAR % 4 == thing % 4).float() - 0.5

    held_out = example.tastes(2000, seed=2)
    assert 0.93 < example.accuracy(Knows(), held_out) < 0.97  # one of twenty is an exception
    assert all(thing % 4 == 3 for thing in example.recommend(Knows(), 3))
