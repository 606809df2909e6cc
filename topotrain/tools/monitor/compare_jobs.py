"""Comparison of several cluster blocks with one program: table, picture and data.

The jobs run one after the other. All settings of all jobs are validated before the first one starts. Each job has its
own workspace below one folder. A failed job is marked in the table, and the others still run.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from topotrain.config.job import Job
from topotrain.config.private_files import make_folder, write_text
from topotrain.config.topology import Topology, layout
from topotrain.tools.monitor.job_report import JobResult
from topotrain.tools.monitor.loss_plot import draw
from topotrain.tools.monitor.monitored_run import complaining_of

PICTURE = "frameworks.png"
DATA = "compare.json"

INTERRUPTED = frozenset({130, 143})
"""Exit codes after which the user wants no further job to start."""


@dataclass(frozen=True, slots=True)
class ComparedJob:
    """One of the jobs: its job file, and its label in table and picture."""

    conf: str
    label: str
    job: Job
    topology: Topology


def entries(jobs: Sequence[tuple[str, Job]], out: Path) -> list[ComparedJob]:
    """Return the jobs by (conf path, job), each with a workspace below `out`.

    The folder has the name of the conf. Raises ConfigError.
    """
    found: list[ComparedJob] = []
    names = _distinct([Path(conf).stem for conf, _ in jobs])
    layouts = [layout(job.cluster) for _, job in jobs]
    # Without the addition in brackets, such as (asynchronous): a label in the picture must be short.
    kinds = [topology.framework.split(" (")[0] for topology in layouts]
    for (conf, job), name, topology, kind in zip(jobs, names, layouts, kinds, strict=True):
        label = kind if kinds.count(kind) == 1 else f"{kind} ({name})"
        cluster = replace(job.cluster, workspace=str(out / name))
        found.append(ComparedJob(conf, label, replace(job, cluster=cluster), topology))
    return found


def compare(
    results: Iterable[tuple[ComparedJob, JobResult]], out: Path, picture: bool = True
) -> tuple[int, list[dict[str, Any]]]:
    """Collect the results of jobs in order.

    The data are written to `out`, and the picture if asked for.
    Returns the first exit code that is not 0, and the rows. Raises OSError if `out` is not a folder.
    The picture needs matplotlib.
    """
    make_folder(out)
    rows: list[dict[str, Any]] = []
    for entry, result in results:
        rows.append(row(entry, result))
        # After its row: the data of the jobs so far is still written.
        if result.outcome.code in INTERRUPTED:
            break
    # After hours of training the table must be shown, even where the disk is full.
    with complaining_of(out / DATA):
        write_text(out / DATA, json.dumps({"jobs": rows}, indent=2) + "\n")
    if picture:
        curves = {str(row["label"]): row["curve"] for row in rows if row["curve"]}
        with complaining_of(out / PICTURE):
            draw(curves, out / PICTURE, "training loss over time")
    return next((int(row["code"]) for row in rows if row["code"]), 0), rows


def row(entry: ComparedJob, result: JobResult) -> dict[str, Any]:
    data = result.report.as_data(result.outcome)
    return {"label": entry.label, "conf": entry.conf, **data, "curve": result.report.curve()}


def _distinct(names: Sequence[str]) -> list[str]:
    """Return distinct names, by adding numbers to repeated ones."""
    taken: list[str] = []
    # Two files of one name in different folders must not share a workspace.
    for name in names:
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name}-{number}"
        taken.append(free)
    return taken
