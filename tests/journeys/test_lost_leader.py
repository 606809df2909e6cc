"""The unit that leads a job of several units is lost or frozen: another one leads, and each sample counts once."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from job_runner import JobRunner
from process_pool import client
from redis_server import MISSING, redis_server
from shells import alive
from soak_cases import soaked
from unit_hosts import TOKEN, HostNetwork, Job, covered, hastily, newest, wait

from topotrain.comm.store import open_store

pytestmark = pytest.mark.journey

SANDBLASTER = "nworkers_per_group: 2 nservers_per_group: 1 server_worker_separate: true"
ALLREDUCE = "nworkers_per_group: 3 nservers_per_group: 3"
PAIRS = "nworkers_per_group: 2 nworkers_per_procs: 2 nservers_per_group: 2 server_worker_separate: true transport: kTcp"
SANDBLASTER_OF_THREE = "nworkers_per_group: 3 nservers_per_group: 1 server_worker_separate: true"
DOWNPOUR = "nworker_groups: 3 nworkers_per_group: 1 nservers_per_group: 1 server_worker_separate: true"
HASTILY = hastily(0.3, 1.5)
SERVER_UNIT = 3
"""The unit of DOWNPOUR that has the servers."""


@pytest.fixture
def begun(runner: JobRunner) -> Iterator[Callable[..., Job]]:
    """Starts the units of a ledger, and returns when there is a snapshot."""
    made: list[Job] = []

    def begin(
        cluster: str,
        units: int,
        epochs: int,
        url: str = "",
        program: str = "ledger.py",
        network: HostNetwork | None = None,
    ) -> Job:
        url = url or (runner.folder / "store").as_uri() + "?job=ledger"
        hosts = [None] * units if network is None else [1 if rank == 0 else 0 for rank in range(units)]
        job = Job(runner, cluster, program, ["--epochs", str(epochs), "--step-s", "0.03"], hosts, url, network)
        reduce = "reduce: kSum" if program == "ledger.py" else ""
        job.conf.write_text(f"{reduce} snapshot_s: 0.3\n{job.conf.read_text()}")
        made.append(job)
        for rank in range(units):
            job.start(rank, command=HASTILY)
        wait(lambda: newest(job))
        return job

    yield begin
    for job in made:
        for unit in job.units.values():
            unit.process.send_signal(signal.SIGCONT)
            unit.kill()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    if MISSING:
        pytest.skip(MISSING)
    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_server(folder) as url:
        yield url


@pytest.fixture
def redis_at_host_0(tmp_path: Path, network: HostNetwork) -> Iterator[str]:
    if MISSING:
        pytest.skip(MISSING)
    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_server(folder, network=network) as url:
        yield url


def kill_host(job: Job, rank: int) -> None:
    """All processes of a unit at once, as if its host had lost its power."""
    unit = job.units.pop(rank)
    os.killpg(unit.process.pid, signal.SIGKILL)
    for pid in pids_of(job, rank):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    unit.kill()


def leader(job: Job) -> int:
    """Who leads, according to the store."""
    with closing(open_store(job.url.partition("?")[0], bytes.fromhex(TOKEN))) as store:
        (key,) = (key for key in store.keys("jobs/") if key.endswith("/leader"))
        return int(json.loads(store.get(key) or b"")["rank"])


def pids_of(job: Job, rank: int) -> list[int]:
    """Of the workers and servers of a unit."""
    path = job.workspace / f"processes-{rank}.json"
    entries = json.loads(path.read_text()) if path.exists() else []
    return [entry["pid"] for entry in entries if entry["pid"] and (entry["workers"] or entry["servers"])]


def replace_unit_0(job: Job) -> int:
    """Unit 0 is lost and started again; return who leads when the whole job trains again."""
    former = pids_of(job, 0)
    kill_host(job, 0)
    job.start(0, command=HASTILY)
    wait(lambda: set(pids_of(job, 0)) - set(former))
    number = newest(job)
    wait(lambda: newest(job) > number + 1)
    return leader(job)


def reporter(job: Job) -> int:
    """The only unit with a report."""
    (rank,) = (rank for rank in job.units if text_of(job, rank))
    return rank


def text_of(job: Job, rank: int) -> str:
    path = job.folder / f"report-{rank}.json"
    return path.read_text() if path.exists() else ""


def report(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text_of(job, reporter(job)))
    return found


def right(job: Job, epochs: int) -> bool:
    return all(bool((cells == epochs).all()) for cells in job.final.values())


def test_unit_0_does_not_come_back(begun: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPOTRAIN_MEETING_S", "4")
    job = begun(SANDBLASTER, 3, 40)
    kill_host(job, 0)
    ended = job.end()
    assert [code for code, _, _ in ended.values()] == [1, 1]
    for _, _, err in ended.values():
        assert "unit 0 on" in err
        assert "vanished without a word, and within 4 s no replacement was started" in err
        assert "with `resume: true` the same job goes on from there" in err


@pytest.mark.parametrize("delay_s", soaked([0.0], [4.0]))
def test_two_of_three_units_are_lost_and_started_again(begun: Callable[..., Job], delay_s: float) -> None:
    """The leader and another unit: at once; in the soak also about when one is elected."""
    job = begun(SANDBLASTER, 3, 4)
    kill_host(job, 0)
    time.sleep(delay_s)
    kill_host(job, 1)
    for rank in (1, 0):
        job.start(rank, command=HASTILY)
    job.end_well()
    assert right(job, 4)


def test_each_leader_is_lost_once_more_before_the_job_trains_again(begun: Callable[..., Job]) -> None:
    """The second leader dies while it waits for unit 0 to come back."""
    job = begun(ALLREDUCE, 3, 4)
    kill_host(job, 0)
    wait(lambda: leader(job))
    second = leader(job)
    kill_host(job, second)
    job.start(0, command=HASTILY)
    job.start(second, command=HASTILY)
    job.end_well()
    assert right(job, 4)
    assert reporter(job) == 3 - second, "the only unit that was there all the time"


@pytest.mark.parametrize("delay_s", soaked([0.0], [0.2]))
def test_a_leader_is_lost_when_its_job_is_about_to_end(
    begun: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    """The result is there. The other units know that all is done, or they wait for unit 0: both of them the same."""
    monkeypatch.setenv("TOPOTRAIN_MEETING_S", "4")
    job = begun(ALLREDUCE, 3, 1)
    wait(lambda: (job.workspace / "final.safetensors").exists())
    time.sleep(delay_s)
    kill_host(job, 0)
    ended = job.end()
    codes = {rank: code for rank, (code, _, _) in ended.items()}
    assert codes in ({1: 0, 2: 0}, {1: 1, 2: 1}), ended
    if codes[1]:
        assert all("within 4 s no replacement was started" in err for _, _, err in ended.values()), ended
    assert right(job, 1)


@pytest.mark.parametrize("both", soaked([False], [True]))
def test_a_signal_while_there_is_no_leader(begun: Callable[..., Job], both: bool) -> None:
    job = begun(SANDBLASTER, 3, 40)
    kill_host(job, 0)
    for rank in (1, 2) if both else (1,):
        job.units[rank].process.send_signal(signal.SIGINT)
    ended = job.end()
    assert {rank: code for rank, (code, _, _) in ended.items()} == {1: 130, 2: 130}
    assert not alive([pid for rank in (1, 2) for pid in pids_of(job, rank)])
    if not both:
        assert "to unit 1" in ended[2][2], ended[2][2]


def ask(job: Job, *words: str) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "TOPOTRAIN_TOKEN": TOKEN}
    command = [*client(job.runner.warm_at), "-m", "topotrain", "jobs", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=90, cwd=job.folder)


def test_groups_leave_and_join_under_the_next_leader_which_is_then_lost(begun: Callable[..., Job], redis: str) -> None:
    """Unit 0 has worker 0/0, which no job can do without; the leader after it has a group that this one can."""
    job = begun(DOWNPOUR, 4, 40, f"{redis}?job=ledger")
    second = replace_unit_0(job)
    assert second != 0
    store = [redis, "--job", "ledger"]
    left = ask(job, "leave", *store, "--group", "2", "--json")
    assert json.loads(left.stdout) == {"group": 2, "text": "group 2 has left"}, left.stderr
    # Any unit takes a request, and the one that leads decides.
    for rank in range(4):
        folder = job.folder / f"elsewhere-{rank}"
        folder.mkdir()
        (folder / "control-0").symlink_to((job.workspace / f"control-{rank}").readlink())
        refused = ask(job, "leave", str(folder), "--group", "0")
        assert refused.returncode == 2 and "so it stays to the end" in refused.stderr, refused.stderr
    joined = ask(job, "join", str(folder), "--group", "2")
    assert joined.stdout == "topotrain: group 2 starts (incarnation 1)\n", joined.stderr
    kill_host(job, second)
    if second == SERVER_UNIT:  # the others cannot do without it
        job.start(second, command=HASTILY)
    job.end_well()
    assert right(job, 40)
    actions = [incident["action"] for incident in report(job)["incidents"]]
    assert actions[0] == "the whole job starts again"
    if second != SERVER_UNIT:
        assert actions[1] == f"the job goes on without group {second}"


def test_workers_leave_and_join_over_the_loss_of_a_leader(begun: Callable[..., Job]) -> None:
    """The number of workers has changed when unit 0 is lost, and the next leader changes it again."""
    job = begun(SANDBLASTER_OF_THREE, 4, 12)
    url = job.url.partition("?")[0]
    store = [url, "--job", "ledger", "--workers", "1", "--json"]
    left = ask(job, "leave", *store)
    assert json.loads(left.stdout)["workers"] == 2, left.stderr
    assert replace_unit_0(job) != 0
    left = ask(job, "leave", *store)
    assert json.loads(left.stdout)["workers"] == 1, left.stderr
    joined = ask(job, "join", *store)
    assert json.loads(joined.stdout)["workers"] == 2, joined.stderr
    job.end_well()
    assert right(job, 12)


def test_a_frozen_unit_0_follows_the_unit_that_was_elected(begun: Callable[..., Job]) -> None:
    """It is stopped for longer than its lease, and its processes with it. Nothing that it decides then counts."""
    job = begun(SANDBLASTER, 3, 4)
    frozen = [job.units[0].process.pid, *pids_of(job, 0)]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    wait(lambda: leader(job))
    for pid in frozen:
        # Unit 0 goes on first, and may have ended its processes before it is their turn here.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    job.end_well()
    assert right(job, 4)
    assert "unit 0 leads the job no longer" in job.said[0]
    assert reporter(job) != 0


def test_a_synchronous_job_that_has_lost_unit_0_has_the_bits_of_an_undisturbed_one(
    begun: Callable[..., Job], runner: JobRunner
) -> None:
    calm = runner.run(ALLREDUCE, "steady.py", "--epochs", "4", name="calm").final
    job = begun(ALLREDUCE, 3, 4, program="steady.py")
    kill_host(job, 0)
    job.start(0, command=HASTILY)
    job.end_well()
    assert calm.keys() == job.final.keys()
    for name, values in calm.items():
        assert torch.equal(values, job.final[name]), name
    told = "".join(job.said.values())
    assert "leads the job from now on (term 2): unit 0 is gone" in told
    assert "the whole job starts again from" in told
    assert reporter(job) != 0, "who leads at the end writes the report"
    (incident,) = report(job)["incidents"]
    assert (incident["who"], incident["action"]) == ("unit 0", "the whole job starts again")


def test_a_leader_with_a_copy_of_each_server_is_lost_and_nothing_restarts(begun: Callable[..., Job]) -> None:
    job = begun(f"{PAIRS} replicas: 2", 3, 8)
    second = replace_unit_0(job)
    assert second in (1, 2)
    covered(job, 2)
    kill_host(job, second)
    job.end_well()
    assert right(job, 8)
    first, other = report(job)["incidents"]
    assert (first["who"], first["action"]) == ("unit 0", "the whole job starts again")
    assert (other["who"], other["action"][:45]) == (f"unit {second}", "the second copies of its servers go on; fresh")


def test_the_host_of_unit_0_is_cut_off_for_a_while(
    begun: Callable[..., Job], network: HostNetwork, redis_at_host_0: str
) -> None:
    """The store is on the host of the others. Unit 0 finds neither them nor the store, and ends its processes."""
    job = begun(ALLREDUCE, 3, 6, f"{redis_at_host_0}?job=ledger", network=network)
    before = pids_of(job, 0)
    assert alive(before)
    network.set_link(1, "down")
    try:
        wait(lambda: network.run_on(0, lambda: leader(job)))
        wait(lambda: not alive(before))  # its processes have ended, although nothing could tell it to end them
    finally:
        network.set_link(1, "up")
    job.end_well()
    assert right(job, 6)
    assert reporter(job) != 0
    assert "unit 0 leads the job no longer" in job.said[0]
