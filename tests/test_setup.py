"""What `make setup` leaves behind, and what a start costs: nothing is compiled anew, and torch is imported once."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VENV, MAKEFILE = ROOT / ".venv", ROOT / "Makefile"
READY = VENV / ".ready"


def _elsewhere() -> str:
    """Why this environment is not the one that `make setup` makes."""
    if Path(sys.prefix).resolve() != VENV.resolve() or not READY.exists():
        return "not the environment of `make setup`"
    if READY.stat().st_mtime < MAKEFILE.stat().st_mtime:
        return "the Makefile is newer than the environment: `make setup` brings it up to date"
    return ""


ELSEWHERE = _elsewhere()


@pytest.mark.skipif(bool(ELSEWHERE), reason=ELSEWHERE)
@pytest.mark.parametrize(
    "name",
    [
        "torch",
        "torch.nn.modules.module",
        "torch._dynamo",
        "numpy",
        "typer",
        "rich.console",
        "safetensors.torch",
        "google.protobuf.message",
        "topotrain",
    ],
)
def test_bytecode_is_there_before_anything_is_imported(name: str) -> None:
    """Also on a machine with PYTHONDONTWRITEBYTECODE, where each process would compile the file anew."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.cached is not None
    assert Path(spec.cached).exists(), f"{spec.origin} is compiled by every process that imports it"


def test_setup_compiles_and_help_names_the_default_of_jobs() -> None:
    """In any environment, also under `make test JOBS=2`: what make would do says so."""
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "JOBS")}
    for target, extra in (("setup", "dev"), ("run", "examples")):  # `make run` alone installs no more than that
        words = ["make", "--dry-run", "--always-make", target, "VENV=/nowhere/.venv"]
        done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        (install,) = [line for line in done.stdout.splitlines() if "-e '.[" in line and "echo" not in line]
        assert "--compile-bytecode" in install and f"-e '.[{extra}]'" in install
        assert re.search(r"-m compileall .*\btopotrain\b", done.stdout)
    told = subprocess.run(["make", "help"], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300).stdout
    (jobs,) = re.findall(r"^JOBS +\?= (\d+)$", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert f"JOBS={jobs} files at a time" in told


@pytest.mark.journey
def test_torch_is_imported_by_the_forkserver_alone(tmp_path: Path) -> None:
    workspace = tmp_path / "job"
    cluster = f'nworkers_per_group: 2 server_worker_separate: true workspace: "{workspace}"'
    (tmp_path / "job.conf").write_text(f'name: "job" cluster {{ {cluster} }}\n')
    words = [sys.executable, "-m", "topotrain", "run", "job.conf", str(ROOT / "tests" / "programs" / "small.py")]
    environ = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    environ.pop("TOPOTRAIN_FORKSERVER", None)
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    logs = {path.stem: path.read_text() for path in [*(workspace / "logs").iterdir(), workspace / "run/forkserver.log"]}
    assert {"unit-0", "unit-2", "worker-0-0", "worker-0-1", "forkserver"} <= logs.keys()
    counts = {who: len(re.findall(r"(?m)\| +torch\._C$", text)) for who, text in logs.items()}
    assert {who for who, count in counts.items() if count} == {"forkserver"}
    assert counts["forkserver"] == 1
    assert "| torch._C\n" not in done.stderr


def test_no_two_test_files_share_a_name() -> None:
    """pytest refuses the second one of a process, and only the whole suite has both in one."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, times in names.items() if times > 1]
