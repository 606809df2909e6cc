"""A project outside the repository, with the built wheel in an environment of its own (scripts/outside_project.py)."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import outside_project
import pytest
from outside_checks import CHECKS
from seeds import soak_only


@soak_only
@pytest.mark.journey
@pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed: pip install 'topotrain[dev]'")
def test_the_short_form_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, outside_project.__file__, "--short"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS ") == sum(check.short for check in CHECKS) >= 7
    assert not list(tmp_path.glob("topotrain-outside-*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--python", "python9"], "--python python9: must be a Python interpreter"),
        (["--short", "--python", "sh"], "--python: must not be given with --short"),
        (["--only", "nonsense"], "--only nonsense: must be part of one of: the wheel"),
    ],
)
def test_bad_input_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["outside_project.py", *words])
    with pytest.raises(SystemExit, match="2"):
        outside_project.main()
    assert said in capsys.readouterr().err
