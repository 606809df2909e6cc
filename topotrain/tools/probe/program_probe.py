"""Measure one program on this machine: stages of a probe, and their time.

Nothing else computes while something is measured. Only processes that start do so side by side.
"""

import math
import os
import platform
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from topotrain.config.job import Cluster, ConfigError, Job
from topotrain.config.topology import layout
from topotrain.launch.agent.worker_threads import allowed_cores, worker_threads
from topotrain.parallel.estimate.memory_check import memory_limits
from topotrain.tools.diagnostics.environment_report import processor_name
from topotrain.tools.monitor.progress.progress_line import ProgressLine
from topotrain.tools.probe.forked_processes import ForkedProcess, ForkedProcesses, ProcessEnded, forked_processes
from topotrain.tools.probe.probe_file import VERSION, Machine, Probe, ProbedParameter, parse_probe
from topotrain.tools.probe.small_job import run_small_job

LEAST_S = 10.0
"""A shorter probe would measure the start of torch."""
_MOST_STEPS = 120
_ALONE, _SHARED, _JOB = 0.25, 0.07, 0.08
"""Shares of the budget: the program alone, each number of copies, the steps of the small job."""
_PATIENCE = 4.0
"""A script may need so many times the budget for its first steps."""
_MOST_COPIES = 4
_MEMORY_SHARE = 0.5
"""Of the memory that a job may have, for the copies of a program."""
_MODULES = "topotrain.tools.probe"


@dataclass(frozen=True)
class ProbeRequest:
    """A request for the measurements of a program.

    Attributes:
        program: a script, or "-m MODULE".
        args: of the script.
        seconds: that the probe may take, about.
        forkserver: the socket of a running forkserver; "": the probe starts its own.
    """

    program: str
    args: tuple[str, ...] = ()
    seconds: float = 30.0
    forkserver: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds >= LEAST_S):
            raise ConfigError("--seconds", self.seconds, f"must be a number >= {LEAST_S:g}")


def measure(request: ProbeRequest, progress: ProgressLine) -> Probe:
    """Measure a program. No process is left, however this ends.

    Raises:
        ConfigError: the program never reaches `tt.prepare`, has no steps, or fails; or servers cannot train it.
        KeyboardInterrupt, SystemExit: Ctrl-C; the second during the small job.
    """
    began = time.monotonic()
    progress.stage("measuring: torch is loaded")
    with forked_processes(request.forkserver) as processes:
        stages = _Stages(request, progress, processes)
        loaded, transports = stages.messages()
        first, alone = stages.alone()
        sharing = stages.sharing(alone)
        progress.stage("measuring: a job of one worker and one server")
        seconds, update_s = _JOB * request.seconds, first["optimizer"]["fixed_s"]
        job = run_small_job(processes, len(alone["model"]), seconds, transports["shm"], update_s)
    versions = {"topotrain": version("topotrain"), "torch": version("torch"), "python": platform.python_version()}
    # As the file has it: what is measured is checked as what is read.
    return parse_probe(
        {
            "version": VERSION,
            "made_at": time.time(),
            "machine": asdict(_machine()),
            "versions": versions,
            "program": Path(request.program).name,
            "model": alone["model"],
            **{name: alone["full"][name] for name in ("batch", "spread")},
            **{name: first[name] for name in ("optimizer", "kernels")},
            "transports": transports,
            "sharing": sharing,
            **job,
            "start_s": loaded - began + job["start_s"] + first["seconds"],
        }
    )


def check_program_model(probe: Probe, request: ProbeRequest, progress: ProgressLine) -> None:
    """Run a program up to its first step, and check that a probe is of its model.

    Raises ConfigError: the probe is of another model, or the program makes no step.
    """
    progress.stage("measuring: the model of the program")
    with forked_processes(request.forkserver) as processes:
        model = _Stages(request, progress, processes).model()
    probe.check_model([ProbedParameter(**each) for each in model], request.program)


