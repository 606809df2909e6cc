"""Jobs of which one process dies, by layout: every sample counts exactly as often as the script asked for.

A process is killed at a step of a worker (programs/mortal.py). What is decided: launch/recovery/policy.txt.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from job_runner import ALLREDUCE, DOWNPOUR, SANDBLASTER, JobRunner

pytestmark = pytest.mark.journey

SUM = "on_failure: kContinue reduce: kSum"
APART = "nservers_per_group: 2 server_worker_separate: true"
MEAN = "outer { type: kSGD learning_rate { type: kFixed base_lr: 1 } }"
ISLANDS = f"nworker_groups: 3 {APART}"
BACKUP = f"nworkers_per_group: 3 nservers_per_procs: 2 {APART} backup: 1"
HIDDEN = "grads: kHidden per_worker_batch: true"
HOSTS = "nworkers_per_group: 4 nworkers_per_procs: 2 server_worker_separate: true link { }"
"""The workers of a host send one sum."""
ALONE = "it starts again, and its group continues meanwhile (incarnation 1)"
GROUP_1 = "group 1 starts again (incarnation 1)"

Report = dict[str, Any]


@dataclass(frozen=True)
class Death:
    """A job, the words of mortal.py behind its WORKSPACE, and what follows."""

    cluster: str
    words: tuple[str, ...]
    action: str
    extra: str = ""
    starts: tuple[int, ...] = ()
    """How often the script of each worker is started."""
    is_right: Callable[[Report], bool] = lambda report: True


def told_of_no_step(report: Report) -> bool:
    rounds = report["rounds"]
    assert 1 <= rounds["lost_steps"] <= 3
    assert rounds["count"] == sum(rounds["members"].values())
    assert [each["who"] for each in rounds["workers"]] == ["worker 0/0", "worker 1/0"]
    return all(each["steps"] and each["bytes_out"] for each in rounds["workers"])


DEATHS = {
    "a frozen worker": Death(
        *(DOWNPOUR, ("worker 1/1", "2", "5", "back", "freeze"), GROUP_1, "pull: kLazy"),
        is_right=lambda report: report["incidents"][0]["waited_s"] > 2,
    ),
    "one of a synchronous group": Death(
        *(SANDBLASTER, ("worker 0/1", "0", "5"), ALONE, "grads: kHidden", (1, 2, 1)),
        is_right=lambda report: 0 < report["incidents"][0]["others_waited_s"] < 20,
    ),
    "before the result is saved": Death(
        *(f"nworker_groups: 2 {APART}", ("worker 0/0", "0", "5", "late"), "the whole job starts again"),
        is_right=lambda report: report["metrics"] == {"trained": 1.0},
    ),
    "beside backup workers": Death(
        *(BACKUP, ("worker 0/0", "1", "5", "snapshot"), ALONE, f"{HIDDEN} snapshot_s: 0.05"),
    ),
    "a worker that adds up the sums of its host": Death(
        *(f"{HOSTS} nservers_per_group: 2", ("worker 0/3", "1", "5"), ALONE),
        is_right=lambda report: report["bytes_out"] > report["bytes_link"],
    ),
    "a group whose sums are lost": Death(
        *(HOSTS, ("worker 0/0", "1", "5"), "group 0 starts again (incarnation 1)", "grads: kHidden pull: kLazy"),
        is_right=lambda report: report["bytes_out"] > report["bytes_link"],
    ),
    "a group that may not start again": Death(
        *(f"nworker_groups: 2 {APART}", ("worker 1/0", "1", "5", "hold")),
        *("the job goes on without group 1", "restarts: 0"),
        is_right=lambda report: [change["what"] for change in report["groups"]] == ["is given up"],
    ),
    # Of its last steps the worker has told none. The others wait for the round, and train on. An epoch has 8 steps of
    # each worker, so that some of these steps are of epochs that are over.
    "in the middle of a round": Death(
        f"{ISLANDS} sync_freq: 7 {MEAN}", ("worker 1/0", "1", "9"), GROUP_1, "shard: kLease"
    ),
    # With a quorum the main worker holds its batches, or it could read all before the others are back.
    "where no worker waits": Death(
        f"nworker_groups: 2 {APART} sync_freq: 5 quorum: 1 transport: kTcp {MEAN}",
        *(("worker 1/0", "1", "3", "back"), GROUP_1),
        is_right=told_of_no_step,
    ),
    "one of a group with an outer optimizer": Death(
        f"nworker_groups: 2 nworkers_per_group: 2 {APART} sync_freq: 5 quorum: 1 transport: kTcp {MEAN}",
        *(("worker 1/1", "3", "4", "back"), GROUP_1, "", (1, 1, 2, 2)),
    ),
    # The second copy has the windows that were open, but not the timer that would have ended them.
    "a coordinator": Death(
        f"{ISLANDS} sync_freq: 5 quorum: 2 transport: kTcp {MEAN} replicas: 2 compression: kFp16",
        *(("server 0/0", "1", "3", "hold"), "second copy"),
        is_right=lambda report: report["rounds"]["count"] > 0,
    ),
}


@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS)
def test_every_sample_counts_once(runner: JobRunner, death: Death) -> None:
    words = (str(runner.folder / "job"), *death.words)
    ended = runner.run(death.cluster, "mortal.py", *words, extra=f"{SUM} {death.extra}")
    ended.check_ledger(3)
    assert ended.report["samples"] == 96 * 3
    # Where a server ends beside the death, its group may start again alone and find it gone: then the whole job does.
    first, last = ended.report["incidents"][0], ended.report["incidents"][-1]
    assert first["who"] == last["who"] == death.words[0] and death.action in last["action"], (first, last)
    assert ("was frozen for 2 s and was ended" if "freeze" in words else "was killed by SIGKILL") in first["what"]
    assert first["what"] in ended.err
    assert "starts again" not in death.action or 0 < last["waited_s"] < 20
    starts = [len(path.read_text()) for path in sorted(Path(runner.folder, "job").glob("starts-*"))]
    assert not death.starts or starts == list(death.starts)
    assert death.is_right(ended.report)


@pytest.mark.parametrize(
    ("cluster", "shard", "dies"),
    [("overlap: 1 transport: kTcp", "kAuto", True), ("", "kLease", True), ("", "kLease", False)],
)
def test_a_worker_in_fragments_comes_back_to_the_fragment_of_the_others(
    runner: JobRunner, cluster: str, shard: str, dies: bool
) -> None:
    """What it had not told of a fragment is lost there, and no sample counts twice."""
    words = (str(runner.folder / "job"), *(("worker 1/0", "1", "5") if dies else ("nobody", "9", "1")), "fragments")
    cluster = f"{ISLANDS} sync_freq: 6 fragments: 3 {MEAN} {cluster}"
    ended = runner.run(cluster, "mortal.py", *words, extra=f"reduce: kSum shard: {shard}")
    actions = [(incident["who"], incident["action"]) for incident in ended.report["incidents"]]
    assert actions == [("worker 1/0", GROUP_1)] * dies
    starts = [(ended.workspace / f"starts-{number}").read_text() for number in range(3)]
    assert starts == ["x", "xx" if dies else "x", "x"]
    for name in ("cells", "second", "third"):
        missing = 3 - ended.final[name]
        assert bool((missing >= 0).all()), "counted twice"
        # Of the six steps between two exchanges of a fragment, with four samples each.
        assert float(missing.sum()) <= (6 * 4 if dies else 0), (name, missing)


# --- workers that are slow or ill -------------------------------------------------------------------------------------


def test_a_slow_worker_is_not_waited_for_and_all_of_its_samples_count(runner: JobRunner) -> None:
    words = ("--samples", "202", "--epochs", "2", "--step-s", "0.02", "--slow", "2", "--factor", "5")
    ended = runner.run(BACKUP, "ledger.py", *words, extra=f"reduce: kSum {HIDDEN}")
    ended.check_ledger(2)
    report = ended.report
    assert report["late"]["worker 0/2"] > 5
    assert report["samples"] == 2 * 202, "what came too late is not among them"
    (slow,) = [found for found in report["stragglers"] if found["who"] == "worker 0/2"]
    assert slow["factor"] > 1.5
    assert "worker 0/2 is slow: it takes" in ended.err


def test_a_group_with_gradients_that_are_not_finite_is_put_into_quarantine_and_the_others_train_on(
    runner: JobRunner,
) -> None:
    words = ("--epochs", "2", "--sick", "2", "--step-s", "0.01")
    ended = runner.run(f"nworker_groups: 2 nworkers_per_group: 2 {APART}", "ledger.py", *words, extra=SUM)
    cells = ended.final["cells"]
    assert set(cells.tolist()) == {1.0, 2.0}
    assert (cells == 1).sum() == 3 * 4, "the batches of three steps are used up"
    assert ended.report["samples"] == cells.sum()
    assert ended.report["cause"] is None
    (incident,) = ended.report["incidents"]
    assert "the gradient of cells that worker 1/0 pushed is not finite in 3 steps in a row" in incident["what"]
    assert [(change["group"], change["what"]) for change in ended.report["groups"]] == [(1, "is in quarantine")]


# --- scripts that end their own processes -----------------------------------------------------------------------------


def test_after_the_loop_the_result_comes_home(runner: JobRunner) -> None:
    ended = runner.run(SANDBLASTER, "leaves.py", "exit", "end", extra="reduce: kSum")
    ended.check_ledger(3)
    assert ended.report["incidents"] == []
    assert ended.report["metrics"] == {"trained": 1.0}


def test_in_the_middle_of_a_loop_it_is_a_death(runner: JobRunner) -> None:
    ended = runner.run(ALLREDUCE, "leaves.py", "exec", "middle", str(runner.folder / "mark"), extra="reduce: kSum")
    ended.check_ledger(3)
    (incident,) = ended.report["incidents"]
    assert "ended with exit code 0 before its work was done" in incident["what"]
    assert "the whole job" in incident["action"]
