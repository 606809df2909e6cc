"""The command `topotrain predict`: what it prints, and the lines that refuse its input."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from made_probe import made_probe

from topotrain.tools.cli import app
from topotrain.tools.monitor import terminal
from topotrain.tools.prediction import rehearsal
from topotrain.tools.probe.probe_file import ProbedOptimizer

CONF = "cluster { nworker_groups: 2 nservers_per_group: 2 server_worker_separate: true }\n"
MANY = ("--set", "cluster.nworkers_per_group=100", "--link", "1gbit")
Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs the command in a folder with job.conf and probe.json: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(terminal, "LINES_S", 600.0)
    monkeypatch.setattr(rehearsal, "MEASURED", ((64, 6),))
    (tmp_path / "job.conf").write_text(CONF)
    (tmp_path / "probe.json").write_text(made_probe((10_000,) * 3).to_json())

    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            app.main(("predict", *argv))
        printed = capsys.readouterr()
        return int(left.value.code or 0), printed.out, printed.err

    return run


def test_the_text_names_what_bounds_the_job(ask: Ask) -> None:
    code, out, err = ask("job.conf", "--link", "1mbit")
    assert (code, err) == (0, "")
    assert out.startswith("Downpour (asynchronous), 4 workers and servers\n")
    assert any(f"'s link {way}: busy for " in out for way in ("in", "out"))
    assert "updates: not those of one process; a gradient is" in out
    assert "rehearsed with the job's own servers and workers in virtual time (seed 0)" in out
    assert all(len(line) <= 120 for line in out.splitlines())
    assert "host 0's cores: busy for 100% of the time: it bounds the job\n" in ask("job.conf", "--cores", "1")[1]


def test_a_probe_of_a_program_with_another_name_is_said(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "job.conf").write_text(f'program: "train.py" {CONF}')
    code, out, err = ask("job.conf")
    assert code == 0 and out
    assert err == "topotrain: warning: probe.json was made with made.py, and the job has the program train.py\n"
    (tmp_path / "job.conf").write_text(f'program: "scripts/made.py" {CONF}')
    assert ask("job.conf")[2] == ""


def test_a_rehearsal_that_takes_long_has_a_line(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "LINES_S", 0.0)
    code, _, err = ask("job.conf")
    assert code == 0
    first, *_, last = err.splitlines()
    most = rehearsal.MOST_TIMES * 2 * (3 + 6)
    assert first == f"topotrain: rehearsing: 1 steps of all workers, of at most {most}"
    assert last == f"topotrain: rehearsing: {most // rehearsal.MOST_TIMES} steps of all workers, of at most {most}"


def test_an_error_is_printed_only_where_it_was_measured(ask: Ask) -> None:
    measured = "expect the step within"
    assert measured in ask("job.conf")[1]
    for options in (("--set", "cluster.nworkers_per_group=3"), ("--cores", "16")):
        out = ask("job.conf", *options)[1]
        assert measured not in out and "error: no error was measured for" in out
        assert json.loads(ask("job.conf", *options, "--json")[1])["error"] is None


def test_json_has_all_fields(ask: Ask) -> None:
    code, out, _ = ask("job.conf", "--link", "100mbit,20ms", "--mtbf", "30d", "--seed", "7", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["version"] == 1
    assert found["seed"] == 7
    assert 0.9 < found["goodput"] < 1
    assert {"compute", "push", "apply", "pull", "wait"} == set(found["parts"])
    assert {link["name"] for link in found["links"]} >= {"worker 0/0 > server 0/0", "server 0/1 > worker 1/0"}
    # Two round trips of 40 ms, and the computing.
    assert found["step_s"] > 0.09 + 0.08


def test_a_trace_is_that_of_a_profile(ask: Ask, tmp_path: Path) -> None:
    assert ask("job.conf", "--link", "100mbit,20ms", "--trace", "step.json")[0] == 0
    trace = json.loads((tmp_path / "step.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {"step", "backward", "push", "reduce", "apply"} <= {event["name"].split()[0] for event in spans}
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"worker 0/0", "worker 1/0", "server 0/0", "server 0/1"}
    (backward,) = {event["dur"] for event in spans if event["name"] == "backward"}
    assert backward == pytest.approx(60_000, rel=0.01)
    # Arrows lead from a push to its server.
    assert any(event["ph"] == "s" for event in trace["traceEvents"])


def test_an_emulated_job_shares_the_cores_of_one_machine(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_text(made_probe((10_000,), cores=1).to_json())
    apart = json.loads(ask("job.conf", "--link", "1gbit", "--json")[1])
    together = json.loads(ask("job.conf", "--emulate", "1gbit", "--json")[1])
    assert together["step_s"] == pytest.approx(2 * apart["step_s"], rel=0.1)
    assert together["busiest"][0]["name"] == "the machine's cores"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("--straggler", "9x2"), "--straggler = 9: must be the number of a worker, 0 to 1"),
        (("--mtbf", "never"), "--mtbf = 'never': must be a time above 0"),
        (("--probe", "other.json"), "other.json: cannot be read as a probe"),
        (("--link", "1gbit", "--emulate", "1gbit"), "--emulate = '1gbit': must not be given with --link"),
        (("--trace", "."), "--trace"),
        (MANY, "workers and servers = 202: must be at most 64 to be rehearsed. By arithmetic this job makes at most"),
    ],
)
def test_bad_input_is_one_line(ask: Ask, argv: tuple[str, ...], line: str) -> None:
    code, out, err = ask("job.conf", *argv)
    assert (code, out) == (2, "")
    assert line in err
    assert err.count("\n") == 1


def test_an_unknown_optimizer_is_refused_for_any_number_of_processes(ask: Ask, tmp_path: Path) -> None:
    for workers, name in ((2, "Unheard"), (100, "Optimizer")):
        probe = made_probe((10_000,), optimizer=ProbedOptimizer(name, 0.0, 0.0, 0.0, 0.0))
        (tmp_path / "probe.json").write_text(probe.to_json())
        code, _, err = ask("job.conf", "--set", f"cluster.nworker_groups={workers}")
        assert code == 2
        assert f"optimizer = '{name}': must be one of torch.optim's: others cannot be predicted" in err


@pytest.mark.journey
def test_the_command_line_needs_no_torch_for_a_plan() -> None:
    code = "import sys; import topotrain.tools.cli.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
