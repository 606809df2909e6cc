"""sbatch: runs the units as one batch job of Slurm.

The script contains all settings, so `--dry-run` prints what runs.
"""

import os
import shlex
import sys
import time
from pathlib import Path

from topotrain.config.job import ConfigError
from topotrain.config.private_files import write_text
from topotrain.launch.agent.pipes import log_tail
from topotrain.launch.agent.workspace import JOB_FILE
from topotrain.launch.launchers import foreground_tool, slurm_requeue, srun
from topotrain.launch.launchers.submission import LaunchResult, Submission

SCRIPT, OUTPUT = "job.sh", "slurm-%j.out"
LOOK_S, MOST_LOOK_S = 0.5, 30.0
QUIET_STATES = frozenset(
    {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "OUT OF SIGHT", "REQUEUED"}
)
"""A job in one of these states has not ended."""


def script(submission: Submission) -> str:
    """Return the batch script.

    Raises ConfigError for an extra word that is no option of sbatch.
    """
    for word in submission.options.extra:
        if not word.startswith("-"):
            raise ConfigError("--pass", word, "must be an option of sbatch, such as --partition=gpu")
    options = [
        f"--job-name={submission.job.name or submission.id}",
        f"--ntasks={submission.units}",
        *([f"--nodes={submission.options.nodes}"] if submission.options.nodes else []),
        *(["--nodelist=" + ",".join(submission.options.hosts)] if submission.options.hosts else []),
        f"--cpus-per-task={submission.processes}",
        f"--chdir={os.getcwd()}",
        f"--output={submission.folder / OUTPUT}",
        "--export=ALL",
        # Nothing is restarted unless the user asks for it: a later option wins.
        *(_requeue(submission) if submission.options.requeue else ["--no-requeue"]),
        *submission.options.extra,
    ]
    lines = ["#!/bin/sh", *(f"#SBATCH {_directive(option)}" for option in options)]
    words = srun.Srun().words(submission, inside=True)
    if submission.options.requeue:
        words = [sys.executable, "-m", slurm_requeue.__name__, str(submission.folder / JOB_FILE), *words]
    return "\n".join([*lines, "exec " + shlex.join(words), ""])


def _requeue(submission: Submission) -> list[str]:
    """Return the options of sbatch for a job that is requeued. Raises ConfigError."""
    slurm_requeue.check(submission.job)
    # B: the script alone, because the default of this signal would end a unit. The output of the next start follows
    # that of this one.
    return ["--requeue", f"--signal=B:USR1@{slurm_requeue.notice_s(submission.job)}", "--open-mode=append"]


def _directive(option: str) -> str:
    """Quote an option for sbatch."""
    # sbatch splits a line at spaces, and interprets double quotes like a shell.
    return '"' + option.replace("\\", "\\\\").replace('"', '\\"') + '"' if " " in option else option


def command(submission: Submission) -> str:
    """Return the batch script, and the variables that sbatch inherits."""
    return submission.show(script(submission))


def start(submission: Submission) -> LaunchResult:
    """Queue the script, and with `wait` follow it to its end. Raises ConfigError."""
    text = script(submission)
    sbatch = foreground_tool.find("sbatch", srun.INSTALL)
    submission.write()
    path = submission.folder / SCRIPT
    write_text(path, text)
    done = foreground_tool.ask([sbatch, "--parsable", str(path)], {**os.environ, **submission.environ})
    if done.returncode:
        raise ConfigError("sbatch", shlex.join(submission.options.extra), "was refused: " + done.stderr.strip())
    job = done.stdout.strip().partition(";")[0]  # the name of the cluster follows, where there are several
    said = {"job": job, "output": str(submission.folder / OUTPUT.replace("%j", job))}
    if not submission.options.wait:
        return LaunchResult(0, said)
    return LaunchResult(wait_for_end(job, Path(said["output"]), submission), said)


def wait_for_end(job: str, output: Path, submission: Submission) -> int:
    """Wait for the end of a batch job, and print its states to stderr.

    Returns the units' exit code. A signal cancels the job, and the result is 128 + its number.
    """
    shown, began = "", time.monotonic()
    try:
        with foreground_tool.interruptible():
            while True:
                state, code = query(job)
                if state != shown:
                    foreground_tool.say(f"Slurm job {job} is {state}")
                    shown = state
                if state not in QUIET_STATES:
                    break
                # The controller serves the whole cluster, and a job may run for days.
                time.sleep(min(MOST_LOOK_S, max(LOOK_S, (time.monotonic() - began) / 10)))
    except foreground_tool.StopRequested as came:
        done = foreground_tool.ask(["scancel", job])
        if done.returncode:
            foreground_tool.say(f"Slurm job {job} may go on: {done.stderr.strip()}")
        return 128 + came.number
    if code:
        print(log_tail(output), file=sys.stderr, flush=True)
    # A later start of a requeued job has another name in the store. Its script ends with the units' code itself.
    return code if submission.options.requeue else foreground_tool.agreed(submission.rendezvous, code)


def query(job: str) -> tuple[str, int]:
    """Return the state of a job, and its exit code (1 for an end without one)."""
    # Not the accounting database, which may not exist. The controller knows a job until minutes after its end.
    done = foreground_tool.ask(["scontrol", "show", "job", "--oneliner", job])
    if done.returncode:
        # The controller may be unavailable for a while, such as during its restart; the job continues.
        return ("FORGOTTEN", 1) if "Invalid job id" in done.stderr else ("OUT OF SIGHT", 0)
    words = dict(word.partition("=")[::2] for word in done.stdout.split())
    state = words.get("JobState", "FORGOTTEN")
    code, _, number = words.get("ExitCode", "0:0").partition(":")
    if state == "COMPLETED":
        return state, 0
    return state, int(code) or (128 + int(number) if int(number) else 1)
