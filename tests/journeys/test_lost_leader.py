"""The unit that leads a job of several units is lost or frozen: another one leads, and each sample counts once."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from job_runner import ALLREDUCE, JobRunner
from redis_server import MISSING, redis_server
from shells import alive
from soak_cases import soak_only
from unit_hosts import TOKEN, HostNetwork, Job, Units, covered, wait

from topotrain.comm.store import open_store

pytestmark = pytest.mark.journey

SANDBLASTER = "nworkers_per_group: 2 nservers_per_group: 1 server_worker_separate: true"
PAIRS = "nworkers_per_group: 2 nworkers_per_procs: 2 nservers_per_group: 2 server_worker_separate: true transport: kTcp"
SANDBLASTER_OF_THREE = "nworkers_per_group: 3 nservers_per_group: 1 server_worker_separate: true"
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


@soak_only  # in one process: launch/multinode/test_control_connection.py
def test_unit_0_does_not_come_back(units: Units, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPOTRAIN_MEETING_S", "4")
    job = units.paced(SANDBLASTER, 40, hosts=3, store="file")
    job.begin()
    pids = job.pids(1, 2)
    job.lose(0)
    ended = job.end()
    assert [code for code, _, _ in ended.values()] == [1, 1]
    for _, _, err in ended.values():
        assert f"unit 0 on {socket.gethostname()}" in err
        assert "vanished without a word, and within 4 s no replacement was started" in err
        assert "with `resume: true` the same job goes on from there" in err
    assert pids and not alive(pids)


@soak_only
@pytest.mark.parametrize("delay_s", [0.0, 0.2])
def test_a_leader_is_lost_when_its_job_is_about_to_end(
    units: Units, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    """The result is there. The other units know that all is done, or they wait for unit 0: both of them the same."""
    monkeypatch.setenv("TOPOTRAIN_MEETING_S", "4")
    job = units.job(ALLREDUCE, "ledger.py", "--epochs", "1", "--step-s", "0.03", hosts=3, store="file")
    job.start_hastily(0, 1, 2)
    wait(lambda: (job.workspace / "final.safetensors").exists())
    time.sleep(delay_s)
    job.lose(0)
    ended = job.end()
    codes = {rank: code for rank, (code, _, _) in ended.items()}
    assert codes in ({1: 0, 2: 0}, {1: 1, 2: 1}), ended
    if codes[1]:
        assert all("within 4 s no replacement was started" in err for _, _, err in ended.values()), ended


@soak_only  # in one process: launch/multinode/test_unit_membership.py
@pytest.mark.parametrize("both", [False, True])
def test_a_signal_while_there_is_no_leader(units: Units, both: bool) -> None:
    job = units.paced(SANDBLASTER, 40, hosts=3, store="file")
    job.begin()
    pids = job.pids(1, 2)
    job.lose(0)
    for rank in (1, 2) if both else (1,):
        job.units[rank].process.send_signal(signal.SIGINT)
    ended = job.end()
    assert {rank: code for rank, (code, _, _) in ended.items()} == {1: 130, 2: 130}
    assert pids and not alive(pids)
    if not both:
        assert "to unit 1" in ended[2][2], ended[2][2]


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


@soak_only  # in one process: launch/multinode/test_succession.py
def test_workers_leave_and_join_over_the_loss_of_a_leader(units: Units) -> None:
    """The number of workers has changed when unit 0 is lost, and the next leader changes it again."""
    job = units.paced(SANDBLASTER_OF_THREE, 8, hosts=4, store="file")
    job.begin()
    store = [job.url.partition("?")[0], "--job", "job", "--json"]
    left = job.ask("leave", *store, "--workers", "1")
    assert json.loads(left.stdout)["workers"] == 2, left.stderr
    replace_unit_0(job)
    left = job.ask("leave", *store, "--workers", "1")
    assert json.loads(left.stdout)["workers"] == 1, left.stderr
    joined = job.ask("join", *store, "--workers", "1")
    assert json.loads(joined.stdout)["workers"] == 2, joined.stderr
    refused = job.ask("join", *store, "--workers", "2")
    assert "and 4 were started: start all again with more of them" in refused.stderr + refused.stdout
    job.end_well()
    job.check_ledger(8)


@soak_only  # of one death: test_units.py; the decisions: launch/recovery/policy.txt
def test_leaders_and_units_with_copies_of_servers_are_lost(units: Units) -> None:
    job = units.paced(PAIRS + " replicas: 2", 8, hosts=3, store="file", extra="restarts: 9")
    job.begin()
    covered(job, 2)
    job.lose(1, 2)  # both copies
    job.start_hastily(1, 2)
    job.trains()
    second = replace_unit_0(job)
    covered(job, 2)
    job.lose(second)  # one copy, and nothing restarts
    job.end_well()
    job.check_ledger(8)
    *restarts, last = job.report["incidents"]
    again = [incident["who"] for incident in restarts if incident["action"] == "the whole job starts again"]
    assert again[-1] == "unit 0" and {"unit 1", "unit 2"} & {*again[:-1]}
    assert (last["who"], last["action"][:45]) == (f"unit {second}", "the second copies of its servers go on; fresh")


@pytest.fixture
def redis_at_host_0(tmp_path: Path, network: HostNetwork) -> Iterator[str]:
    if MISSING:
        pytest.skip(MISSING)
    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_server(folder, network=network) as url:
        yield url


@soak_only  # in one process: launch/multinode/test_unit_membership.py
def test_the_host_of_unit_0_is_cut_off_for_a_while(units: Units, network: HostNetwork, redis_at_host_0: str) -> None:
    """The store is on the host of the others. Unit 0 finds neither them nor the store, and ends its processes."""
    job = units.paced(ALLREDUCE, 6, hosts=[1, 0, 0], store=redis_at_host_0, network=network)
    job.begin()
    before = job.pids(0)
    assert alive(before)
    network.set_link(1, "down")
    try:
        wait(lambda: network.run_on(0, lambda: leader(job)))
        wait(lambda: not alive(before))  # its processes have ended, although nothing could tell it to end them
    finally:
        network.set_link(1, "up")
    job.end_well()
    job.check_ledger(6)
    assert job.reporter != 0
    assert "unit 0 leads the job no longer" in job.said[0]
