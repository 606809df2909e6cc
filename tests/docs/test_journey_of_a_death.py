"""docs/journey.md against a traced run: the death of a worker passes the functions that the page names, in order.

A real job runs with a profiler in every process (`programs/tracing/sitecustomize.py`), and one of its workers is
killed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from journey_pages import check_order, stops_in

PAGE = Path(__file__).parents[2] / "docs" / "journey.md"
PROGRAMS = Path(__file__).parents[1] / "programs"
WORKER = "worker 1/0"
MOST_FILES = 17
"""Files of `launch` that handle the death, from the forkserver to the entry point of the new process."""
OBSERVERS = {
    f"launch/{name}.py"
    for name in (
        "console_output",
        "log_lines",
        "runtime/event_records",
        "runtime/host_reports",
        "runtime/process_resources",
    )
}
"""They show, record and count what happens, whatever it is."""

pytestmark = pytest.mark.journey


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The functions in the order of their first calls, such as "launch/run_loop.py:RunLoop._on_event"."""
    folder = tmp_path_factory.mktemp("death")
    records = folder / "records"
    records.mkdir()
    workspace = folder / "job"
    cluster = f'nworker_groups: 2 server_worker_separate: true workspace: "{workspace}"'
    conf = folder / "job.conf"
    conf.write_text(f'name: "job" on_failure: kContinue reduce: kSum\ncluster {{ {cluster} }}\n')
    traced = {"TRACE_FOLDER": str(records), "TRACE_WORKER": WORKER, "PYTHONPATH": str(PROGRAMS / "tracing")}
    command = [sys.executable, "-m", "topotrain", "run", "--quiet", str(conf), str(PROGRAMS / "mortal.py")]
    done = subprocess.run(
        [*command, str(workspace), WORKER, "1", "5", "back"],
        env={**os.environ, **traced},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for file in records.iterdir() for line in file.read_text().splitlines()]
    return [function for _, _, function in sorted(lines, key=lambda line: float(line[0]))]


@pytest.mark.parametrize("part", [0, 1], ids=["launcher", "server"])
def test_the_death_passes_the_stops_in_the_order_of_the_page(passed: list[str], part: int) -> None:
    _, _, section = PAGE.read_text(encoding="utf-8").partition("\n## The death of a worker")
    stops = stops_in(section.split("\n### On the server")[part])
    assert len(stops) >= 6
    functions = list(dict.fromkeys(f"{Path(where).stem}.{name}" for where, name in (f.split(":") for f in passed)))
    check_order(stops, functions, PAGE)


def test_the_death_of_a_worker_enters_few_files_of_the_launcher(passed: list[str]) -> None:
    start = next(at for at, name in enumerate(passed) if name.endswith(":run_worker"))
    files = {name.split(":")[0] for name in passed[: start + 1]}
    assert len({file for file in files if file.startswith("launch/")} - OBSERVERS) <= MOST_FILES
