"""The options `--log` and `--metrics`, for figures in other tools."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topotrain.config.job import ConfigError, Job
from topotrain.tools.cli.job_arguments import check_writable

if TYPE_CHECKING:
    from topotrain.tools.exporters.job_exports import JobExports

_PACKAGES = ("topotrain.tools.exporters", "topotrain.tools.recording")

Logs = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="KIND",
        help="Write the curves: tensorboard[:DIR], jsonl[:FILE], or python:MODULE:CLASS for a tracker; repeatable.",
    ),
]
Metrics = Annotated[
    str,
    typer.Option("--metrics", metavar="PORT", help="Serve metrics for Prometheus on this machine, or at ADDRESS:PORT."),
]


@contextmanager
def exports_of(job: Job, logs: Sequence[str], metrics: str) -> "Iterator[JobExports | None]":
    """Yield the exports that a user asks for, or None. Raises ConfigError."""
    if not logs and not metrics:
        yield None
        return
    for package in _PACKAGES:
        if find_spec(package) is None:
            option, value = ("--log", logs[0]) if logs else ("--metrics", metrics)
            raise ConfigError(option, value, f"needs {package}, which this installation does not have")
    for value in logs:
        kind, _, file = value.partition(":")
        if kind == "jsonl" and file:
            check_writable("--log", Path(file))
    from topotrain.tools.exporters.job_exports import JobExports

    exports = JobExports(job, logs, metrics, os.environ)
    try:
        yield exports
    finally:
        exports.close()
