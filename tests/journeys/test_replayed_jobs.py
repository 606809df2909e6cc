"""Jobs are recorded and replayed: asynchronous ones end with the same bits again, also where a worker was killed.

In a recording one worker is slow, and in its replay another one is. So by themselves the two jobs would make their
decisions in other orders, and they would end with other bits.
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from job_runner import PROGRAMS, JobRunner
from process_pool import client
from safetensors.torch import load_file

from topotrain.tools.replay.decision_file import load_decisions

pytestmark = pytest.mark.journey

PROGRAM = "hurried.py"
APART = "server_worker_separate: true"
DOWNPOUR = f"nworker_groups: 2 nservers_per_group: 2 {APART}"
HOGWILD = "nworker_groups: 3 nserver_groups: 3 sync_freq: 2"
Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Replayed:
    """What `topotrain replay` has said, and its exit code."""

    code: int
    out: str
    err: str


def replay(runner: JobRunner, *words: str) -> Replayed:
    command = [*client(runner.warm_at), "-m", "topotrain", "replay", "--forkserver", runner.served_at, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=runner.folder)
    return Replayed(done.returncode, done.stdout, done.stderr)


def record(runner: JobRunner, cluster: str, *args: str, name: str = "job", extra: str = "") -> tuple[Values, Path]:
    """Record a job; its final parameters, and the file."""
    file = runner.folder / f"{name}.record"
    words = (PROGRAM, str(runner.folder), *args)
    ended = runner.run(cluster, *words, name=name, extra=extra, options=("--record", str(file)))
    return ended.final, file


def replayed(runner: JobRunner, file: Path, *args: str) -> Values:
    found = replay(runner, str(file), str(PROGRAMS / PROGRAM), str(runner.folder), *args)
    assert found.code == 0, found.err
    assert "replayed, as recorded: all" in found.err
    return load_file(f"{file}.replay/final.safetensors")


def same_bits(first: Values, second: Values) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_worker_that_was_killed_is_killed_again(runner: JobRunner) -> None:
    """In the replay the program does not kill itself any more: the replay does it, where the recording has it."""
    final, file = record(runner, HOGWILD, "--slow", "0", "--die", "1", extra="on_failure: kContinue")
    assert (runner.folder / "dead").exists()
    report = json.loads((runner.folder / "job.json").read_text())
    assert [incident["who"] for incident in report["incidents"]] == ["worker 1/0"]
    assert same_bits(final, replayed(runner, file, "--slow", "2", "--die", "1"))


def refused(found: Replayed) -> str:
    """The one line with which a replay ends that is of no use."""
    errors = [line for line in found.err.splitlines() if line.startswith("topotrain: error: ")]
    assert found.code == 2, found.err
    assert len(errors) == 1
    assert "Traceback" not in found.err
    return errors[0]


def test_one_recording_is_replayed_stopped_compared_and_refused(runner: JobRunner) -> None:
    """The order decides: another job of the same program ends elsewhere, and is recorded as another one."""
    final, file = record(runner, DOWNPOUR, "--slow", "1")
    other, second = record(runner, DOWNPOUR, "--slow", "0", name="other")
    assert not same_bits(final, other)

    # Two replays to one version have the same values, and the last version has the final ones.
    words = (str(file), str(PROGRAMS / PROGRAM), str(runner.folder))
    last, seen = load_decisions(file).last_version(0), []
    for number, (until, slow) in enumerate(((20, "0"), (20, "1"), (last, "0"))):
        out = runner.folder / f"values-{number}"
        options = ("--until", str(until), "--dump", "0.weight", "--dump", "2.bias", "--out", str(out), "--json")
        found = replay(runner, *options, *words, "--slow", slow)
        assert found.code == 0, found.err
        said, values = json.loads(found.out), load_file(out)
        assert said["version"] == until
        assert torch.equal(torch.tensor(said["dump"]["2.bias"]), values["2.bias"])
        seen.append(values)
    assert same_bits(seen[0], seen[1])
    assert not torch.equal(seen[0]["0.weight"], seen[2]["0.weight"])
    assert all(torch.equal(final[name], value) for name, value in seen[2].items())

    found = replay(runner, str(file), "--compare", str(second), "--json")
    assert found.code == 1
    assert "worker group" in json.loads(found.out)["difference"]["first"]
    assert replay(runner, str(file), "--compare", str(file)).code == 0

    wider = refused(replay(runner, *words, "--width", "25"))
    assert "the recording is of another model, or of another optimizer, than the program's" in wider
    chance = refused(replay(runner, *words, "--chance"))
    assert "step 1 of worker" in chance and "a gradient with check" in chance
    shorter = refused(replay(runner, *words, "--epochs", "3"))
    assert "of worker" in shorter and "the recording has" in shorter
