"""The workspaces that the page shows: those named, and those in a folder of runs."""

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TypeVar

from topotrain.config.job import ConfigError
from topotrain.tools.monitor.monitored_run import say
from topotrain.tools.recording.recorded_workspace import RecordedWorkspace
from topotrain.tools.recording.recording_file import FILE

T = TypeVar("T")

_DEPTHS = ("*", "*/*")
"""Where below a folder of runs their workspaces are looked for."""


def runs_of(folders: Iterable[Path]) -> list[Path]:
    """Return the workspaces that folders are or have; if none, the folder itself."""
    return list({os.path.abspath(run): run for folder in folders for run in _runs_in(folder)}.values())


def _runs_in(folder: Path) -> list[Path]:
    if (folder / FILE).exists():
        return [folder]
    return sorted(path.parent for depth in _DEPTHS for path in folder.glob(f"{depth}/{FILE}")) or [folder]


def named_runs(runs: Mapping[Path, T]) -> dict[str, T]:
    """Return what is known of runs by the shortest ends of paths that differ."""
    shared = os.path.commonpath(os.path.abspath(run.parent) for run in runs)
    return {os.path.relpath(run, shared): known for run, known in runs.items()}


def read_runs(runs: Iterable[Path], stack: ExitStack) -> dict[Path, RecordedWorkspace]:
    """Read runs; the stack closes their files.

    Those that cannot be read are named on stderr and left out. Raises ConfigError if that is all of them.
    """
    found, refused = {}, []
    for run in runs:
        try:
            found[run] = stack.enter_context(closing(RecordedWorkspace(run)))
        except ConfigError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    for why in refused:
        say(f"left out: {why}")
    return found


def add_new_runs(folders: Iterable[Path], runs: dict[Path, RecordedWorkspace], stack: ExitStack) -> None:
    """Add the runs that have begun since behind those that are known."""
    for run in runs_of(folders):
        if run not in runs:
            # It may have no header yet, and is looked at again.
            with suppress(ConfigError):
                runs[run] = stack.enter_context(closing(RecordedWorkspace(run)))
