"""A job of Slurm that is queued again before its time limit, and goes on.

Slurm signals the batch script some time before the limit. The units then take a last snapshot, as after SIGTERM, and
end. If they have made progress since this start, the job is requeued. Its next start resumes from the newest snapshot
under a name of its own, so that no unit reads how this start has ended.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from topotrain.comm.store.store_url import parse
from topotrain.config import job_file
from topotrain.config.job import ConfigError, Job
from topotrain.extensions.checkpointing.checkpoint_reader import FOLDER, name_of, numbers
from topotrain.launch.grace_period import grace
from topotrain.launch.launchers.foreground_tool import agreed, ask, ask_for_end, say
from topotrain.launch.launchers.submission import RENDEZVOUS_VARIABLE
from topotrain.launch.multinode.node_info import with_job
from topotrain.launch.recovery.resume_point import seal

COUNT_VARIABLE, ID_VARIABLE = "SLURM_RESTART_COUNT", "SLURM_JOB_ID"
RESUME = ("--set", "resume=true")
"""The words for a unit of a start that goes on."""
MARGIN_S = 30
"""Seconds for a step, the end of the processes and the requeue, besides those for the last snapshot."""
ENDED_BY_SIGTERM = 143


def check(job: Job) -> None:
    """Raise ConfigError for a job that could not go on after it was requeued."""
    if not grace(job, signal.SIGTERM):
        accepted = "needs snapshots, which this job does not take: set snapshot_s, and grace_s above 0"
        raise ConfigError("--requeue", True, accepted)


def notice_s(job: Job) -> int:
    """Return how many seconds before the time limit the job is to be signalled."""
    return int(grace(job, signal.SIGTERM)) + MARGIN_S


@dataclass(frozen=True, slots=True)
class RequeuedStart:
    """One start of a job that may be requeued.

    environ: the environment of its units. workspace: of the job. before: the newest snapshot when this start began.
    words: the additional words of a unit.
    """

    environ: Mapping[str, str] = field(repr=False)
    workspace: Path
    before: str
    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, job: Job, environ: Mapping[str, str]) -> "RequeuedStart":
        """Return the start of this process with its environment. Raises StoreError."""
        workspace, count = Path(job.workspace), environ.get(COUNT_VARIABLE, "0")
        if count == "0":
            return cls(environ, workspace, newest(workspace))
        url = environ[RENDEZVOUS_VARIABLE]
        again = {**environ, RENDEZVOUS_VARIABLE: with_job(url, f"{parse(url).job}.life-{count}")}
        return cls(again, workspace, newest(workspace), RESUME)

    def ask_for_end(self) -> bool:
        """Ask the units to save and to end; return whether they can be asked."""
        # Over the store and not by a signal, which would also reach the processes that a script starts.
        return ask_for_end(self.environ[RENDEZVOUS_VARIABLE], self.environ)

    def agreed_code(self, code: int) -> int:
        """Return the code on which the units have agreed, which have ended with this one."""
        return agreed(self.environ[RENDEZVOUS_VARIABLE], code, self.environ)

    def goes_on(self, code: int) -> bool:
        """Return whether to requeue the job when the units have agreed on this code."""
        if code != ENDED_BY_SIGTERM:
            return False
        # Otherwise a job that never comes to its first snapshot would be requeued for ever.
        progress = newest(self.workspace) != self.before
        if not progress:
            say("the job is not queued again: it has taken no snapshot since it was started")
        return progress


def newest(workspace: Path) -> str:
    """Return a hash that identifies the newest snapshot of a workspace; "" for none."""
    folder = workspace / FOLDER
    # Its files are not read: a large snapshot would take too long, and the next start verifies it.
    found = numbers(folder)
    return seal(str(folder / name_of(found[-1]))) if found else ""


def requeue(environ: Mapping[str, str]) -> int:
    """Queue this job again; return the exit code of Slurm's command."""
    say("the time limit is near: the job is queued again, and goes on from its last snapshot")
    done = ask(["scontrol", "requeue", environ[ID_VARIABLE]])
    if done.returncode:
        say(f"the job is not queued again: {done.stderr.strip()}")
    return done.returncode


class BatchStep:
    """The step of a batch script, and the signals to the script.

    start: this start of the job. words: the command of the step.
    """

    def __init__(self, start: RequeuedStart, words: Sequence[str]) -> None:
        self._start, self._near = start, threading.Event()
        signal.signal(signal.SIGUSR1, self._on_limit)
        # A session of its own: what is sent to the script's group does not reach it.
        self._process = subprocess.Popen(
            [*words, *start.words], env=start.environ, stdin=subprocess.DEVNULL, start_new_session=True
        )
        signal.signal(signal.SIGTERM, self._on_stop)

    @property
    def near(self) -> bool:
        """Whether the time limit is near."""
        return self._near.is_set()

    def run(self) -> int:
        """Wait for the end of the step; return its exit code."""
        # A thread: a signal handler must not wait for a store.
        threading.Thread(target=self._ask, name="time limit", daemon=True).start()
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _ask(self) -> None:
        self._near.wait()
        if not self._start.ask_for_end():
            self._process.terminate()

    def _on_limit(self, number: int, frame: FrameType | None) -> None:
        self._near.set()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._process.terminate()


def main(conf: str, *words: str) -> int:
    """Run the step of a batch script; requeue the job if its time is up.

    conf: the job file of the submission. words: the command of the step. Returns the exit code.
    """
    start = RequeuedStart.of(job_file.load(conf), os.environ)
    step = BatchStep(start, words)
    code = start.agreed_code(step.run())
    return requeue(os.environ) if step.near and start.goes_on(code) else code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
