"""`tt.notebook_launch`: runs a function of a notebook as the program of a job."""

import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from topotrain.config import job_file
from topotrain.config.job import ConfigError, Job
from topotrain.config.topology import layout
from topotrain.core.events import Event
from topotrain.launch.function_launcher import FunctionLauncher
from topotrain.tools.monitor.job_monitor import JobMonitor
from topotrain.tools.monitor.job_report import Report, story
from topotrain.tools.monitor.progress_display import progress
from topotrain.tools.monitor.result_tables import summary
from topotrain.tools.monitor.terminal import console
from topotrain.tools.recording.job_recorder import JobRecorder

_FILES = (".conf", ".yaml", ".yml")


class JobFailed(RuntimeError):
    """The job has failed. The text has the traceback of the first cause."""


def notebook_launch(
    function: Callable[[], object], job: str | Path | Mapping[str, Any] | Job, quiet: bool = False
) -> dict[str, Any]:
    """Run `function` in every worker of a job on this machine; return the report.

    The workers are forks of this process, so the function may use everything that the notebook has defined.

    Args:
        function: the training script as a function without arguments. Its changes stay in its worker.
        job: a job file, its text, a dict with its fields, or a `Job`. Its program does not count.
        quiet: no progress is shown, only what the main worker prints.

    Raises:
        ConfigError: the job is wrong, or this process must not be forked. Nothing was started.
        JobFailed: the function has raised in a worker, or the job has failed otherwise.
        KeyboardInterrupt: the job was interrupted, and no process of it is left.
    """
    if not callable(function):
        raise ConfigError("tt.notebook_launch", function, "must be a function without arguments, and not its result")
    name = getattr(function, "__qualname__", type(function).__qualname__)
    whole = replace(job_of(job), program=f"{name}()", args=())
    topology = layout(whole.cluster)
    report, terminal = Report(whole, topology), console()
    shown = progress(report, terminal, quiet)
    begun = False
    with JobRecorder() as recorder, ExitStack() as display:
        recorder.begin(whole, topology)
        recorder.lead(whole.resume, ())
        monitor = JobMonitor(shown, recorder)

        def on_event(event: Event) -> None:
            nonlocal begun
            if not begun:
                # Not before the first event: a display has threads, and the job's processes are forks of this one.
                begun = True
                display.enter_context(shown)
            monitor(event)

        outcome = FunctionLauncher(function, watch=recorder).start(whole, topology, on_event)
        recorder.end(outcome.code)
    if outcome.cause is not None:
        raise JobFailed(story(outcome.cause, whole, report.topology))
    if outcome.code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.code >= 128:
        # The user or a scheduler has ended this process, and not only the job in it.
        signal.raise_signal(outcome.code - 128)
    if outcome.code:
        raise JobFailed(f"the job ended with code {outcome.code}; its logs are in {whole.workspace}/logs")
    data = report.as_data(outcome)
    if not quiet:
        terminal.print(summary(data), soft_wrap=True)
    return data


def job_of(given: object) -> Job:
    """Return the job of a file, a text or a dictionary. Raises ConfigError."""
    if isinstance(given, Job):
        return given
    if isinstance(given, Mapping):
        return job_file.from_data(given)
    if not isinstance(given, str | Path):
        accepted = "must be a job file, its text, a dict with its fields, or a tt.Job"
        raise ConfigError("job", type(given).__name__, accepted)
    # A text has blocks or fields. A name of a file may not exist, and the error must say so.
    if isinstance(given, Path) or (given.endswith(_FILES) and "\n" not in given) or not {":", "{"} & set(given):
        return job_file.load(given)
    return job_file.loads(given, "the job")
