"""What befalls a job of islands: it moves to fewer of them, one more comes, a server dies, and a link is cut."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from job_runner import ALLREDUCE, PROGRAMS, JobRunner
from killed_jobs import resumed, terminated, terminated_again
from seeds import SOAK
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
