"""What every launcher would submit, what it refuses, and that no secret stands where others can read it."""

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from topotrain.comm.store import StoreError, open_store
from topotrain.comm.store.discovery.job_registry import JobRecord, Registry
from topotrain.config import job_file
from topotrain.config.job import ConfigError
from topotrain.config.topology import layout
from topotrain.launch import shared_forkserver
from topotrain.launch.launchers import LAUNCHERS, foreground_tool, launch, ray, slurm, slurm_requeue, torchrun
from topotrain.launch.launchers.env_tables import start_of
from topotrain.launch.launchers.ray_capacity import fits
from topotrain.launch.launchers.submission import LaunchOptions, LaunchResult, Submission, submission, without_password
from topotrain.tools.cli import app as cli

SECRET = "5e" * 32
OURS = ("torchrun", "slurm", "srun", "submitit", "mpirun", "ray")
THREE = "nworkers_per_group: 2 server_worker_separate: true"


def ask(name: str, folder: Path, cluster: str = THREE, dry_run: bool = True, **options: Any) -> str:
    conf = f'name: "My job" program: "train.py" args: "--lr=0.1" cluster {{ {cluster} workspace: "{folder}" }}'
    job = job_file.loads(conf)
    environ = {"TOPOTRAIN_TOKEN": SECRET}
    return launch(name, job, layout(job.cluster), LaunchOptions(**options), environ, dry_run).text


