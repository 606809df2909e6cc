"""The runs that the page shows: where they are, and their curves and settings side by side."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from topotrain.config.job import ConfigError
from topotrain.tools.monitor.terminal import say
from topotrain.tools.recording.recording_file import FILE, RecordedWorkspace
from topotrain.tools.recording.run_progress import duration

T = TypeVar("T")

_POINTS = 300
_SUMS = frozenset({"samples_per_s", "bytes_per_s", "updates_per_s", "memory_bytes"})
"""Metrics of which a run has the sum of its processes. Of others it has the mean."""
_ABSENT = frozenset({"dead", "away", "finished", "starting", "restarts"})
_SETTING = re.compile(r"^\s*(\w+):\s*(.+)$", re.MULTILINE)
_OWN = frozenset({"workspace", "name"})
"""Settings in which all runs differ."""
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


@dataclass(frozen=True, slots=True)
class RunFigures:
    """A run as a comparison shows it. curves: also times and steps of their points."""

    running: bool
    state: str
    settings: Mapping[str, str]
    results: Mapping[str, str]
    curves: Mapping[str, Any]


def run_figures(view: Mapping[str, Any]) -> RunFigures:
    job = view["job"]
    return RunFigures(job["ended"] is None, _state(job), _settings(view), _results(job), _curves(view))


def compared(runs: Mapping[str, RunFigures]) -> list[dict[str, Any]]:
    """Return runs as the page shows them, each with its row of a table and its curves.

    runs: by name.
    """
    names = dict.fromkeys(key for run in runs.values() for key in run.settings)
    differing = [key for key in names if len({run.settings.get(key) for run in runs.values()}) > 1]
    shown = ("framework", "workers", "servers", *differing)
    return [
        {
            "name": name,
            "running": run.running,
            "columns": {"state": run.state, **{key: run.settings.get(key, "–") for key in shown}, **run.results},
            **run.curves,
        }
        for name, run in runs.items()
    ]


def _state(job: Mapping[str, Any]) -> str:
    if job["ended"] is None:
        return "lost" if job["lost"] else "running"
    return "ended" if job["code"] == 0 else f"failed, code {job['code']}"


def _results(job: Mapping[str, Any]) -> dict[str, str]:
    loss, rate = job["loss"], job["samples_per_s"]
    return {
        "step": f"{job['step'] or 0:,}",
        "loss": "–" if loss is None else f"{loss:.4g}",
        "samples/s": "–" if rate is None else f"{rate:,.0f}",
        "time": duration(job["elapsed"]),
    }


def _settings(view: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run was started with, as text, by the names that the job file has."""
    found: dict[str, list[str]] = {}
    for key, value in _SETTING.findall(view["job"].get("block", "")):
        found.setdefault(key, []).append(value.strip().strip('"'))
    roles = [process["role"] for process in view["processes"]]
    counts = {f"{role}s": str(roles.count(role)) for role in ("worker", "server")}
    own = {key: ", ".join(values) for key, values in found.items() if key not in _OWN}
    return {"framework": view["job"].get("framework", ""), **counts, **own}


def _curves(view: Mapping[str, Any]) -> dict[str, Any]:
    """Return the curves of a run at evenly spaced times; null: it has no figure there."""
    series = [each for each in view["series"] if each["points"]]
    ends = [each["points"][-1][0] for each in series]
    at = np.linspace(0.0, float(np.median(ends)), _POINTS + 1)[1:] if ends else np.empty(0)
    away = {name: _absences(entries, at) for name, entries in view["states"].items()}
    step, found = np.zeros(len(at)), dict[str, Any]()
    for metric in dict.fromkeys(each["metric"] for each in series):
        some = _of_processes([each for each in series if each["metric"] == metric])
        values = np.stack([_values(each, at, away) for each in some])
        if metric == "loss":
            step = np.max([_at(each["points"], 1, at) for each in some], axis=0)
        counts = np.count_nonzero(np.isfinite(values), axis=0)
        total = np.nansum(values, axis=0) / (1 if metric in _SUMS else np.maximum(counts, 1))
        found[metric] = [round(float(value), 6) if count else None for value, count in zip(total, counts)]
    return {"at": at.round(3).tolist(), "step": np.nan_to_num(step).tolist(), "curves": found}


def _of_processes(series: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the series of single processes, unless only the job or groups have some."""
    single = [each for each in series if not each["of"].startswith(("job", "group "))]
    return single or series


def _values(series: Mapping[str, Any], at: Any, away: Mapping[str, Any]) -> Any:
    """Return values of a series at these times; NaN: its process has none."""
    values = _at(series["points"], 2, at)
    if series["of"] in away:
        values[away[series["of"]]] = np.nan
    return values


def _at(points: Sequence[Any], part: int, at: Any) -> Any:
    """Return a part of the last points before these times; NaN: none."""
    known = np.array([np.nan, *(np.nan if point[part] is None else point[part] for point in points)], dtype=float)
    return known[np.searchsorted([point[0] for point in points], at, side="right")]


def _absences(entries: Sequence[Any], at: Any) -> Any:
    """Return at which of these times a process makes no figures."""
    absent = np.array([False, *(state in _ABSENT for _, state in entries)])
    changes = [time for time, _ in entries]
    # Its first and last figures are of the moments at which it begins and ends.
    return absent[np.searchsorted(changes, at, side="left")] & absent[np.searchsorted(changes, at, side="right")]