class _Stages:
    """The stages of a probe, and their processes."""

    def __init__(self, request: ProbeRequest, progress: ProgressLine, processes: ForkedProcesses) -> None:
        self._request, self._progress, self._processes = request, progress, processes
        self._cores = allowed_cores()
        self._made = 0

    def messages(self) -> tuple[float, dict[str, Any]]:
        """Return when torch was loaded, by `time.monotonic`, and the times of transports."""
        spec = {"folder": str(self._processes.folder)}
        try:
            with closing(self._processes.start(f"{_MODULES}.transport_timing:run", spec, "messages")) as process:
                process.answer(self._patience_s(0.0))
                loaded = time.monotonic()
                self._progress.stage("measuring: messages between two processes")
                return loaded, process.answer(self._patience_s(0.0))
        except (ProcessEnded, TimeoutError) as error:
            text = str(error) or "no answer in time"
            raise ConfigError("probe", None, f"a process that measures messages has ended: {text}") from None

    def model(self) -> list[dict[str, Any]]:
        """Return the parameters of the program, which is left behind its first step."""
        with closing(self._start(1)) as program:
            return list(self._answer(program)["model"])

    def alone(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the first step of the program, with the times of kernels, and its steps alone on the machine."""
        self._progress.stage("measuring: the program alone")
        with closing(self._start(1, kernels=True)) as program:
            first = self._answer(program)
            if first["ended"]:
                raise self._failed("made 1 step: a probe needs at least 3")
            try:
                found = self._steps([program], _ALONE, sizes=True)[0]
            except ConfigError:
                found = None
        if found is None:
            # Some scripts take batches of one size only.
            with closing(self._start(1)) as program:
                self._answer(program)
                found = self._steps([program], _ALONE)[0]
        if found["full"] is None or found["count"] < 3:
            raise self._failed(f"made {found['count']} steps: a probe needs at least 3")
        return first, found

    def sharing(self, alone: dict[str, Any]) -> dict[str, float]:
        """Return how much slower each of several copies of the program is."""
        counts = [count for count in (2, 2 * self._cores) if count <= _MOST_COPIES and _fits(alone, count)]
        found: dict[str, float] = {}
        with ExitStack() as stack:
            if counts:
                self._progress.stage(f"measuring: {max(counts)} copies of the program start")
            copies = [stack.enter_context(closing(self._start(max(counts)))) for _ in range(max(counts, default=0))]
            try:
                for copy in copies:
                    self._answer(copy)
                for count in sorted(set(counts)):
                    self._progress.stage(f"measuring: {count} copies of the program at once")
                    answers = self._steps(copies[:count], _SHARED)
                    if any(answer["full"] is None for answer in answers):
                        break
                    # Of means: processes that take turns on a core make most of their short steps undisturbed, and a
                    # median has none of the time in which they wait for their turn.
                    slower = fmean(answer["full"]["computing"] for answer in answers) / alone["full"]["computing"]
                    found[str(count)] = max(1.0, count / self._cores, slower)
                    if any(answer["ended"] for answer in answers):
                        break
            except ConfigError as error:
                # Some scripts hold a file or an address that only one process can have.
                why = f"copies of the program do not run at once, so cores count as shared evenly: {error}"
                self._progress.note(why)
        return found

    def _start(self, processes: int, kernels: bool = False) -> ForkedProcess:
        """Start the program with the threads of one of so many workers. kernels: it also times them."""
        self._made += 1
        program, args, threads = self._request.program, list(self._request.args), self._threads(processes)
        spec = {"program": program, "args": args, "threads": threads, "kernels": kernels}
        return self._processes.start(f"{_MODULES}.measured_program:run", spec, f"program-{self._made}")

    def _threads(self, processes: int) -> int:
        """Return the threads of each of so many workers here; 0: as the environment says."""
        job = Job(cluster=Cluster(nworkers_per_group=processes, server_worker_separate=True))
        return worker_threads(job, layout(job.cluster), 0, os.environ, self._cores)

    def _steps(self, copies: list[ForkedProcess], share: float, sizes: bool = False) -> list[dict[str, Any]]:
        """Let programs make steps at once for a share of the budget."""
        seconds, threads = share * self._request.seconds, self._threads(len(copies))
        most = _MOST_STEPS if len(copies) == 1 else 1 << 30
        for copy in copies:
            copy.order(steps=most, seconds=seconds, threads=threads, sizes=sizes)
        return [self._answer(copy, share) for copy in copies]

    def _answer(self, program: ForkedProcess, share: float = 0.0) -> dict[str, Any]:
        try:
            found = program.answer(self._patience_s(share))
        except ProcessEnded as error:
            raise self._failed(f"ended without a step: {error}") from None
        except TimeoutError:
            raise self._failed("takes too long for its first steps") from None
        if "failed" in found:
            raise self._failed(found["failed"])
        return found

    def _failed(self, why: str) -> ConfigError:
        return ConfigError("program", self._request.program, why)

    def _patience_s(self, share: float) -> float:
        """Return the seconds within which a stage with this share of the budget must have answered."""
        return (share + _PATIENCE) * self._request.seconds


def _fits(alone: dict[str, Any], count: int) -> bool:
    free = memory_limits().machine
    return free is None or int(alone["memory"]) * count <= _MEMORY_SHARE * free


def _machine() -> Machine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    system = f"{platform.system()} {platform.release().partition('-')[0]}"
    return Machine(processor_name(), allowed_cores(), memory, system)
