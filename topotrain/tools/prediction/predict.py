"""Predict a job on certain machines from a probe."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from topotrain.config.job import ConfigError, Job
from topotrain.core.profiling.spans import ProcessSpans, Span, to_json
from topotrain.tools.monitor import trace_export
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.prediction import Prediction
from topotrain.tools.prediction.rehearsable import MOST_PROCESSES, check, planned_memory, processes_of
from topotrain.tools.prediction.rehearsal import Rehearsal, Stepped
from topotrain.tools.prediction.rehearsed_worker import optimizer_class
from topotrain.tools.prediction.speed_bounds import speed_bound
from topotrain.tools.probe.probe_file import Probe


def predict(
    job: Job,
    probe: Probe,
    machines: Machines,
    seed: int = 0,
    trace: Path | None = None,
    stepped: Stepped = lambda made, most: None,
) -> Prediction:
    """Predict a job.

    Args:
        job: its program is not run.
        probe: of the program and a machine.
        machines: that the job is to run on.
        seed: of the random draws.
        trace: a file for the spans of one step.
        stepped: is called at each step of a rehearsal.

    Raises:
        ConfigError: the job does not fit the machines, or has something that cannot be predicted.
        OSError: the trace cannot be written.
    """
    # As the job is after its start: all groups are there, and have warmed up.
    job, machines = replace(job, warmup_steps=0, start_groups=0), machines.with_job(job)
    topology = machines.topology(job, probe.transports["tcp"].mbit)
    check(job, topology)
    optimizer_class(probe)
    # First: a job that does not fit need not be rehearsed.
    memory = planned_memory(job, probe, machines, topology)
    if processes_of(topology) > MOST_PROCESSES:
        bound = speed_bound(job, topology, machines, probe)
        accepted = (
            f"must be at most {MOST_PROCESSES} to be rehearsed. By arithmetic this job makes at most "
            f"{bound.samples_per_s:,.4g} samples per second: {bound.limit}"
        )
        raise ConfigError("workers and servers", processes_of(topology), accepted)
    try:
        rehearsal = Rehearsal(job, topology, probe, machines, seed, trace is not None, stepped)
        rehearsal.run()
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        accepted = "this machine has too little memory to rehearse a job with a model of this size"
        raise ConfigError("--probe", None, accepted) from None
    predicted = rehearsal.prediction(memory)
    if trace is not None:
        _write_trace(rehearsal, trace)
    return predicted


def _write_trace(rehearsal: Rehearsal, path: Path) -> None:
    spans: dict[tuple[str, int, int], list[Span]] = defaultdict(list)
    names: dict[tuple[str, int, int], str] = {}
    for me, recorder in rehearsal.recorders.items():
        process = rehearsal.hosts.process_of(me)
        names.setdefault(process, str(me))
        spans[process].extend(recorder.kept())
    with TemporaryDirectory() as folder:
        # As the processes of a job write them, so that both traces are made alike.
        for pid, (process, name) in enumerate(names.items(), 1):
            made = ProcessSpans(name, pid, tuple(spans[process]))
            (Path(folder) / f"{pid}.json").write_text(to_json(made), encoding="utf-8")
        trace_export.write(trace_export.collect(Path(folder)), path)
