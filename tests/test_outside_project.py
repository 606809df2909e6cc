"""A project outside the repository, with the built wheel in an environment of its own (scripts/outside_project.py)."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import outside_project
import pytest
from outside_checks import CHECKS


def script(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, outside_project.__file__, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.journey
@pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed: pip install 'topotrain[dev]'")
def test_the_short_form_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = script("--short")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS ") == sum(check.short for check in CHECKS) >= 7
    assert not list(tmp_path.glob("topotrain-outside-*"))


@pytest.mark.journey
def test_bad_input_is_refused() -> None:
    for words, said in (
        (["--python", "python9"], "--python python9: must be a Python interpreter"),
        (["--short", "--python", "sh"], "--python: must not be given with --short"),
        (["--only", "nonsense"], "--only nonsense: must be part of one of: the wheel"),
    ):
        done = script(*words)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
