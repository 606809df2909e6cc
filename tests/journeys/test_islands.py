"""What befalls a job of islands: it moves to fewer of them, one more comes, a server dies, and a link is cut."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from job_runner import ALLREDUCE, PROGRAMS, JobRunner
from killed_jobs import resumed, terminated, terminated_again
from seeds import SOAK
from soak_cases import soak_only
from unit_hosts import HostNetwork, Job, wait

from topotrain.extensions.checkpointing.checkpoint_reader import latest

pytestmark = pytest.mark.journey

MEAN = "outer { type: kSGD learning_rate { type: kFixed base_lr: 1 } }"


def islands(count: int, sync_freq: int = 4, servers: int = 1) -> str:
    apart = f"nworker_groups: {count} nservers_per_group: {servers} server_worker_separate: true"
    return f"{apart} sync_freq: {sync_freq} transport: kTcp {MEAN}"


def test_islands_become_one_synchronous_group_and_then_three_islands(runner: JobRunner) -> None:
    """Each of the first two jobs is asked to end in the middle of an epoch, and of a round."""
    extra, epochs = "reduce: kSum", 6
    words = ("ledger", "--epochs", str(epochs), "--at")
    code, said, workspace = terminated(runner, islands(8 if SOAK else 4), "resuming.py", *words, "5", extra=extra)
    first = latest(workspace)
    assert code == 143 and first is not None, said
    confs = []
    for name, cluster in (("together", ALLREDUCE), ("three", islands(3))):
        conf = runner.folder / f"{name}.conf"
        conf.write_text(f'name: "job"\n{extra}\ncluster {{ {cluster} workspace: "{workspace}" }}\n')
        confs.append(str(conf))
    program = str(PROGRAMS / "resuming.py")
    code, said, workspace = terminated_again(runner, workspace, confs[0], program, *words, "9")
    second = latest(workspace)
    assert code == 143 and second is not None and second.version > first.version, said
    cells = resumed(runner, workspace, confs[1], program, *words, "1000").final["cells"]
    assert torch.equal(cells, torch.full_like(cells, epochs)), cells


@soak_only
def test_a_ninth_island_comes_and_no_other_one_waits_for_it(runner: JobRunner) -> None:
    """Each of the eight makes steps while it is started, and while it makes its first steps: more than in a round."""
    program = ("counted.py", str(runner.folder), "1600", "2", "8")
    extra = "on_failure: kContinue reduce: kSum start_groups: 8"
    command = runner.command(f"{islands(9, sync_freq=2)} quorum: 2", *program, extra=extra)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=runner.folder) as process:
        wait(lambda: len(list(runner.folder.glob("steps-*"))) == 8 or process.poll() is not None)
        join = [*runner.python, "-m", "topotrain", "jobs", "join", str(runner.folder / "job"), "--group", "8"]
        asked = subprocess.run(join, capture_output=True, text=True, timeout=60)
        out, err = process.communicate(timeout=100)
    assert asked.returncode == 0 and process.returncode == 0, asked.stderr + out + err
    report = json.loads((runner.folder / "job.json").read_text())
    changes = [(change["group"], change["what"]) for change in report["groups"]]
    assert changes == [(8, "is not there yet"), (8, "joins (incarnation 1)")]
    rounds = report["rounds"]
    assert report["samples"] == 1600 * 2 and rounds["lost_steps"] == 0
    assert (rounds["states_taken"], rounds["states_missed"]) == (1, 0)
    assert {each["who"]: each["steps"] > 0 for each in rounds["workers"]} == {f"worker {k}/0": True for k in range(9)}
    assert sum(each["steps"] for each in rounds["workers"]) == 1600 * 2 // 4
    assert any(8 in each["groups"] for each in rounds["last"])


@soak_only
def test_an_outer_server_without_a_second_copy_dies_and_no_batch_is_lost(runner: JobRunner) -> None:
    """The job goes on from its snapshot."""
    words = (str(runner.folder / "job"), "server 0/1", "1", "4", "snapshot")
    ended = runner.run(islands(3, servers=2), "mortal.py", *words, extra="reduce: kSum snapshot_s: 0.05")
    ended.check_ledger(3)
    assert ended.report["samples"] == 96 * 3
    (incident,) = ended.report["incidents"]
    assert (incident["who"], incident["action"]) == ("server 0/1", "the whole job starts again"), incident
    assert "the whole job starts again from /" in ended.err


@pytest.fixture
def scattered(runner: JobRunner, network: HostNetwork) -> Iterator[Job]:
    """Three islands and their server; the last island is on a host of its own."""
    program = (str(runner.folder), "480", "2")
    url = (runner.folder / "store").as_uri() + "?job=islands"
    cluster = f"{islands(3, sync_freq=2)} quorum: 1 lease_s: 12"
    job = Job(runner, cluster, "counted.py", program, [0, 0, 1, 0], url, network)
    job.conf.write_text(f"reduce: kSum\n{job.conf.read_text()}")
    yield job
    network.restore()
    for unit in job.units.values():
        unit.kill()


def test_two_islands_train_on_while_the_link_of_the_third_is_cut(scattered: Job) -> None:
    """Both make three rounds alone. Then the link is there again, and each batch has counted once."""
    job = scattered
    assert job.network is not None

    def steps(worker: int) -> int:
        file = Path(job.folder, f"steps-{worker}")
        return int(file.read_text()) if file.exists() else 0

    def ready(condition: Callable[[], bool]) -> bool:
        assert all(unit.process.poll() is None for unit in job.units.values()), job.end()
        return condition()

    for rank, host in enumerate(job.hosts):
        assert host is not None
        job.start(rank, "--host", job.network.addresses[host])
    wait(lambda: ready(lambda: all(map(steps, range(3)))))
    for host in (0, 1):
        job.network.block(host)
    before = steps(0), steps(1)
    wait(lambda: ready(lambda: steps(0) >= before[0] + 6 and steps(1) >= before[1] + 6))
    job.network.restore()
    Path(job.folder, "on").touch()
    job.end_well()
    assert bool((job.final["cells"] == 2).all()), job.final["cells"]
    report = json.loads((job.folder / "report-0.json").read_text())
    assert report["rounds"]["lost_steps"] == 0 and report["incidents"] == []
    assert {group for each in report["rounds"]["last"] for group in each["groups"]} == {0, 1, 2}
