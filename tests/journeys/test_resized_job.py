"""Workers that leave a synchronous job and join it while it runs: every sample counts as often as the script asked."""

import pytest
from job_runner import ALLREDUCE, SANDBLASTER, Ended, JobRunner

pytestmark = pytest.mark.journey

SUM = "on_failure: kContinue reduce: kSum"


def resized(runner: JobRunner, cluster: str, *words: str, extra: str = SUM, name: str = "job") -> Ended:
    return runner.run(cluster, "resized.py", str(runner.folder / name), *words, extra=extra, name=name)


def changes(ended: Ended) -> list[tuple[str, int]]:
    return [(change["what"], change["workers"]) for change in ended.report["changes"]]


@pytest.mark.parametrize(("cluster", "dies"), [(SANDBLASTER, "asked"), (ALLREDUCE, "begins")])
def test_a_worker_joins_and_two_leave_and_a_death_meanwhile_costs_no_sample(
    runner: JobRunner, cluster: str, dies: str
) -> None:
    ended = resized(runner, cluster, "1,-2", dies)
    ended.check_ledger(3)
    assert changes(ended) == [("1 worker joins", 4), ("2 workers leave", 2)]
    assert all(change["waited_s"] > 0 and change["step"] > 0 for change in ended.report["changes"])
    assert [incident["who"] for incident in ended.report["incidents"]] == ["worker 0/1"]
    assert ended.report["steps"] == 90
    assert ended.report["layout"]["nprocs"] == (4 if cluster is SANDBLASTER else 2)
    assert "1 worker joins; the job goes on after step" in ended.err
    assert "after that change" in ended.err
    log = (ended.workspace / "logs" / "worker-0-1.log").read_text()
    assert "the job goes on with nworkers_per_group: 2" in log
