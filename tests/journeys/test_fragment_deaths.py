"""A worker of a job in fragments is killed, and comes back to the fragment of the others. They never start again."""

import pytest
from job_runner import JobRunner
from soak_cases import soaked

pytestmark = pytest.mark.journey

MEAN = "outer { type: kSGD learning_rate { type: kFixed base_lr: 1 } }"
APART = f"nworker_groups: 3 nservers_per_group: 2 server_worker_separate: true sync_freq: 6 fragments: 3 {MEAN}"


@pytest.mark.parametrize(
    ("cluster", "shard", "wishes"),
    soaked(
        [("overlap: 1 transport: kTcp", "kAuto", []), ("", "kLease", [])],
        [
            ("", "kAuto", []),
            ("quorum: 2 transport: kTcp", "kAuto", ["back", "all"]),
            ("quorum: 2 pace: kSteps transport: kTcp", "kAuto", ["back", "all"]),
        ],
    ),
)
def test_a_death_starts_one_worker_again(runner: JobRunner, cluster: str, shard: str, wishes: list[str]) -> None:
    """What it had not told of a fragment is lost there, and no sample counts twice."""
    words = (str(runner.folder / "job"), "worker 1/0", "1", "5", "fragments", *wishes)
    ended = runner.run(f"{APART} {cluster}", "mortal.py", *words, extra=f"reduce: kSum shard: {shard}")
    (incident,) = ended.report["incidents"]
    assert incident["who"] == "worker 1/0" and "group 1 starts again (incarnation 1)" in incident["action"]
    starts = [(ended.workspace / f"starts-{number}").read_text() for number in range(3)]
    assert starts == ["x", "xx", "x"]
    for name in ("cells", "second", "third"):
        missing = 3 - ended.final[name]
        assert bool((missing >= 0).all()), "counted twice"
        # Of the six steps between two exchanges of a fragment, with four samples each.
        assert float(missing.sum()) <= 6 * 4, (name, missing)


def test_leased_batches_count_once_in_every_fragment(runner: JobRunner) -> None:
    """Workers rest where no batch is left, and come back to the fragment of the others. No process is killed here."""
    words = (str(runner.folder / "job"), "nobody", "9", "1", "fragments")
    ended = runner.run(APART, "mortal.py", *words, extra="reduce: kSum shard: kLease")
    for name in ("cells", "second", "third"):
        assert bool((ended.final[name] == 3).all()), (name, ended.final[name])
