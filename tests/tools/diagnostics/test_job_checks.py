"""`topotrain doctor`: every check finds its fault, says what to do, and leaves nothing behind."""

import fcntl
import json
import os
import socket
import tomllib
from contextlib import closing
from pathlib import Path

import pytest

from topotrain.comm.store import open_store, serve_store
from topotrain.launch.agent.file_locks import locked
from topotrain.tools.cli.app import main
from topotrain.tools.diagnostics import job_checks, machine_checks
from topotrain.tools.diagnostics.job_checks import gpu_finding, memory_finding, shared_memory_finding, version_finding
from topotrain.tools.diagnostics.machine_checks import (
    clock_difference,
    clock_finding,
    nearest,
    port_finding,
    sharing_finding,
    space_finding,
)

ROOT = Path(__file__).parents[3]
TORCH = {"version": "2.13.0+cpu", "gpus": []}
TOKEN = "ab" * 32


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder with job.conf and train.py, in which we stand."""
    monkeypatch.chdir(tmp_path)
    for name in ("TOPOTRAIN_HOST", "TOPOTRAIN_RENDEZVOUS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOPOTRAIN_TOKEN", TOKEN)
    monkeypatch.setattr(job_checks, "torch_facts", lambda: TORCH)
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "job.conf").write_text('program: "train.py" cluster { nworkers_per_group: 2 workspace: "made/here" }\n')
    return tmp_path


@pytest.fixture
def ask(here, capsys):
    """Runs the command: (exit code, findings by name, stderr)."""

    def run(*words):
        with pytest.raises(SystemExit) as left:
            main(["doctor", "job.conf", "--json", *words])
        printed = capsys.readouterr()
        checks = json.loads(printed.out)["checks"] if printed.out else []
        return left.value.code, {check["name"]: check for check in checks}, printed.err

    return run


def test_a_job_without_faults(ask, here, capsys):
    before = sorted(here.rglob("*"))
    code, found, err = ask()
    assert (code, err) == (0, "")
    assert "failed" not in {check["state"] for check in found.values()}
    assert list(found)[:3] == ["job file", "program", "workspace"]
    assert {"free space", "clock", "rendezvous", "ports", "memory", "/dev/shm", "versions", "GPUs"} < set(found)
    with pytest.raises(SystemExit):
        main(["doctor", "job.conf"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [check["state"] for check in found.values()]
    assert sorted(here.rglob("*")) == before


def test_a_bad_job_ends_with_code_2(ask, capsys):
    for words, named in (
        (["--set", "cluster.nworkers_per_procs=3"], "nworkers_per_procs"),
        (["--set", "cluster.nworker_group=3"], "nworker_group"),
        (["--rendezvous", "ftp://host"], "ftp"),
    ):
        code, found, err = ask(*words)
        assert (code, found) == (2, {}) and err.startswith("topotrain: error: ") and named in err
    with pytest.raises(SystemExit) as left:
        main(["doctor", "gone.conf"])
    assert left.value.code == 2 and "gone.conf" in capsys.readouterr().err


def test_a_program_that_cannot_run(ask, here):
    assert ask("--set", "program=-m train")[0] == 0
    (here / "wrong.py").write_text("def f(:\n")
    for program, why in (
        ("gone.py", "cannot be read"),
        ("wrong.py", "is not Python"),
        ("-m trian", "did you mean train?"),
    ):
        code, found, _ = ask("--set", f"program={program}")
        assert (code, found["program"]["state"]) == (1, "failed")
        assert why in found["program"]["text"] and found["program"]["advice"]


def test_a_workspace_of_another_job_or_below_a_file(ask, here):
    (here / "made/here").mkdir(parents=True)
    with locked(here / "made/here/lock", fcntl.LOCK_EX):
        code, found, _ = ask()
        assert (code, found["workspace"]["state"]) == (1, "failed")
        assert f"launcher pid {os.getpid()}" in found["workspace"]["advice"]
    assert ask()[0] == 0
    code, found, _ = ask("--set", "cluster.workspace=train.py/below")
    assert (code, found["workspace"]["state"]) == (1, "failed")
    assert "train.py" in found["workspace"]["text"]


def test_a_shared_folder_with_another_clock(tmp_path, monkeypatch):
    assert clock_difference(tmp_path) == 0.0
    real = machine_checks.time.time
    monkeypatch.setattr(machine_checks.time, "time", lambda: real() + 100)
    late = clock_difference(tmp_path)
    assert late == pytest.approx(-100, abs=50)
    assert (clock_finding("clock", tmp_path, late).state, nearest(tmp_path / "a/b")) == ("warning", tmp_path)
    assert "behind" in clock_finding("clock", tmp_path, late).text
    assert "ahead of" in clock_finding("clock", tmp_path, 3.0).text


def test_a_workspace_of_several_hosts_is_on_a_file_system_that_they_share(ask, tmp_path):
    assert "shared folder" not in ask()[1]
    assert ask("--hosts", "localhost,127.0.0.1")[1]["shared folder"]["state"] in ("ok", "warning")
    mounts = tmp_path / "mounts"
    mounts.write_text("root / ext4 rw 0 0\nserver:/data /data nfs4 rw 0 0\n/dev/sdb /data/scratch xfs rw 0 0\n")
    places = {"/data/job": ("ok", "nfs4"), "/data/scratch/job": ("warning", "xfs")}
    for folder, (state, kind) in (places | {"/database": ("warning", "ext4")}).items():
        found = sharing_finding(Path(folder), mounts)
        assert (found.state, f"is on {kind}" in found.text) == (state, True)


def test_little_space_memory_and_shared_memory():
    assert [space_finding(Path("/"), free).state for free in (5, 10**10)] == ["warning", "ok"]
    states = [memory_finding(2, 4, limit).state for limit in (10**8, 10**12, None)]
    assert states == ["failed", "ok", "warning"]
    sizes = ({"size_bytes": 64 << 20, "free_bytes": 64 << 20}, {"size_bytes": 1 << 30, "free_bytes": 1 << 30}, None)
    assert [shared_memory_finding(size).state for size in sizes] == ["warning", "ok", "warning"]


def test_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={job_checks.LEAST_TORCH[0]}.{job_checks.LEAST_TORCH[1]}" in project["dependencies"]
    assert {*job_checks.LIBRARIES_NEEDED} == {text for text in project["dependencies"] if not text.startswith("torch")}
    assert version_finding(TORCH).state == "ok"
    assert version_finding({"version": "2.5.1"}).state == "failed"
    assert version_finding({"version": None, "error": "cannot be imported: x"}).state == "failed"


def test_gpus(ask):
    code, found, _ = ask("--set", "gpu=1")
    assert (code, found["GPUs"]["state"]) == (1, "failed")
    from topotrain.config.job import Cluster, Job
    from topotrain.config.topology import layout

    one = {"name": "GPU", "memory_bytes": 1, "capability": "9.0"}
    job = Job(gpu=(0, 1), cluster=Cluster(nworkers_per_group=2, nworkers_per_procs=2))
    states = [gpu_finding(job, layout(job.cluster), {"gpus": [one] * count}).state for count in (1, 2)]
    assert states == ["failed", "ok"]
    single = Job(gpu=(0, 1))  # its one worker takes the first entry only
    assert gpu_finding(single, layout(single.cluster), {"gpus": [one]}).state == "ok"
    assert gpu_finding(Job(), layout(Cluster()), {"gpus": [{"error": "old driver"}]}).state == "warning"


def test_a_store_that_answers(ask, monkeypatch):
    with closing(serve_store("127.0.0.1", 0, bytes.fromhex(TOKEN))) as served:
        code, found, _ = ask("--rendezvous", served.url)
        assert (code, found["rendezvous"]["state"]) == (0, "ok")
        assert "answers in" in found["rendezvous"]["text"]
        with closing(open_store(served.url)) as store:
            assert store.keys() == []
        monkeypatch.setenv("TOPOTRAIN_TOKEN", "cd" * 32)
        code, found, _ = ask("--rendezvous", served.url)
        assert (code, found["rendezvous"]["state"]) == (1, "failed")
    # Unit 0 can serve at the port that is free now.
    code, found, _ = ask("--rendezvous", served.url)
    assert (code, found["rendezvous"]["state"]) == (0, "ok")
    assert "unit 0 can serve" in found["rendezvous"]["text"]


def test_a_store_that_cannot_be_used(ask, monkeypatch):
    with socket.socket() as taken:  # bound, and nothing listens
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for url, token, said in (
            (f"redis://ann:5ecre7@127.0.0.1:{port}", TOKEN, str(port)),
            ("env://", TOKEN, "MASTER_ADDR and MASTER_PORT"),
            ("tcp://127.0.0.1:29411", "5ecre7", "TOPOTRAIN_TOKEN"),
        ):
            monkeypatch.setenv("TOPOTRAIN_TOKEN", token)
            code, found, _ = ask("--rendezvous", url)
            assert (code, found["rendezvous"]["state"]) == (1, "failed")
            assert said in found["rendezvous"]["text"] and "5ecre7" not in json.dumps(found)


def test_a_store_in_a_folder(ask, here):
    code, found, _ = ask("--rendezvous", f"file://{here}/meeting")
    assert (code, found["rendezvous"]["state"], (here / "meeting").exists()) == (0, "ok", False)
    (here / "meeting").mkdir(0o700)
    assert ask("--rendezvous", f"file://{here}/meeting")[1]["rendezvous"]["text"].endswith("can be used")
    code, found, _ = ask("--rendezvous", f"file://{here}/train.py")
    assert (code, found["rendezvous"]["state"]) == (1, "failed")
    assert "train.py cannot be used (Not a directory)" in found["rendezvous"]["text"]


def test_hosts(ask):
    code, found, _ = ask("--hosts", "127.0.0.1")
    assert (code, found["host"]["state"]) == (0, "ok")
    code, found, _ = ask("--hosts", f"127.0.0.1, {'a' * 70}.b")
    assert (code, found["host"]["state"]) == (1, "failed")


def test_ports_in_use_are_passed_over():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = port_finding(port, 1)
    assert found.state == "failed" or "before are in use" in found.text  # failed: it is the last of all ports
    assert port_finding(65530, 7).state == "failed"
