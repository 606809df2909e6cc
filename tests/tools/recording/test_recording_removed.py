"""Without `topotrain.tools.recording` jobs run as before: a test masks it, as if its folder were deleted."""

from pathlib import Path

import pytest
from process_pool import run_without_package

ROOT = Path(__file__).parents[3]
USERS = {
    *("tools/job_recording.py", "tools/cli/jobs.py", "tools/cli/export_arguments.py"),
    *("tools/advice/job_measurements.py", "tools/advice/trial_runs.py"),
}
"""The files outside of the package that name it. They import it inside functions, or look whether it is there."""

PROGRAM = """
import importlib, pkgutil, sys
from pathlib import Path

masked = "topotrain.tools.recording"
at = Path("topotrain/tools/recording")
assert at.is_dir()
gone = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in at.rglob("*.py")}
assert masked in gone and len(gone) > 5
sys.modules.update(dict.fromkeys(gone))
for top in ("launch", "tools"):
    base = importlib.import_module(f"topotrain.{top}")
    for module in pkgutil.walk_packages(base.__path__, f"topotrain.{top}."):
        # A package beside it may be made of recordings.
        if module.name not in gone and not module.name.startswith(("topotrain.tools.dashboard", "topotrain.tools.exp")):
            importlib.import_module(module.name)

from topotrain.tools.cli import app

work, forkserver = sys.argv[1:]
conf = Path(work, "job.conf")
conf.write_text(f'cluster {{ nworkers_per_group: 2 workspace: "{work}/job" }}')
try:
    app.main(["run", "--quiet", "--forkserver", forkserver, str(conf), "tests/programs/steady.py", "--epochs", "1"])
except SystemExit as ended:
    assert not ended.code, ended.code
assert Path(work, "job", "final.safetensors").is_file()
assert not Path(work, "job", "events.jsonl").exists()
try:
    app.main(["watch", f"{work}/job", "--once"])
except SystemExit as ended:
    assert ended.code == 2, ended.code
"""


@pytest.mark.journey
def test_a_job_runs_without(warm_at: str, served_at: str, tmp_path: Path) -> None:
    code, out = run_without_package(warm_at, PROGRAM, str(tmp_path), served_at)
    assert code == 0, out
    assert "topotrain.tools.recording is not installed here" in out


def test_one_place_leads_there() -> None:
    root = ROOT / "topotrain"
    files = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if "topotrain.tools.recording" in path.read_text(encoding="utf-8")
    }
    outside = {
        file for file in files if not file.startswith(("tools/recording/", "tools/dashboard/", "tools/exporters/"))
    }
    assert outside == USERS
