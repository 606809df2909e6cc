"""`topotrain doctor`: facts for a bug report, and no secret among them."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import topotrain
from topotrain.tools.cli.app import main
from topotrain.tools.diagnostics.environment_report import (
    LIBRARIES,
    commit,
    environment_report,
    installed,
    report_text,
    shared_memory,
    shown_variables,
    without_user,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def report():
    return environment_report({"OMP_NUM_THREADS": "1", "HOME": "/nowhere"})


def test_the_report_is_data_and_text_of_this_process(report):
    assert report["topotrain"]["version"] == topotrain.__version__
    assert report["torch"]["version"] == torch.__version__
    assert report["torch"]["threads"] == torch.get_num_threads()
    assert report["libraries"]["numpy"] == installed("numpy") is not None
    assert report["memory"]["total_bytes"] > report["memory"]["available_bytes"] > 0
    assert report["cpu"]["usable"] == len(os.sched_getaffinity(0))
    assert json.loads(json.dumps(report)) == report
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in report_text(report).splitlines())
    assert lines["topotrain"].startswith(topotrain.__version__)
    assert (lines["OMP_NUM_THREADS"], lines["TOPOTRAIN_TOKEN"]) == ("1", "not set")
    assert "HOME" not in lines and set(LIBRARIES) < set(lines)
    shown = report_text({**report, "variables": {"OMP_PLACES": "a\n\x1b[2Jb"}})
    assert "\x1b" not in shown and shown.splitlines()[-1].endswith("a??[2Jb"), "no variable controls the terminal"


def test_all_libraries_of_the_project_are_listed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [
        text
        for name, texts in project["optional-dependencies"].items()
        if name not in ("dev", "docs")
        for text in texts
    ]
    names = {re.split(r"[><=]", text)[0] for text in (*project["dependencies"], *extras)}
    assert {*LIBRARIES, "torch"} == names


SECRETS = {
    "TOPOTRAIN_TOKEN": "5ecre7" * 10,
    "TOPOTRAIN_RENDEZVOUS": "redis://ann:5ecre7@4@host:6379/0?job=night",
    "TOPOTRAIN_OTHER": "rediss://host/0?password=5ecre7",
    "NCCL_AUTH_TOKEN": "5ecre7",
    "TORCHELASTIC_URL": "ann:5ecre7@host",
    "AWS_SECRET_ACCESS_KEY": "5ecre7",
    "MASTER_ADDR": "10.0.0.1",
    "TOPOTRAIN_TOKEN_FILE": "/run/token",
}


def test_no_secret_is_shown():
    shown = shown_variables(SECRETS)
    assert "5ecre7" not in json.dumps(shown)
    assert "ann" not in json.dumps(shown)
    assert shown == {
        "MASTER_ADDR": "10.0.0.1",
        "NCCL_AUTH_TOKEN": "set",
        "TOPOTRAIN_OTHER": "rediss://host/0?(hidden)",
        "TOPOTRAIN_RENDEZVOUS": "redis://(user is set)@host:6379/0?job=night",
        "TOPOTRAIN_TOKEN": "set",
        "TOPOTRAIN_TOKEN_FILE": "/run/token",
        "TORCHELASTIC_URL": "(hidden)@host",
    }
    assert shown_variables({"TOPOTRAIN_TOKEN": ""}) == {"TOPOTRAIN_TOKEN": "not set"}
    for text in ("", "/a/b", "tcp://10.0.0.1:29400", "file:///shared/meeting?job=a", "[::1]", "a?b"):
        assert without_user(text) == text


def test_what_a_machine_does_not_have(tmp_path):
    assert commit(tmp_path) is None
    (tmp_path / ".git").write_text("gitdir: /nowhere\n")
    assert commit(tmp_path) == "unknown"
    assert shared_memory(tmp_path / "gone") is None
    assert shared_memory(tmp_path)["size_bytes"] > 0


def test_the_command_shows_no_secret(capsys, monkeypatch):
    monkeypatch.setenv("TOPOTRAIN_TOKEN", SECRETS["TOPOTRAIN_TOKEN"])
    for words in (["doctor"], ["doctor", "--json"]):
        with pytest.raises(SystemExit) as left:
            main(words)
        printed = capsys.readouterr()
        assert (left.value.code, printed.err) == (0, "") and "5ecre7" not in printed.out
    assert json.loads(printed.out)["variables"]["TOPOTRAIN_TOKEN"] == "set"


@pytest.mark.journey
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [((), 0, "cannot be imported"), (("job.conf",), 1, "failed   versions    torch cannot")],
)
def test_without_torch_the_command_says_so(tmp_path, words, code, said):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')")
    (tmp_path / "job.conf").write_text("cluster { nworkers_per_group: 2 }")
    command = [sys.executable, "-m", "topotrain", "doctor", *words]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert said in done.stdout and "No module named torch" in done.stdout
