"""The longest pause of the survivors when a worker of a synchronous group is killed with SIGKILL, against a restart.

Rule: the two kinds of jobs take turns, and differ in the script alone. In one a step has one backward, so that the
survivors repeat the step (in-place recovery). In the other it has two, so that the whole group restarts as in all jobs
before there was in-place recovery. A forkserver is running already, as for any restart. Worker 0/1 is killed behind its
50th step. The pauses are those of the job's report:
`others_waited_s`, from the last step of a survivor to its repeated one, and `waited_s`, from the loss to the first step
of the restarted group.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Row, Samples, row
from benchmarks.record import run_table
from benchmarks.sides import environment

NAME, TITLE, GOALS = "survivors", "The death of a worker in a synchronous group", ()

PROGRAM = Path(__file__).parent / "programs" / "mourner.py"
CLUSTERS = {
    "Sandblaster, 3 workers": "nworkers_per_group: 3 nservers_per_group: 2",
    "Downpour, 2 groups of 2 workers": "nworker_groups: 2 nworkers_per_group: 2 nservers_per_group: 2",
}
VICTIM = "worker 0/1"


def once(cluster: str, steps: int, backwards: int) -> dict[str, float]:
    """The incident of one job."""
    with tempfile.TemporaryDirectory() as folder:
        conf, report = Path(folder, "job.conf"), Path(folder, "report.json")
        conf.write_text(
            f'snapshot_s: 0 cluster {{ {cluster} server_worker_separate: true workspace: "{folder}/job" }}\n'
        )
        command = [sys.executable, "-m", "topotrain", "run", "--report", str(report), str(conf), str(PROGRAM)]
        with subprocess.Popen(
            [*command, str(steps), str(backwards), f"{folder}/job/trains"],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as job:
            _kill(Path(folder, "job"), job)
            said, _ = job.communicate(timeout=300)
        if job.returncode:
            raise RuntimeError(said.decode(errors="replace"))
        (incident,) = json.loads(report.read_text())["incidents"]
    return dict(incident)


def _kill(workspace: Path, job: subprocess.Popen[bytes]) -> None:
    """Kill the victim once the job trains."""
    while not Path(workspace, "trains").exists():
        if job.poll() is not None:
            return  # its output says why
        time.sleep(0.02)
    processes = workspace / "processes.json"
    entries = json.loads(processes.read_text())
    os.kill(next(entry["pid"] for entry in entries if VICTIM in entry["roles"]), signal.SIGKILL)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=400)


def measure(options: argparse.Namespace) -> Sequence[Row]:
    rows = []
    for name, cluster in CLUSTERS.items():
        kept, restarted, back = [], [], []
        for _ in range(options.rounds):
            incident = once(cluster, options.steps, 1)
            kept.append(incident["others_waited_s"])
            back.append(incident["waited_s"])
            restarted.append(once(cluster, options.steps, 2)["waited_s"])
        what = f"{name}, one of them killed"
        note = f"the dead worker trains again after {Samples(tuple(back)).figure.value:.2f} s"
        # The report does not tell the survivors of the group from the other groups.
        note += "; groups report steps four times a second" if "Downpour" in name else ""
        rows += [
            row("", f"{what}: pause of the survivors", Samples(tuple(kept)).figure, "s", "", note, "in place"),
            row("", f"{what}: pause of the group", Samples(tuple(restarted)).figure, "s", "", "", "group restarts"),
        ]
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
