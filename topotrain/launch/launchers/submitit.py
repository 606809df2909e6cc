"""submitit: runs the units as the tasks of one submitit job on Slurm.

`submit` can be called directly with an executor of the user. No unit is restarted. With --requeue, submitit signals all
tasks before the time limit and calls `RequeuedUnit.checkpoint` in the first one, which lets submitit requeue the job.
"""

import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from topotrain.config import job_file
from topotrain.config.job import ConfigError
from topotrain.launch.agent.workspace import JOB_FILE
from topotrain.launch.launchers import foreground_tool, slurm, slurm_requeue, srun
from topotrain.launch.launchers.slurm_requeue import RequeuedStart
from topotrain.launch.launchers.submission import LaunchResult, Submission

INSTALL = "pip install 'topotrain[slurm]'"
FOLDER = "submitit"
MOST_REQUEUES = 1_000_000
"""submitit would allow three by default. A start without progress is not requeued."""
_RANK = "SLURM_PROCID"
_WAIT_S = 120.0


class UnitFailed(Exception):
    """The failure of a unit's task with exit code `code`, for submitit to see."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def unit(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the unit as one task. Raises UnitFailed."""
    return _code_of(subprocess.Popen(words, env={**os.environ, **environ}, stdin=subprocess.DEVNULL))


def _code_of(process: "subprocess.Popen[bytes]") -> int:
    code = process.wait()
    if code:
        raise UnitFailed(code if code > 0 else 128 - code)
    return code


class RequeuedUnit:
    """The function of a task of a job that is requeued before its time limit."""

    def __call__(self, conf: str, words: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run the unit with the job file `conf`. Raises UnitFailed."""
        environ = {**os.environ, **environ}
        self._start = RequeuedStart.of(job_file.load(conf), environ)
        with _signal_ignored(environ):
            self._process = subprocess.Popen(
                [*words, *self._start.words], env=self._start.environ, stdin=subprocess.DEVNULL
            )
        try:
            return _code_of(self._process)
        except UnitFailed as failed:
            if failed.code == slurm_requeue.ENDED_BY_SIGTERM and environ.get(_RANK) != "0":
                # A task that fails ends the others, and the first one may be about to requeue the job.
                threading.Event().wait(_WAIT_S)
            raise

    def checkpoint(self, conf: str, words: Sequence[str], environ: Mapping[str, str]) -> Any:
        """Let the units take a last snapshot and end; return what to submit next.

        submitit calls it in the first task when the time limit is near. None: the job is not requeued.
        """
        if not self._start.ask_for_end():
            self._process.terminate()
        # Not `Popen.wait`: this is in a signal handler, and the interrupted code waits there, with its lock.
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if ended is None or not self._start.goes_on(ended.si_status):
            return None
        helpers: Any = importlib.import_module("submitit.helpers")
        return helpers.DelayedSubmission(RequeuedUnit(), conf, words, environ)


@contextmanager
def _signal_ignored(environ: Mapping[str, str]) -> Iterator[None]:
    """Let processes that are started in this block ignore submitit's signal.

    It comes to all processes of the step, and would end those that do not handle it.
    """
    number = signal.Signals["SIG" + environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")]
    former = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, former)


def submit(executor: Any, submission: Submission) -> Any:
    """Submit all units of a job to `executor`; return submitit's Job.

    The executor is a submitit.AutoExecutor or SlurmExecutor. Its nodes times tasks per node must be the number of
    units. The job's folder is written first.
    """
    submission.write()
    words, environ = submission.command, dict(submission.environ)
    if submission.options.requeue:
        return executor.submit(RequeuedUnit(), str(submission.folder / JOB_FILE), words, environ)
    return executor.submit(unit, words, environ)


def parameters(submission: Submission) -> dict[str, Any]:
    """Return the arguments of `AutoExecutor.update_parameters`. Raises ConfigError."""
    nodes = submission.options.nodes or 1
    given: dict[str, Any] = {
        "name": submission.job.name or submission.id,
        "nodes": nodes,
        "tasks_per_node": submission.per_node(nodes),
        "cpus_per_task": submission.processes,
        # submitit limits a job to five minutes by default; here the limit is that of the partition.
        "timeout_min": None,
        "stderr_to_stdout": True,
        "slurm_srun_args": ["--kill-on-bad-exit=1", "--cpu-bind=none", "--mpi=none"],
        "slurm_additional_parameters": {"no_requeue": True},
    }
    if submission.options.requeue:
        slurm_requeue.check(submission.job)
        given["slurm_additional_parameters"] = {"requeue": True}
        given["slurm_signal_delay_s"] = slurm_requeue.notice_s(submission.job)
    if submission.options.hosts:
        given["slurm_additional_parameters"]["nodelist"] = ",".join(submission.options.hosts)
    for word in submission.options.extra:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError("--pass", word, "must be a parameter of submitit, such as timeout_min=60")
        given[name] = int(value) if value.isdecimal() else value
    if submission.options.requeue and not isinstance(given["timeout_min"], int):
        raise ConfigError("--requeue", True, "needs the time limit for submitit: --pass=timeout_min=60")
    return given


def command(submission: Submission) -> str:
    """Return a description of the submission."""
    # Not the batch script, which submitit writes when it submits.
    lines = [f"submitit.AutoExecutor({str(submission.folder / FOLDER)!r}, cluster='slurm')"]
    lines += [f"  {name} = {value!r}" for name, value in parameters(submission).items()]
    return submission.show("\n".join([*lines, f"  each task runs {' '.join(submission.command)}"]))


def start(submission: Submission) -> LaunchResult:
    """Queue the job, and with `wait` follow it to its end. Raises ConfigError."""
    given = parameters(submission)
    try:
        import submitit
    except ImportError:
        raise ConfigError("launcher", "submitit", f"is not installed: {INSTALL}") from None
    foreground_tool.find("sbatch", srun.INSTALL)
    most = {"slurm_max_num_timeout": MOST_REQUEUES} if submission.options.requeue else {}
    executor = submitit.AutoExecutor(submission.folder / FOLDER, cluster="slurm", slurm_python=sys.executable, **most)
    try:
        executor.update_parameters(**given)
    except (NameError, TypeError) as error:
        raise ConfigError("--pass", " ".join(submission.options.extra), str(error)) from None
    job = submit(executor, submission)
    said = {"job": job.job_id, "output": str(job.paths.stdout)}
    if not submission.options.wait:
        return LaunchResult(0, said)
    code = slurm.wait_for_end(job.job_id, job.paths.stdout, submission)
    return LaunchResult(code, said)
