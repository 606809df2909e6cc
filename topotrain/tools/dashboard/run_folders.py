"""The workspaces that the page shows: those that are named, and those in a folder of runs."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from topotrain.tools.recording.recording_file import FILE

_DEPTHS = ("*", "*/*")
"""Where below a folder of runs their workspaces are looked for."""


def runs_of(folders: Iterable[Path]) -> list[Path]:
    """Return the workspaces that these folders are, or have; a folder itself if it has none."""
    return list({os.path.abspath(run): run for folder in folders for run in _runs_in(folder)}.values())


def _runs_in(folder: Path) -> list[Path]:
    if (folder / FILE).exists():
        return [folder]
    return sorted(path.parent for depth in _DEPTHS for path in folder.glob(f"{depth}/{FILE}")) or [folder]


def named_runs(runs: Sequence[Path]) -> dict[str, Path]:
    """Return runs by the shortest names that tell them apart: their paths behind what they share."""
    shared = os.path.commonpath(os.path.abspath(run.parent) for run in runs)
    return {os.path.relpath(run, shared): run for run in runs}
