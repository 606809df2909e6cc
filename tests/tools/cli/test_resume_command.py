"""Which snapshot and which job `topotrain run --resume` goes on with."""

import json

import pytest
import torch
from snapshot_files import Vault

from topotrain.config.job import Cluster, ConfigError, Job
from topotrain.config.job_file import dumps
from topotrain.extensions.checkpointing.checkpoint_reader import FOLDER, MANIFEST, MODEL, hashed
from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotFiles
from topotrain.launch.recovery.resume_point import asked_for
from topotrain.tools.cli.job_arguments import snapshot_job


@pytest.fixture
def workspace(tmp_path):
    """A workspace with the snapshot of a job that stood somewhere else when it was taken."""
    job = Job(name="old", program="train.py", args=("--epochs", "5"), cluster=Cluster(workspace="elsewhere"))
    small = lambda: torch.nn.Linear(4, 3)  # noqa: E731
    vault = Vault(torch.optim.SGD, 1, net=small)
    for number in (1, 2):
        vault.write(SnapshotFiles(tmp_path / FOLDER), number, conf=dumps(job))
    return tmp_path


def test_the_newest_snapshot_with_its_job_or_the_one_that_is_named(workspace, capsys):
    job, snapshot = snapshot_job(workspace, ["cluster.nworkers_per_group=2"])
    assert snapshot == str(workspace / FOLDER / "000002")
    assert (job.program, job.args) == ("train.py", ("--epochs", "5"))
    assert (job.workspace, job.cluster.nworkers_per_group) == (str(workspace), 2)
    Vault(torch.optim.SGD, 1, net=lambda: torch.nn.Linear(4, 3)).write(
        SnapshotFiles(workspace / FOLDER), 3, conf=dumps(Job(name="new", program="train.py")), step=70
    )
    for name in ("000003", "step-70"):
        job, snapshot = snapshot_job(workspace / FOLDER / name)
        assert (snapshot, job.workspace) == (str(workspace / FOLDER / "000003"), str(workspace))
    (workspace / FOLDER / "000003" / MODEL).write_bytes(b"")
    with pytest.raises(ConfigError, match="has 0 bytes"):
        snapshot_job(workspace / FOLDER / "000003")
    assert snapshot_job(workspace)[1].endswith("000002"), "a damaged one gives way with a warning"
    assert "snapshot 000003 has 0 bytes of model.safetensors" in capsys.readouterr().err


def test_resume_in_the_file(workspace, tmp_path, capsys):
    def job(resume, path):
        return Job(resume=resume, cluster=Cluster(workspace=str(path)))

    assert asked_for(job(False, workspace), workspace) == ""
    assert asked_for(job(True, workspace), workspace).endswith("000002")
    assert asked_for(job(True, tmp_path / "new"), tmp_path / "new") == ""
    assert "starts at the beginning" in capsys.readouterr().err


def test_a_workspace_without_a_snapshot_and_one_with_a_job_that_is_none(workspace, tmp_path, ask):
    code, _, text = ask("run", "--resume", str(tmp_path / "new"))
    assert code == 2 and f"--resume = '{tmp_path / 'new'}': has no snapshot" in text
    code, _, text = ask("run")
    assert code == 2 and "no job file" in text
    for number in (1, 2):
        path = workspace / FOLDER / f"{number:06d}" / MANIFEST
        data = json.loads(path.read_text()) | {"conf": "cluster { nworkers: 3 }"}
        del data["sha256"]
        path.write_text(json.dumps({**data, "sha256": hashed(data)}))
    code, _, text = ask("run", "--resume", str(workspace))
    assert code == 2 and "snapshot 2:1:11" in text
