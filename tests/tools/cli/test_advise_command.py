"""The command `topotrain advise` with a probe that is made up: what it refuses, prints and writes."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from arithmetic_predictor import timed_probe

from topotrain.config import job_file
from topotrain.config.topology import layout
from topotrain.launch.agent.worker_threads import allowed_cores
from topotrain.tools.cli import app
from topotrain.tools.cli.performance.probe_command import unlike_this_machine
from topotrain.tools.diagnostics.environment_report import processor_name
from topotrain.tools.monitor import terminal

Ask = Callable[..., tuple[int, str, str]]
FAST = ("--probe", "probe.json", "--within", "1s", "--sync")


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs the command in a folder with probe.json and train.py: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(terminal, "LINES_S", 600.0)
    (tmp_path / "probe.json").write_text(timed_probe(elements=4000, batch=8).to_json())
    (tmp_path / "train.py").write_text("raise SystemExit('started')\n")
    (tmp_path / "job.conf").write_text('name: "mine"\ncluster { nworkers_per_group: 2 nserver_groups: 1 }\n')

    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            app.main(["advise", *argv])
        printed = capsys.readouterr()
        return int(left.value.code or 0), printed.out, printed.err

    return run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no program: give PROGRAM, -m MODULE, or --probe FILE"),
        (["gone.py"], "program gone.py: cannot be read"),
        (["--probe", "gone.json"], "gone.json: cannot be read as a probe"),
        ([*FAST, "--hosts", "two"], "--hosts = 'two'"),
        ([*FAST, "--link", "1gbit"], "--link: needs --hosts of at least 2"),
        ([*FAST, "--straggler", "1"], "--straggler = '1'"),
        ([*FAST, "--hosts", "2", "--straggler", "5x2"], "--straggler = 5: must be the number of a host, 0 to 1"),
        ([*FAST, "--within", "soon"], "--within = 'soon'"),
        ([*FAST, "--out", "best.txt"], "--out best.txt: must end in .conf"),
        ([*FAST, "--out", "gone/../train.py/best.conf"], "cannot be written"),
        ([*FAST, "--try", "1"], "--try: needs a PROGRAM to run"),
        ([*FAST, "--job", "gone.conf"], "gone.conf"),
        (["--running", "workspace/digits", "--probe", "probe.json"], "--running was removed: `topotrain predict` says"),
    ],
)
def test_bad_input_is_one_line_and_code_2(ask: Ask, words: list[str], told: str) -> None:
    code, out, err = ask(*words)
    assert code == 2, out + err
    assert told in " ".join(err.split())
    assert "Traceback" not in err and "started" not in out + err
    assert err.startswith("topotrain: error: ") and len(err.strip().splitlines()) <= 2


def test_the_advised_layout_is_written_and_can_be_planned(ask: Ask) -> None:
    code, out, err = ask(
        *FAST, "--hosts", "2", "--link", "1gbit,1ms", "--out", "best.conf", "train.py", "--epochs", "3"
    )
    assert code == 0, err
    assert "advised: " in out and "written: best.conf" in out and "not considered:" in out
    job = job_file.load("best.conf")
    assert (job.program, job.args) == ("train.py", ("--epochs", "3"))
    assert len(layout(job.cluster).units) <= 2
    with pytest.raises(SystemExit) as left:
        app.main(["plan", "best.conf"])
    assert not left.value.code


def test_the_data_is_all_of_stdout(ask: Ask) -> None:
    code, out, _ = ask(*FAST, "--hosts", "2", "--job", "job.conf", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["hosts"] == 2
    assert all(row["same_as_one_process"] for row in data["candidates"])
    assert {"what", "why"} == set(data["not_considered"][0])


def test_a_program_beside_a_probe_is_said_not_to_run(ask: Ask) -> None:
    code, out, err = ask(*FAST, "train.py")
    assert code == 0
    assert "started" not in out
    assert err == "topotrain: all figures are those of probe.json, made with made.py: train.py is not run\n"
    assert not ask(*FAST)[2]


def test_a_probe_of_another_machine_is_named_with_its_differences() -> None:
    probe = timed_probe()
    versions = {name: version(name) for name in ("torch", "topotrain")}
    machine = replace(probe.machine, cpu=processor_name(), cores=allowed_cores())
    here = replace(probe, machine=machine, versions=versions)
    assert unlike_this_machine(here) == ""
    assert unlike_this_machine(replace(here, versions={**versions, "torch": "1.0"})).startswith("torch 1.0, here ")
    other = replace(here, machine=replace(machine, cpu="another"))
    assert unlike_this_machine(other) == f"cpu another, here {processor_name()}"
