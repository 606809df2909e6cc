"""The choice of a layout for `cluster { auto: true }`.

Before a job starts, the block is replaced by the layout in which this machine trains fastest.
"""

from dataclasses import replace

from topotrain.config.job import Job
from topotrain.tools.monitor.monitored_run import say
from topotrain.tools.monitor.progress.progress_line import progress_line

PROBE_S = 10.0


def chosen(job: Job, snapshot: str, quiet: bool = False, forkserver: str = "") -> Job:
    """Return the job with a layout. A job that has one is returned as it is.

    A job that resumes keeps the layout of its snapshot. snapshot: its folder, or "". quiet: nothing is shown.
    forkserver: one that runs, or "".

    Raises:
        ConfigError: the program cannot be measured, or no layout fits.
    """
    if not job.cluster.auto:
        return job
    if snapshot:
        return _as_before(job, snapshot)
    from topotrain.tools.advice.automatic_layout import choose
    from topotrain.tools.cli.performance.measured_probe import probe_of

    probe = probe_of(job.program, job.args, PROBE_S, quiet, forkserver)
    with progress_line(quiet) as line:
        found = choose(job, probe, show=line.show)
    for text in () if quiet else found.explain().splitlines():
        say(text)
    return found.job


def _as_before(job: Job, snapshot: str) -> Job:
    """Return the job with the layout of a snapshot."""
    from pathlib import Path

    from topotrain.tools.advice.auto_rules import LAYOUT_FIELDS
    from topotrain.tools.cli.job_arguments import snapshot_job

    former = snapshot_job(Path(snapshot))[0].cluster
    kept = {name: getattr(former, name) for name in LAYOUT_FIELDS}
    return replace(job, cluster=replace(job.cluster, auto=False, **kept))
