"""The same job on a real Ray cluster of three nodes, which stand on this machine in a sandbox of their own."""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from job_runner import PROGRAMS, JobRunner
from safetensors.torch import load_file
from seeds import soak_only
from slurm_cluster import Missing, Sandbox, add_forkserver, open_sandbox

pytestmark = pytest.mark.journey

ROOT = Path(__file__).parents[2]
THREE = "nworkers_per_group: 2 server_worker_separate: true"
TWO = "nworkers_per_group: 2 nservers_per_group: 2"
QUICK = {f"RAY_health_check_{what}": number for what, number in [("period_ms", "500"), ("failure_threshold", "4")]}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "TOPOTRAIN_TOKEN": "5e" * 32,
    "PYTHONPATH": str(ROOT),
}
WHERE = re.compile(r"unit (\d) is on \S+ \(Ray node (\w+)\)")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    pytest.importorskip("ray", reason="no ray: pip install 'topotrain[ray]'")
    folder = tmp_path_factory.mktemp("ray")
    ours = Path(tempfile.mkdtemp(prefix="tt-ray-"))  # for sockets, whose paths must be short
    try:
        with open_sandbox(folder) as here:
            here.environ.update(QUIET | QUICK, RAY_TMPDIR=str(ours))
            add_forkserver(here)  # the actors' units hear of it
            here.spawn(sys.executable, str(ROOT / "tests" / "support" / "ray_cluster.py"), str(folder), log="ray")
            here.wait_for("Ray", folder / "address", patience=120)
            yield here
    except Missing as missing:
        pytest.skip(str(missing))
    finally:
        shutil.rmtree(ours, ignore_errors=True)


def words(sandbox: Sandbox, cluster: str, program: str, *args: str, options: tuple[str, ...] = ()) -> list[str]:
    Path("job.conf").write_text(f'name: "job"\ncluster {{ {cluster} workspace: "job" }}\n')
    address = "--pass=address=" + (sandbox.folder / "address").read_text()
    launch = [sys.executable, "-m", "topotrain", "launch", "ray", address, "--pass=room=30", *options]
    return [*launch, "job.conf", str(PROGRAMS / program), *args]


def left(sandbox: Sandbox) -> str:
    """What of a job still runs in the sandbox; Ray calls an actor by its name."""
    return sandbox.left("topotrain", "Seat")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_three_units_on_three_nodes_end_with_the_bits_of_run(cluster: Sandbox, runner: JobRunner) -> None:
    done = cluster.run(*words(cluster, THREE, "small.py", options=("--pass=strategy=STRICT_SPREAD",)), cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert len({node for _, node in WHERE.findall(done.stderr)}) == 3, done.stderr
    assert "main says hello" in done.stdout
    final = load_file("job/final.safetensors")
    for key, value in runner.run(THREE, "small.py", name="run").final.items():
        assert torch.equal(final[key], value), key
    assert left(cluster) == ""


@soak_only
def test_ctrl_c_ends_all_and_leaves_nothing_in_the_cluster(cluster: Sandbox) -> None:
    command = words(cluster, TWO, "wrong.py", "endless", options=("--json",))
    with cluster.started(*command, cwd=Path.cwd()) as started:
        for line in started.output:
            if "training" in line:
                cluster.run("kill", "-INT", str(started.pid))
                break
        code, rest = started.end()
    assert code == 130, rest
    assert left(cluster) == ""


@soak_only
def test_a_node_that_is_lost_and_a_job_that_starts_again(cluster: Sandbox) -> None:
    """The last test of this cluster, which has only two nodes after it."""
    options = ("--max-restarts=1", "--pass=strategy=STRICT_SPREAD", "--json")
    where: dict[str, str] = {}
    command = words(cluster, TWO, "wrong.py", "waits once", str(Path.cwd() / "lived"), options=options)
    with cluster.started(*command, cwd=Path.cwd()) as started:
        said = []
        for line in started.output:
            said.append(line)
            where.update(WHERE.findall(line))
            if "the first life waits" in line:
                nodes = json.loads((cluster.folder / "nodes").read_text())
                kill = next(k for k, node in enumerate(nodes) if k and node.startswith(tuple(where.values())))
                (cluster.folder / f"kill-{kill}").touch()
        text = "".join(said)
        assert started.end()[0] == 0, text
    assert "is lost" in text
    assert "all units start again" in text
    assert load_file("job/final.safetensors")
    assert left(cluster) == ""
