"""The options `--log` and `--metrics`, for figures in other tools."""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from topotrain.config.job import ConfigError, Job
from topotrain.tools.cli.job_arguments import check_writable

if TYPE_CHECKING:
    from topotrain.tools.exporters.job_exports import JobExports

Logs = Annotated[
    list[str] | None,
    Option(
        "--log",
        metavar="KIND",
        help="Write the curves: tensorboard[:DIR], jsonl[:FILE], or python:MODULE:CLASS for a tracker; repeatable.",
    ),
]
Metrics = Annotated[
    str, Option("--metrics", metavar="PORT", help="Serve metrics for Prometheus on this machine, or at ADDRESS:PORT.")
]


@contextmanager
def exports_of(
    job: Job | None, logs: Sequence[str] | None, metrics: str, rank: int = 0
) -> "Iterator[JobExports | None]":
    """Yield the exports that a user asks for, in unit 0, or None. Raises ConfigError.

    job: None: this unit was started without one.
    """
    # A launcher starts all units with the same words, so all units check them.
    if not words_for_unit(logs, metrics) or rank:
        yield None
        return
    logs = logs or ()
    if job is None:
        option, value = ("--log", logs[0]) if logs else ("--metrics", metrics)
        raise ConfigError(option, value, "needs JOB.conf, which unit 0 was started without")
    for value in logs:
        kind, _, file = value.partition(":")
        if kind == "jsonl" and file:
            check_writable("--log", Path(file))
        elif kind == "tensorboard" and file:
            _check_folder(value, Path(file))
    from topotrain.tools.exporters.job_exports import JobExports

    with closing(JobExports(job, logs, metrics, os.environ)) as exports:
        if exports.url:
            print(f"metrics: {exports.url}", file=sys.stderr, flush=True)
        yield exports


def words_for_unit(logs: Sequence[str] | None, metrics: str) -> tuple[str, ...]:
    """Return the same options as words for `topotrain unit`. Raises ConfigError."""
    logs = logs or ()
    if not logs and not metrics:
        return ()
    from topotrain.tools.exporters.job_exports import check_values

    check_values(logs, metrics)
    return (*(word for value in logs for word in ("--log", value)), *(("--metrics", metrics) if metrics else ()))


def _check_folder(value: str, folder: Path) -> None:
    """Check that a folder can be made and written.

    Nothing is left behind. Raises ConfigError.
    """
    missing = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        accepted = "must be tensorboard[:DIR] with a folder DIR that can be made and written"
        raise ConfigError("--log", value, f"{accepted} ({error.strerror})") from None
    finally:
        for each in missing:
            with suppress(OSError):
                each.rmdir()