@pytest.mark.parametrize("name", OURS)
def test_a_dry_run_shows_every_unit_and_no_secret_and_writes_nothing(name: str, tmp_path: Path) -> None:
    words = ("--log", "jsonl", "--metrics", "9400")
    text = ask(name, tmp_path / "w", id="j1", rendezvous="redis://me:hush@store/0", unit_words=words)
    assert "hush" not in text
    assert SECRET not in text
    folder = tmp_path / "w" / "launch" / "j1"
    unit = "topotrain.launch.launchers.torchrun" if name == "torchrun" else "topotrain unit"
    assert f"-m {unit} --log jsonl --metrics 9400 {folder}/job.conf" in text
    assert "TOPOTRAIN_RENDEZVOUS=redis://me:***@store/0?job=j1" in text
    assert f"TOPOTRAIN_TOKEN_FILE={folder}/token" in text
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torchrun", ["--nnodes=1 --nproc-per-node=3 --standalone --no-python"]),
        ("srun", ["srun --ntasks=3 --cpus-per-task=1", "--kill-on-bad-exit=1", "--export=ALL", "'--job-name=My job'"]),
        ("slurm", ["#!/bin/sh\n", "#SBATCH --ntasks=3\n", '#SBATCH "--job-name=My job"\n', "\nexec srun --ntasks=3"]),
        ("mpirun", ["mpirun -np 3 --bind-to none", "-x TOPOTRAIN_RENDEZVOUS -x TOPOTRAIN_TOKEN_FILE"]),
        ("submitit", ["nodes = 1", "tasks_per_node = 3", "--kill-on-bad-exit=1"]),
    ],
)
def test_what_would_be_submitted(name: str, words: list[str], tmp_path: Path) -> None:
    text = ask(name, tmp_path)
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(
    ("name", "variables", "options", "libraries"),
    [
        ("torchrun", {"RANK": "1", "WORLD_SIZE": "3"}, {}, "/mine"),
        # Open MPI that is called by its path puts its libraries first.
        ("mpirun", {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, {}, "/opt/mpi/lib:/mine"),
        ("mpirun", {}, {"hosts": ("node1",)}, None),
        ("mpirun", {"SLURM_JOB_ID": "7"}, {}, None),
        ("srun", {}, {}, None),
    ],
)
def test_torch_is_loaded_for_the_units_of_this_host_while_the_tool_starts(
    name: str, variables: Any, options: Any, libraries: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    share = SimpleNamespace(leave=lambda: calls.append("left"))
    monkeypatch.setattr(shared_forkserver, "join", lambda *given: calls.append(given) or share)
    monkeypatch.setattr(
        foreground_tool, "in_front", lambda words, submission: calls.append(words[0]) or LaunchResult(0)
    )
    monkeypatch.setattr(foreground_tool, "find", lambda program, install: "/opt/mpi/bin/mpirun")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    for variable in ("SLURM_JOB_ID", "TOPOTRAIN_FORKSERVER"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    ask(name, tmp_path, dry_run=False, id="j1", **options)
    if libraries is None:
        assert calls == ["/opt/mpi/bin/mpirun"]
        return
    (scope, environ), *others = calls
    assert others == ["/opt/mpi/bin/mpirun", "left"]
    # A unit finds the same one.
    assert start_of({**environ, **variables}).scope(environ) == scope
    assert environ["LD_LIBRARY_PATH"] == libraries


def test_a_job_that_is_requeued_is_signalled_in_time(tmp_path: Path) -> None:
    text = ask("slurm", tmp_path, requeue=True, extra=("--time=60",))
    for line in ("--requeue", "--signal=B:USR1@40", "--open-mode=append", "--time=60"):
        assert f"#SBATCH {line}\n" in text
    assert "--no-requeue" not in text
    assert f"-m topotrain.launch.launchers.slurm_requeue {tmp_path}/launch/" in text
    assert "job.conf srun --ntasks=3" in text
    text = ask("submitit", tmp_path, requeue=True, extra=("timeout_min=60",))
    assert "slurm_additional_parameters = {'requeue': True}\n" in text
    assert "slurm_signal_delay_s = 40\n" in text
    assert "slurm_additional_parameters = {'no_requeue': True}\n" in ask("submitit", tmp_path)


@pytest.mark.parametrize("fields", ["snapshot_s: 0", "grace_s: 0"])
@pytest.mark.parametrize("name", ["slurm", "submitit"])
def test_a_job_without_snapshots_cannot_be_requeued(name: str, fields: str, tmp_path: Path) -> None:
    job = job_file.loads(f'program: "t.py" {fields} cluster {{ workspace: "{tmp_path}" }}')
    options = LaunchOptions(requeue=True, extra=("timeout_min=60",) if name == "submitit" else ())
    with pytest.raises(ConfigError, match=r"--requeue.*needs snapshots.*snapshot_s, and grace_s"):
        launch(name, job, layout(job.cluster), options, {}, True)


def test_only_a_start_with_progress_is_requeued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_file.loads(f'program: "t.py" cluster {{ workspace: "{tmp_path}" }}')
    environ = {"TOPOTRAIN_RENDEZVOUS": f"file://{tmp_path}/store?job=a", "TOPOTRAIN_TOKEN": SECRET}

    def snapshot(number: int) -> None:
        folder = tmp_path / "manifests" / f"{number:06d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(str(number))

    first = slurm_requeue.RequeuedStart.of(job, environ)
    assert first.words == ()
    assert first.environ["TOPOTRAIN_RENDEZVOUS"].endswith("?job=a")
    assert not first.goes_on(143)
    assert "no snapshot since it was started" in capsys.readouterr().err
    snapshot(1)
    assert first.goes_on(143)
    # the script's own error, the end of the training, and a signal of the user
    assert not any(first.goes_on(code) for code in (0, 1, 2, 130))
    second = slurm_requeue.RequeuedStart.of(job, {**environ, "SLURM_RESTART_COUNT": "2"})
    assert second.words == ("--set", "resume=true")
    assert second.environ["TOPOTRAIN_RENDEZVOUS"].endswith("?job=a.life-2")
    assert not second.goes_on(143)
    snapshot(2)
    assert second.goes_on(143)


def test_several_nodes(tmp_path: Path) -> None:
    four = "nworkers_per_group: 4"
    text = ask("torchrun", tmp_path, four, hosts=("n1", "n2"), id="j1", extra=("--max-restarts=2",))
    assert "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=n1:29400 --rdzv-id=j1 --max-r" in text
    for given, endpoint in [
        ("n1:7", "n1:7"),
        ("fd00::1", "[fd00::1]:29400"),
        ("[fd00::1]", "[fd00::1]:29400"),
        ("[fd00::1]:7", "[fd00::1]:7"),
    ]:
        text = ask("torchrun", tmp_path, four, hosts=(given, "n2"), id="j1")
        assert f"--rdzv-endpoint={endpoint} " in text.replace("'", ""), text
    with pytest.raises(ConfigError, match="--hosts = 'n1:x': must be a host"):
        ask("torchrun", tmp_path, four, hosts=("n1:x", "n2"), id="j1")
    assert "--nodes=2 --nodelist=n1,n2 --partition=x" in ask(
        "srun", tmp_path, four, nodes=2, hosts=("n1", "n2"), extra=("--partition=x",)
    )
    text = ask("slurm", tmp_path, four, nodes=2, extra=("--comment=two words",))
    assert "#SBATCH --nodes=2\n" in text
    assert '#SBATCH "--comment=two words"\n' in text
    assert "--host n1:3,n2 " in ask("mpirun", tmp_path, four, hosts=("n1", "n1", "n1", "n2"))
    text = ask("submitit", tmp_path, four, nodes=2, extra=("timeout_min=60", "slurm_partition=x"))
    for line in ("nodes = 2", "tasks_per_node = 2", "timeout_min = 60", "slurm_partition = 'x'"):
        assert f"\n  {line}\n" in text


def test_one_bundle_of_ray_per_unit(tmp_path: Path) -> None:
    text = ask("ray", tmp_path, extra=("address=10.0.0.1:6379", "gpus=2"))
    assert "ray.init(address='10.0.0.1:6379')" in text
    assert text.count("{'CPU': 1, 'GPU': 2.0}") == 3
    assert "strategy='SPREAD'" in text
    copies = "nworker_groups: 2 nserver_groups: 2"  # of each shard there are two, which shall not go with one node
    assert "# strategy='SPREAD' if the cluster has one node\nplacement_group(strategy='STRICT_SPREAD'" in ask(
        "ray", tmp_path, copies
    )
    assert "strategy='PACK'" in ask("ray", tmp_path, copies, extra=("strategy=PACK",))


def test_every_attempt_has_a_name_of_its_own(tmp_path: Path) -> None:
    environ = {"TOPOTRAIN_RENDEZVOUS": "redis://h/0?job=a", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert torchrun.rendezvous(environ) == "redis://h/0?job=a"
    assert torchrun.rendezvous({**environ, "TORCHELASTIC_RESTART_COUNT": "2"}) == "redis://h/0?job=a.life-2"
    job = job_file.loads(f'name: "a" program: "t.py" cluster {{ workspace: "{tmp_path}" }}')
    first = submission(job, layout(job.cluster), LaunchOptions(id="x", rendezvous="redis://h/0"), {})
    assert ray.for_attempt(first, 0) is first
    third = ray.for_attempt(first, 2)
    assert (third.id, third.rendezvous) == ("x.life-2", "redis://h/0?job=x.life-2")
    assert third.environ["TOPOTRAIN_RENDEZVOUS"] == third.rendezvous


def test_ray_that_is_not_installed_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'topotrain\[ray\]'"):
        ask("ray", tmp_path / "w", dry_run=False)
    assert not (tmp_path / "w").exists()


class Placed(Exception):
    """Ray was asked for a placement group."""


class Nodes:
    """In place of the package: a cluster whose nodes have these CPUs, which tells the strategy that it is asked for."""

    def __init__(self, *cpus: float) -> None:
        self.cpus, self.util = cpus, self

    def init(self, **given: object) -> None: ...

    def shutdown(self) -> None: ...

    def nodes(self) -> list[dict[str, object]]:
        gone = {"Alive": False, "Resources": {"CPU": 64.0}}
        return [gone, *({"Alive": True, "Resources": {"CPU": cpus, "memory": 1e9}} for cpus in self.cpus)]

    def placement_group(self, bundles: object, strategy: str) -> None:
        raise Placed(strategy)


@pytest.mark.parametrize(
    ("cpus", "extra", "words"),
    [
        (
            (4,),
            ("strategy=STRICT_SPREAD",),
            ["STRICT_SPREAD", "the 2 units (2 CPU for", "the nodes (4 CPU), but --pass"],
        ),
        ((4, 1), (), ["STRICT_SPREAD", "the nodes (4 CPU; 1 CPU), but --pass=strategy=SPREAD has"]),
        ((2, 1), ("cpus=2",), ["--pass=strategy=SPREAD --pass=cpus=1 has", "room=SECONDS"]),
        ((1,), (), ["--pass=strategy=SPREAD --pass=cpus=0.5 has"]),
        ((1, 1), ("gpus=1",), ["2 CPU, 1 GPU for unit 0", "no other strategy has"]),
        ((2, 2), ("strategy=STRICT_PACK",), ["STRICT_PACK", "--pass=strategy=SPREAD has"]),
        ((1,), ("strategy=PACK", "cpus=2"), ["PACK", "--pass=cpus=0.5"]),
    ],
)
def test_room_that_cannot_come_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: tuple[float, ...], extra: tuple[str, ...], words: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", Nodes(*cpus))
    with pytest.raises(ConfigError) as caught:
        ask("ray", tmp_path / "w", "nworker_groups: 2 nserver_groups: 2", extra=extra, dry_run=False)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("cpus", "extra", "strategy"),
    [
        ((4,), (), "SPREAD"),
        ((2, 2), (), "STRICT_SPREAD"),
        ((4,), ("strategy=PACK",), "PACK"),
        ((4,), ("room=30",), "STRICT_SPREAD"),
    ],
)
def test_copies_share_a_node_only_where_there_is_one(
    tmp_path: Path, monkeypatch: Any, capsys: Any, cpus: tuple[float, ...], extra: tuple[str, ...], strategy: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", Nodes(*cpus))
    with pytest.raises(Placed, match=f"^{strategy}$"):
        ask("ray", tmp_path / "w", "nworker_groups: 2 nserver_groups: 2", extra=extra, dry_run=False)
    assert ("one node, so the copies of each shard share it" in capsys.readouterr().err) is (strategy == "SPREAD")


@pytest.mark.parametrize(
    ("cpus", "want", "strategy", "room"),
    [
        ((2, 1), (1, 2), "STRICT_SPREAD", True),
        ((2, 1), (2, 2), "STRICT_SPREAD", False),
        ((2, 2), (1, 1, 1), "STRICT_SPREAD", False),
        ((4, 1), (2, 2), "STRICT_PACK", True),
        ((3, 3), (2, 2), "STRICT_PACK", False),
        ((3, 3), (2, 2), "PACK", True),
        ((3, 1), (2, 2), "SPREAD", False),
        ((), (1,), "SPREAD", False),
    ],
)
def test_which_units_a_ray_cluster_can_hold(
    cpus: tuple[float, ...], want: tuple[float, ...], strategy: str, room: bool
) -> None:
    assert fits([{"CPU": has} for has in cpus], [{"CPU": wants} for wants in want], strategy) is room


def test_a_unit_of_several_processes_gets_as_many_cpus(tmp_path: Path) -> None:
    both = "nworkers_per_group: 4 nworkers_per_procs: 4 nserver_groups: 1 nservers_per_group: 1"
    assert "--cpus-per-task=5" in ask("srun", tmp_path, both)
    assert "{'CPU': 5}" in ask("ray", tmp_path, both)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("slrum", {}, ["launcher", "slrum", "torchrun", "slurm", "submitit", "mpirun"]),
        ("torchrun", {"nodes": 2}, ["--nodes", "2", "3 units", "1, 3"]),
        ("torchrun", {"nodes": 3}, ["--hosts"]),
        ("torchrun", {"hosts": ("a", "b", "c")}, ["--id", "same on each"]),
        ("submitit", {"nodes": 2}, ["--nodes", "2", "1, 3"]),
        ("submitit", {"extra": ("--partition=x",)}, ["--pass", "--partition=x", "timeout_min=60"]),
        ("mpirun", {"nodes": 2}, ["--nodes", "not for mpirun", "torchrun, slurm, srun, submitit"]),
        ("slurm", {"extra": ("gpu",)}, ["--pass", "gpu", "--partition"]),
        ("srun", {"id": "Big One"}, ["--id", "Big One", "a-z"]),
        ("srun", {"id": "a", "rendezvous": "redis://h/0?job=b"}, ["--id", "'a'", "'b'"]),
        ("ray", {"hosts": ("a",)}, ["--hosts", "not for ray", "mpirun"]),
        ("ray", {"extra": ("strategy=WIDE",)}, ["--pass", "strategy=WIDE", "STRICT_SPREAD"]),
        ("ray", {"extra": ("cpus=many",)}, ["--pass", "cpus=many", "cpus=N"]),
        ("mpirun", {"max_restarts": 1}, ["--max-restarts", "1", "not for mpirun", "ray, kubernetes"]),
        ("torchrun", {"wait": True}, ["--wait", "not for torchrun", "slurm, submitit"]),
        ("srun", {"requeue": True}, ["--requeue", "not for srun", "slurm, submitit"]),
        ("submitit", {"requeue": True}, ["--requeue", "--pass=timeout_min=60"]),
        ("local", {"image": "x"}, ["--image", "not for local", "kubernetes"]),
        ("ray", {"with_secret": True}, ["--with-secret", "not for ray"]),
        ("local", {"nodes": 2}, ["--nodes", "local"]),
        ("local", {"rendezvous": "redis://u:hush@h"}, ["--rendezvous", "local", "***"]),
    ],
)
def test_bad_input(name: str, options: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        ask(name, tmp_path, **options)
    for word in words:
        assert word in str(refused.value)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(("name", "program"), [("slurm", "sbatch"), ("srun", "srun"), ("mpirun", "mpirun")])
def test_a_missing_tool_says_what_to_install(name: str, program: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"{program}.*not on PATH.*Debian") as refused:
        ask(name, tmp_path / "w", dry_run=False)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "w").exists()


def test_a_job_that_is_in_the_rendezvous_keeps_its_name(tmp_path: Path) -> None:
    assert "/launch/night-7/job.conf" in ask("srun", tmp_path, rendezvous="redis://h/0?job=night-7")
    assert "=rediss://h/0?ca=x&job=n8\n" in ask("srun", tmp_path, rendezvous="rediss://h/0?ca=x", id="n8")


def test_passwords_are_not_shown() -> None:
    assert without_password("redis://:hush@h:1/0?job=a") == "redis://:***@h:1/0?job=a"
    assert without_password("file:///a@b:c/d") == "file:///a@b:c/d"


def test_what_was_submitted_is_kept_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPOTRAIN_TOKEN", SECRET)
    job = job_file.loads(f'name: "a" program: "t.py" cluster {{ workspace: "{tmp_path}" }}')
    made = submission(job, layout(job.cluster), LaunchOptions(id="x"), {})
    made.write()
    made.write()  # another node of the same torchrun
    assert job_file.load(made.folder / "job.conf") == job
    assert (made.folder / "token").read_text() == SECRET
    assert {path.name for path in made.folder.iterdir()} == {"job.conf", "token"}
    for path in (made.folder, *made.folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    other = job_file.loads(f'name: "b" program: "t.py" cluster {{ workspace: "{tmp_path}" }}')
    with pytest.raises(ConfigError, match=r"--id.*taken by another job"):
        submission(other, layout(other.cluster), LaunchOptions(id="x"), {}).write()
    monkeypatch.setenv("TOPOTRAIN_TOKEN", "5e5e")
    with pytest.raises(StoreError, match="TOPOTRAIN_TOKEN"):
        submission(job, layout(job.cluster), LaunchOptions(id="y"), {}).write()


def test_a_token_file_of_the_users_own_is_only_named(tmp_path: Path) -> None:
    job = job_file.loads(f'name: "a" program: "t.py" cluster {{ workspace: "{tmp_path}/w" }}')
    mine = tmp_path / "mine"
    mine.touch(0o600)
    mine.write_text(SECRET)
    made = submission(job, layout(job.cluster), LaunchOptions(id="x"), {"TOPOTRAIN_TOKEN_FILE": str(mine)})
    made.write()
    assert made.environ["TOPOTRAIN_TOKEN_FILE"] == str(mine)
    assert not (made.folder / "token").exists()


@pytest.mark.parametrize(
    ("said", "state", "code"),
    [
        ("JobId=1 JobName=x JobState=COMPLETED ExitCode=0:0", "COMPLETED", 0),
        ("JobId=1 JobName=x JobState=RUNNING ExitCode=0:0", "RUNNING", 1),
        ("JobId=1 JobName=x JobState=FAILED ExitCode=2:0", "FAILED", 2),
        ("JobId=1 JobName=x JobState=FAILED ExitCode=0:9", "FAILED", 137),
        ("JobId=1 JobName=x JobState=TIMEOUT ExitCode=0:0", "TIMEOUT", 1),
    ],
)
def test_the_state_of_a_slurm_job(
    said: str, state: str, code: int, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    asked = tmp_path / "scontrol"
    asked.write_text(f"#!/bin/sh\necho '{said}'\n")
    asked.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert slurm.query("1") == (state, code)
    asked.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n")
    assert slurm.query("1") == ("FORGOTTEN", 1)
    asked.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    assert slurm.query("1")[0] in slurm.QUIET_STATES
    monkeypatch.setattr(foreground_tool, "ANSWER_S", 0.05)
    asked.write_text("#!/bin/sh\nkill -STOP $$\n")
    assert slurm.query("1")[0] in slurm.QUIET_STATES
    assert slurm_requeue.requeue({"SLURM_JOB_ID": "7"}) == 124
    said = capsys.readouterr().err
    assert "`scontrol requeue 7` was ended (no answer within 0.05 s)" in said
    assert "the job is not queued again: no answer" in said


def in_front(folder: Path, **environ: str) -> Submission:
    """A submission with these variables, whose units meet in a folder."""
    job = job_file.loads(f'snapshot_s: 1 grace_s: 20 cluster {{ workspace: "{folder}" }}')
    made = submission(job, layout(job.cluster), LaunchOptions(id="j1"), {"TOPOTRAIN_TOKEN": SECRET})
    return replace(made, environ={**made.environ, **environ})


@pytest.mark.journey
def test_a_tool_in_front_gives_its_code(tmp_path: Path) -> None:
    ends = "import os; raise SystemExit(int(os.environ['A']))"
    killed = "import os; os.kill(os.getpid(), 9)"
    assert foreground_tool.run([sys.executable, "-c", killed], in_front(tmp_path)) == 137
    assert foreground_tool.run([sys.executable, "-c", ends], in_front(tmp_path, A="6")) == 6


@pytest.mark.journey
@pytest.mark.parametrize(
    ("number", "registered", "told"), [(2, True, "ended"), (15, False, "ended"), (15, True, "asked")]
)
def test_a_signal_ends_the_tool_after_the_units_have_saved(
    tmp_path: Path, number: int, registered: bool, told: str
) -> None:
    at, tell = in_front(tmp_path / "w"), tmp_path / "told"
    registry = Registry(open_store(at.rendezvous.partition("?")[0]))
    if registered:
        registry.add(JobRecord("j1", "job"))
    # As units do: they end by themselves when they are asked to in the store.
    stop = at.folder / "store" / "jobs+j1+stop"
    asked = f"[ -e {stop} ] && echo asked > {tell} && exit 143"
    child = f"trap 'echo ended > {tell}; exit 0' TERM; echo up; while :; do {asked}; sleep 0.05; done"
    code = f"""
from pathlib import Path
from tests.launch.launchers.test_submission import in_front
from topotrain.launch.launchers import foreground_tool
try:
    foreground_tool.run(["sh", "-c", {child!r}], in_front(Path({str(tmp_path / "w")!r})))
except foreground_tool.StopRequested as came:
    raise SystemExit(128 + came.number)
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TOPOTRAIN_TOKEN": SECRET}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environ)
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == b"up\n"
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert tell.read_text() == f"{told}\n"


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.conf").write_text(f'name: "a" cluster {{ {THREE} workspace: "w" }}')
    (tmp_path / "t.py").write_text("")

    def run(*words: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["launch", *words])
        return ended.value.code, *capsys.readouterr()

    _, out, _ = run("mpirun", "--dry-run", "--json", "--pass", "--oversubscribe", "job.conf", "t.py", "--dry-run")
    told = json.loads(out)
    assert (told["launcher"], told["units"], told["code"]) == ("mpirun", 3, 0)
    assert "--oversubscribe" in told["dry_run"]
    assert told["id"].startswith("a-")
    _, out, _ = run("local", "--dry-run", "job.conf", "t.py")
    assert [line.split(" --rank ")[1][0] for line in out.splitlines()] == ["0", "1", "2"]
    code, _, err = run("slrum", "job.conf", "t.py")
    assert code == 2 and all(name in err for name in LAUNCHERS)
    assert not (tmp_path / "w").exists()
