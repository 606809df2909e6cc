"""The unit that leads a job of several units is lost or frozen: another one leads, and each sample counts once."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from job_runner import ALLREDUCE, JobRunner
from redis_server import MISSING, redis_server
from unit_hosts import TOKEN, Job, Units, wait

from topotrain.comm.store import open_store

pytestmark = pytest.mark.journey

DOWNPOUR = "nworker_groups: 3 nworkers_per_group: 1 nservers_per_group: 1 server_worker_separate: true"
SERVER_UNIT = 3
"""The unit of DOWNPOUR that has the servers."""


def leader(job: Job) -> int:
    """The rank of the unit that leads, according to the store."""
    with closing(open_store(job.url.partition("?")[0], bytes.fromhex(TOKEN))) as store:
        (key,) = (key for key in store.keys("jobs/") if key.endswith("/leader"))
        return int(json.loads(store.get(key) or b"")["rank"])


def replace_unit_0(job: Job) -> int:
    """Unit 0 is lost and started again; return who leads when the whole job trains again."""
    former = job.pids(0)
    job.lose(0)
    job.start_hastily(0)
    wait(lambda: set(job.pids(0)) - set(former))
    job.trains()
    second = leader(job)
    assert second != 0
    return second


def test_leaders_are_lost_and_frozen_and_the_bits_are_those_of_a_calm_job(runner: JobRunner, units: Units) -> None:
    calm = runner.run(ALLREDUCE, "steady.py", "--epochs", "8", name="calm").final
    pace = ("--epochs", "8", "--step-s", "0.1", "--on", str(runner.folder / "on"))
    job = units.job(ALLREDUCE, "steady.py", *pace, hosts=3, store="file", extra="snapshot_s: 0.3 restarts: 9")
    job.begin()
    # The second leader is lost while it waits for unit 0 to come back.
    job.lose(0)
    wait(lambda: leader(job))
    second = leader(job)
    job.lose(second)
    job.start_hastily(0, second)
    job.trains()
    # The third one, which was there all the time, is stopped for longer than its lease, and its processes with it.
    third = leader(job)
    assert third == 3 - second
    frozen = [job.units[third].process.pid, *job.pids(third)]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    wait(lambda: leader(job) != third)
    for pid in frozen:
        # The unit goes on first, and may have ended its processes before it is their turn here.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    job.trains()
    # The fourth one and another unit are lost at once.
    lost = {0, second}
    assert leader(job) in lost
    job.lose(*lost)
    job.start_hastily(*lost)
    job.end_well()
    job.check_bits(calm)
    assert f"unit {third} leads the job no longer" in job.said[third]
    assert "leads the job from now on (term" in job.said[third]
    assert "the whole job starts again from" in job.said[third]
    assert job.reporter == third, "the unit that leads at the end writes the report"
    assert {incident["action"] for incident in job.report["incidents"]} == {"the whole job starts again"}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    if MISSING:
        pytest.skip(MISSING)
    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_server(folder) as url:
        yield url


def test_groups_leave_and_join_under_the_next_leader_which_is_then_lost(units: Units, redis: str) -> None:
    """Unit 0 has worker 0/0, which no job can do without; the leader after it has a group that this one can."""
    job = units.paced(DOWNPOUR, 24, hosts=4, store=redis)
    job.begin()
    second = replace_unit_0(job)
    store = [redis, "--job", "job"]
    left = job.ask("leave", *store, "--group", "2", "--json")
    assert json.loads(left.stdout) == {"group": 2, "text": "group 2 has left"}, left.stderr
    # Any unit takes a request, and the one that leads decides. On another machine there is only the unit there.
    for rank in range(4):
        folder = job.folder / f"elsewhere-{rank}"
        folder.mkdir()
        (folder / f"control-{rank}").symlink_to((job.workspace / f"control-{rank}").readlink())
        (folder / f"control-{(rank + 1) % 4}").symlink_to(job.folder / "nowhere")
        refused = job.ask("leave", str(folder), "--group", "0")
        assert refused.returncode == 2 and "so it stays to the end" in refused.stderr, refused.stderr
    joined = job.ask("join", str(folder), "--group", "2")
    assert joined.stdout == "topotrain: group 2 starts (incarnation 1)\n", joined.stderr
    refused = job.ask("join", *store, "--group", "1")
    assert refused.returncode == 2 and "group 1 trains" in refused.stderr, refused.stderr
    refused = job.ask("join", redis, "--job", "jab", "--group", "1")
    assert refused.returncode == 2 and "known jobs: job" in refused.stderr, refused.stderr
    job.lose(second)
    if second == SERVER_UNIT:  # the others cannot do without it
        job.start_hastily(second)
    else:
        gone = f"unit {second}, which had its workers, is gone"
        wait(lambda: gone in job.ask("join", *store, "--group", str(second)).stderr)
    job.end_well()
    job.check_ledger(24)
    actions = [incident["action"] for incident in job.report["incidents"]]
    again = "the whole job starts again"
    assert actions == [again, again if second == SERVER_UNIT else f"the job goes on without group {second}"]
