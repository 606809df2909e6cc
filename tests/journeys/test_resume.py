"""A job of which every process is killed goes on from its newest snapshot: the same bits, every sample once."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from programs.resuming import SAMPLES
from shop import Ended, Shop
from warm import client

from topotrain.checkpoint import latest

pytestmark = pytest.mark.journey

SYNC = "nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true"
INLINE = "nworkers_per_group: 2 nservers_per_group: 2"
EXTRA = "snapshot_s: 0.1"


def killed(shop: Shop, cluster: str, kind: str, extra: str = EXTRA) -> Path:
    """The workspace of a job whose processes were all killed in its second epoch."""
    hold = shop.folder / "hold"
    hold.touch()
    command = shop.command(cluster, "resuming.py", kind, "--hold", str(hold), extra=extra)
    command = [*client(shop.warm_at), *command[1:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=shop.folder)
    assert process.stdout is not None
    patience = threading.Timer(100, process.kill)  # a job that hangs must not hang the suite
    patience.start()
    heard = ""
    for line in process.stdout:
        heard += line
        if line.strip() == "holding":
            break
    else:
        raise AssertionError(f"the job ended early:\n{heard}")
    patience.cancel()
    workspace = shop.folder / "job"
    pids = [entry["pid"] for entry in json.loads((workspace / "processes.json").read_text())]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    hold.unlink()
    return workspace


def resumed(shop: Shop, workspace: Path, *more: str) -> Ended:
    words = ["run", "--resume", str(workspace), "--forkserver", shop.served_at, *more]
    command = [*client(shop.warm_at), "-m", "topotrain", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=shop.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return Ended(done.returncode, done.stdout, done.stderr, workspace, {})


@pytest.mark.parametrize("cluster", [SYNC, INLINE], ids=["sync", "inline"])
def test_the_same_bits_as_without_the_death(shop: Shop, cluster: str) -> None:
    undisturbed = shop.run(cluster, "resuming.py", "net", name="undisturbed").final
    workspace = killed(shop, cluster, "net")
    found = latest(workspace)
    assert found is not None and 0 < found.version <= 30
    ended = resumed(shop, workspace)
    assert ended.final.keys() == undisturbed.keys()
    different = [name for name, tensor in undisturbed.items() if not torch.equal(tensor, ended.final[name])]
    assert not different, (found.version, different)


@pytest.mark.parametrize(
    "after",
    [
        "nworkers_per_group: 3 nservers_per_group: 1 server_worker_separate: true",
        "nworker_groups: 2 nservers_per_group: 3 server_worker_separate: true",
    ],
    ids=["synchronous", "downpour"],
)
def test_every_sample_once_on_another_layout(shop: Shop, after: str) -> None:
    workspace = killed(shop, SYNC, "ledger", "snapshot_s: 0.1 reduce: kSum")
    found = latest(workspace)
    assert found is not None
    conf = shop.folder / "other.conf"
    conf.write_text(f'name: "job"\nreduce: kSum\ncluster {{ {after} workspace: "{workspace}" }}\n')
    program = str(Path(__file__).parents[1] / "programs" / "resuming.py")
    cells = resumed(shop, workspace, str(conf), program, "ledger").final["cells"]
    assert torch.equal(cells, torch.full((SAMPLES,), 3.0)), (found.version, cells)
