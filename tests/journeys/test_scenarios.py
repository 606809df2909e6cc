"""The failures that others have tests for, some of them skipped, as real processes that are killed exactly there.

In a ledger every sample must count exactly as often as the script asked for, whoever died; the curve of a synchronous
net must have the bits of a job in which nobody dies. When and whom: programs/doomed.py.
"""

import os
import select
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from job_runner import Ended, JobRunner
from safetensors.torch import load_file

pytestmark = pytest.mark.journey

EPOCHS = 3
STEPS = 36  # of a synchronous group
SYNC = "nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true"
PAIR = "nworker_groups: 2 nservers_per_group: 2 server_worker_separate: true"
BESIDE = "nworker_groups: 2 nservers_per_group: 2"  # units have a worker and a server each
FOUR = "nworker_groups: 2 nworkers_per_group: 2 server_worker_separate: true"
OFTEN = "snapshot_s: 0.01"
# The outcome of a step is known only in the next one, so no step is repeated, and a death restarts the whole group.
AS_A_WHOLE = "pull: kLazy"


def doomed(
    runner: JobRunner, cluster: str, faults: Sequence[str], *words: str, extra: str = "", code: int = 0
) -> Ended:
    """A ledger's job in which all these faults have happened."""
    everything = f"on_failure: kContinue reduce: kSum {extra}"
    if "restarts" not in extra:
        everything += f" restarts: {len(faults)}"
    ended = runner.run(cluster, "doomed.py", str(runner.folder), *faults, *words, extra=everything, code=code)
    missed = [fault for number, fault in enumerate(faults) if not (runner.folder / f"fault-{number}").exists()]
    assert not missed, (missed, ended.err)
    return ended


def right(ended: Ended) -> list[tuple[str, str]]:
    """All cells are right; returns who died, and what was done about it."""
    ended.check_ledger(EPOCHS)
    return [(incident["who"], incident["action"]) for incident in ended.report["incidents"]]


def gone(runner: JobRunner) -> None:
    """No process that read data is left."""
    loaders = [int(path.name.split("-")[1]) for path in runner.folder.glob("loader-*")]
    assert loaders
    assert [ended(pid) for pid in loaders] == [True] * len(loaders)


def ended(pid: int) -> bool:
    """A process is gone, or goes: whoever was its parent may not have noticed yet."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 20)[0])
    finally:
        os.close(process)


def test_a_worker_dies_before_during_and_after_its_push_and_at_its_first_step(runner: JobRunner) -> None:
    """One death per life, as many as `restarts` allows."""
    faults = [f"worker 0/1:{moment}" for moment in ("given:1", "Push:2", "after:1")]
    ended = doomed(runner, SYNC, faults, extra=AS_A_WHOLE)
    assert right(ended) == [("worker 0/1", f"group 0 starts again (incarnation {number})") for number in (1, 2, 3)]


def test_two_die_at_once_in_one_group_and_in_two_and_then_all_workers(runner: JobRunner) -> None:
    others = ("worker 1/1", "worker 0/0", "worker 0/0+worker 0/1+worker 1/1")
    ended = doomed(runner, FOUR, [f"worker 1/0:after:2:worker 1/0+{names}" for names in others], extra=AS_A_WHOLE)
    found = right(ended)
    assert {action.split(" (")[0] for _, action in found} <= {"group 0 starts again", "group 1 starts again"}
    assert len(found) == 1 + 2 + 2


def test_a_server_dies_while_a_worker_recovers_and_then_all_that_supervises(runner: JobRunner) -> None:
    """A unit before its children, the forkserver, and a unit with its worker and its server."""
    faults = ["worker 1/0:after:2", "worker 1/0:begin:0:server 0/0"]
    faults += ["worker 1/0:after:2:unit 1", "worker 1/0:after:2:forkserver"]
    # The job needs a forkserver of its own for that.
    found = right(doomed(replace(runner, served_at=""), BESIDE, faults, extra=OFTEN))
    again = "the whole job starts again"
    assert [who for who, _ in found[:4]] == ["worker 1/0", "server 0/0", "unit 1", "forkserver"]
    assert {action for _, action in found[1:]} == {again}


def test_workers_die_while_a_snapshot_is_written_and_in_the_last_step_behind_it_and_as_they_finish(
    runner: JobRunner,
) -> None:
    """Each takes its loaders along."""
    faults = ["worker 0/1:WorkerStatePart:0", f"worker 0/0:Commit:{STEPS}", "worker 0/0:Finish:0"]
    ended = doomed(runner, SYNC, faults, "--loaders", "2", extra=OFTEN)
    assert [who for who, _ in right(ended)] == ["worker 0/1"] + ["worker 0/0"] * (len(faults) - 1)
    gone(runner)


def test_the_programs_error_ends_the_job_in_the_middle_of_a_recovery(runner: JobRunner) -> None:
    faults = ["worker 1/0:after:2", "worker 1/0:begin:0:hang", "worker 0/0:after:2:raise"]
    ended = doomed(runner, PAIR, faults, code=1)
    assert ended.report["cause"]["who"] == "worker 0/0"
    assert "ArithmeticError: the user's own mistake" in ended.err


# --- the same bits ----------------------------------------------------------------------------------------------------


def curve(folder: Path) -> set[str]:
    """Every loss of the job; a batch that was read again must have had the same."""
    lines = {f"{path.name} {line}" for path in folder.iterdir() for line in path.read_text().splitlines()}
    assert len({line.rsplit(" ", 1)[0] for line in lines}) == len(lines)
    return lines


def train(runner: JobRunner, name: str, faults: Sequence[str] = ()) -> list[str]:
    """The command of a job: a net with a batch norm, momentum and a schedule, whose data is read by other processes."""
    losses = runner.folder / f"{name}-losses"
    losses.mkdir()
    words = [str(runner.folder), *faults, "--net", "--loaders", "2", "--curve", str(losses)]
    return runner.command(SYNC, "doomed.py", *words, extra=f"on_failure: kContinue {OFTEN}", name=name)


def ends(runner: JobRunner, words: Sequence[str], code: int) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=runner.folder)
    assert done.returncode == code, done.stdout + done.stderr


def test_a_curve_has_the_same_bits_after_a_server_died_and_after_everything_died(runner: JobRunner) -> None:
    ends(runner, train(runner, "undisturbed"), 0)
    wanted = curve(runner.folder / "undisturbed-losses")
    assert len(wanted) == EPOCHS * 12 * 2
    everything = ["worker 0/1:saved:4:everything"]
    ends(runner, train(runner, "job", ["worker 0/1:saved:2:server 0/1", *everything]), -9)
    words = ["run", "--resume", str(runner.folder / "job"), "--forkserver", runner.served_at]
    resume = [*runner.python, "-m", "topotrain", *words]
    ends(runner, resume, 0)
    assert curve(runner.folder / "job-losses") == wanted
    before, after = (load_file(runner.folder / name / "final.safetensors") for name in ("undisturbed", "job"))
    assert before.keys() == after.keys()
    assert not [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    gone(runner)
