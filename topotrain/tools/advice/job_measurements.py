"""The measurements of a running job.

They are the speed of each worker, its waiting, and the layout. All is from the recording in its workspace, as
`JobHistory` adds it up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topotrain.config.job import Cluster, ConfigError
from topotrain.config.job_file import loads
from topotrain.tools.probe.probe_file import Probe, another_model

LEAST_S = 2.0
"""Seconds of steps from which on a rate says something."""
_GONE = frozenset({"dead", "away", "finished"})


@dataclass(frozen=True, slots=True)
class MeasuredWorker:
    """A worker of a running job.

    Attributes:
        group, index: of its address.
        samples_per_s, steps_per_s: over the last seconds.
        waiting_share: of its time, in which it waits for servers and other workers.
    """

    group: int
    index: int
    samples_per_s: float
    steps_per_s: float
    waiting_share: float

    @property
    def samples(self) -> float:
        """Samples in a step."""
        return self.samples_per_s / self.steps_per_s

    @property
    def compute_s(self) -> float:
        """Seconds of a step in which it does not wait."""
        return (1.0 - self.waiting_share) / self.steps_per_s


@dataclass(frozen=True, slots=True)
class JobMeasurement:
    """A running job.

    Attributes:
        cluster: its block.
        hosts: the number of its hosts.
        workers: those that train.
        away: groups that have left.
        parts: the parameters in the recording, and the number of elements of each that is known from it at least. A
            recording may have only some of them.
    """

    cluster: Cluster
    hosts: int
    workers: tuple[MeasuredWorker, ...]
    away: frozenset[int]
    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def samples_per_s(self) -> float:
        """Of the whole job."""
        return sum(worker.samples_per_s for worker in self.workers)


def measured(workspace: Path, option: str) -> JobMeasurement:
    """Return what a running job says about itself.

    Raises:
        ConfigError: it does not run, has no recording that can be read, or has not trained for long enough.
    """
    from contextlib import closing

    from topotrain.tools.recording.recorded_workspace import RecordedWorkspace

    with closing(RecordedWorkspace(workspace, option)) as recorded:
        summary, view = recorded.summary(), recorded.history.view()
    if summary["state"] != "running":
        raise ConfigError(option, str(workspace), "its job does not run: without --running its layouts are compared")
    return from_history(summary, view, option, str(workspace))


def from_history(summary: Mapping[str, Any], view: Mapping[str, Any], option: str, place: str) -> JobMeasurement:
    """Return the measurement of a summary and a view.

    Raises ConfigError where it is too early.
    """
    rates = {each["of"]: _steps_per_s(each["points"]) for each in view["series"] if each["metric"] == "samples_per_s"}
    addresses = {each["name"]: (each["group"], each["index"]) for each in view["processes"] if each["role"] == "worker"}
    found, away = [], set()
    for each in summary["workers"]:
        if each["state"] in _GONE:
            away.add(addresses[each["name"]][0])
            continue
        rate = rates.get(each["name"])
        if rate is None or not each["samples_per_s"] or each["waiting_share"] is None:
            accepted = f"{each['name']} has not trained for {LEAST_S:g} s yet: ask again in a moment"
            raise ConfigError(option, place, accepted)
        found.append(
            MeasuredWorker(*addresses[each["name"]], each["samples_per_s"], rate, min(0.99, each["waiting_share"]))
        )
    if not found:
        raise ConfigError(option, place, "no worker of its job trains")
    hosts = len({each["host"] for each in view["processes"]})
    present = {worker.group for worker in found}
    gone = frozenset(away - present)
    return JobMeasurement(_cluster(view, option, place), hosts, tuple(found), gone, _parts(view))


def check_probe_of(measurement: JobMeasurement, probe: Probe) -> None:
    """Check that a probe is of the model of a running job.

    The recording has names and sizes of parameters. Raises ConfigError.
    """
    known = {parameter.name: parameter.elements for parameter in probe.model}
    if any(elements > known.get(name, -1) for name, elements in measurement.parts.items()):
        raise another_model(probe.program, "PROGRAM")


def _parts(view: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for process in view["processes"]:
        for part in process.get("slices", ()):
            found[part["name"]] = max(found.get(part["name"], 0), part["first"] + part["count"])
    return found


def _cluster(view: Mapping[str, Any], option: str, place: str) -> Cluster:
    try:
        return loads(view["job"]["block"], place).cluster
    except ConfigError as error:
        raise ConfigError(option, place, f"the block of its recording cannot be used: {error}") from None


def _steps_per_s(points: list[list[Any]]) -> float | None:
    """Return the steps per second over the last ten seconds or so; None: too few."""
    if not points:
        return None
    at, step = points[-1][0], points[-1][1]
    earlier = [point for point in points if point[0] <= at - LEAST_S and point[1] < step]
    if not earlier:
        return None
    recent = [point for point in earlier if point[0] >= at - 5 * LEAST_S] or earlier[-1:]
    return float((step - recent[0][1]) / (at - recent[0][0]))
