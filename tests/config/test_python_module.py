"""The module that `-m` names: found as Python finds it, without an import, and refused with a hint."""

from pathlib import Path

import pytest

from topotrain.config.job import ConfigError
from topotrain.config.python_module import as_program, find_module, module_of

LOUD = "raise RuntimeError('imported')\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with packages whose import raises."""
    monkeypatch.chdir(tmp_path)
    files = (
        "trees/__init__",
        "trees/train",
        "trees/oak/__init__",
        "trees/oak/__main__",
        "trees/bare/leaf",
        "loose/up/x",
    )
    for name in files:
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(LOUD)
    return tmp_path


def test_a_program_is_a_script_or_a_module() -> None:
    assert module_of(as_program("trees.train")) == "trees.train"
    assert [module_of(program) for program in ("train.py", "-m.py", "")] == [None, None, None]


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("trees.train", "trees/train.py"),
        ("trees.oak", "trees/oak/__main__.py"),
        ("trees.bare.leaf", "trees/bare/leaf.py"),
        ("loose.up.x", "loose/up/x.py"),
    ],
)
def test_a_module_is_found_where_python_finds_it_and_not_imported(here: Path, module: str, file: str) -> None:
    assert find_module(module) == str(here / file)
    assert find_module("json.tool").endswith("json/tool.py")


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        ("trees.tran", "there is no module trees.tran; did you mean trees.train?"),
        ("tres.train", "there is no module tres; did you mean trees?"),
        ("nowhere", "a module is looked for in the working folder and on PYTHONPATH"),
        ("trees", "is a package without __main__.py: add one, or name a module of it: -m trees.train"),
        ("trees/train.py", "a module is named with dots: -m trees.train"),
        ("trees.train.py", "a module is named without .py: -m trees.train"),
        ("trees.train.x", "trees.train is a module and no package"),
        ("", "must be the full name of a module"),
        (".train", "must be the full name of a module"),
        ("sys", "is not written in Python"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_hint(here: Path, module: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_module(module)
    assert hint in str(refused.value)
    assert f"-m {module}" in str(refused.value)
