"""Measure one program on this machine: stages of a probe, and their time.

Nothing else computes while something is measured. Only processes that start do so side by side.
"""

import math
import os
import platform
import secrets
import shutil
import signal
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from topotrain.config.job import Cluster, ConfigError, Job
from topotrain.config.topology import layout
from topotrain.launch.agent import forkserver, temporary_folders
from topotrain.launch.agent.worker_threads import allowed_cores, worker_threads
from topotrain.parallel.estimate.memory_check import memory_limits
from topotrain.tools.diagnostics.environment_report import processor_name
from topotrain.tools.monitor.progress.progress_line import ProgressLine
from topotrain.tools.probe.probe_file import (
    VERSION,
    Machine,
    Probe,
    ProbedBatch,
    ProbedKernels,
    ProbedOptimizer,
    ProbedParameter,
    ProbedTransport,
)
from topotrain.tools.probe.probed_processes import ProbedProcess, ProbedProgram, ProcessEnded
from topotrain.tools.probe.small_job import SmallJob, SmallJobFailed, run_small_job

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
        KeyboardInterrupt: Ctrl-C, also during the small job.
    """
    with ExitStack() as stack:
        folder, lock = temporary_folders.make()
        stack.callback(os.close, lock)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        progress.stage("measuring: torch is loaded")
        began = time.monotonic()
        path = request.forkserver
        if not path:
            path = stack.enter_context(closing(forkserver.start(folder / "forkserver.log"))).path
        client = stack.enter_context(closing(forkserver.ForkserverClient(path)))
        return _Stages(request, progress, folder, path, client, began).measure()


def check_program_model(probe: Probe, request: ProbeRequest, progress: ProgressLine) -> None:
    """Run a program up to its first step, and check that a probe is of its model.

    Raises ConfigError: the probe is of another model, or the program makes no step.
    """
    with ExitStack() as stack:
        folder, lock = temporary_folders.make()
        stack.callback(os.close, lock)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        progress.stage("measuring: the model of the program")
        path = request.forkserver
        if not path:
            path = stack.enter_context(closing(forkserver.start(folder / "forkserver.log"))).path
        client = stack.enter_context(closing(forkserver.ForkserverClient(path)))
        stages = _Stages(request, progress, folder, path, client, time.monotonic())
        probe.check_model(stages.model(), request.program)


class _Stages:
    """The stages of one probe, in their order."""

    def __init__(
        self,
        request: ProbeRequest,
        progress: ProgressLine,
        folder: Path,
        path: str,
        client: forkserver.ForkserverClient,
        began: float,
    ) -> None:
        self._request, self._progress, self._folder = request, progress, folder
        self._path, self._client, self._began = path, client, began
        self._cores = allowed_cores()
        self._made = 0
        self._loaded_s = 0.0
        """Until the first process has answered: torch is loaded then."""

    def measure(self) -> Probe:
        """Go through all stages."""
        request = self._request
        transports = self._transports()
        program = self._start(1)
        alone, kernels, script_s = self._alone(program)
        sharing = self._sharing(alone)
        self._progress.stage("measuring: a job of one worker and one server")
        job = self._small_job(len(alone["model"]))
        optimizer, shm = ProbedOptimizer(**kernels["optimizer"]), transports["shm"]
        return Probe(
            version=VERSION,
            made_at=time.time(),
            machine=_machine(self._cores),
            versions={"topotrain": version("topotrain"), "torch": version("torch"), "python": _python()},
            program=Path(request.program).name,
            model=_model(alone),
            batch=_batch(alone),
            spread=alone["full"]["spread"],
            optimizer=optimizer,
            kernels=ProbedKernels(**kernels["kernels"]),
            transports=transports,
            worker_step_s=job.worker_step_s(shm),
            server_message_s=job.server_message_s(optimizer),
            sharing=sharing,
            start_s=self._loaded_s + job.start_s + script_s,
        )

    def model(self) -> tuple[ProbedParameter, ...]:
        """Return the parameters of the program, which is left behind its first step."""
        program = self._start(1)
        with closing(program):
            first = program.measured(self._until(0.0))
            if not first["ended"]:
                program.order(end=True)
            return _model(first)

    # --- the program ---------------------------------------------------------------------------------------------

    def _start(self, processes: int) -> ProbedProgram:
        """Start the program with the threads of one of so many workers."""
        self._made += 1
        log = self._folder / f"program-{self._made}.log"
        request = self._request
        return ProbedProgram(self._client, request.program, list(request.args), self._threads(processes), log)

    def _threads(self, processes: int) -> int:
        """Return the threads of each of so many workers here; 0: as the environment says."""
        job = Job(cluster=Cluster(nworkers_per_group=processes, server_worker_separate=True))
        return worker_threads(job, layout(job.cluster), 0, os.environ, self._cores)

    def _until(self, share: float) -> float:
        """Return when a stage with this share of the budget must have answered."""
        return time.monotonic() + (share + _PATIENCE) * self._request.seconds

    def _order(self, program: ProbedProgram, share: float, processes: int, sizes: bool = False) -> None:
        seconds = share * self._request.seconds
        most = _MOST_STEPS if processes == 1 else 1 << 30
        program.order(steps=most, seconds=seconds, threads=self._threads(processes), sizes=sizes)

    def _alone(self, program: ProbedProgram) -> tuple[dict[str, Any], dict[str, Any], float]:
        """Return steps of the program alone, times of kernels, and the script's start."""
        self._progress.stage("measuring: the program alone")
        first = program.measured(self._until(0.0))
        if first["ended"]:
            raise ConfigError("program", self._request.program, "made 1 step: a probe needs at least 3")
        # Before the steps: a script may come to its end.
        program.order(kernels=True)
        kernels = program.measured(self._until(0.0))
        self._order(program, _ALONE, 1, sizes=True)
        try:
            found = program.measured(self._until(_ALONE))
        except ConfigError:
            # Some scripts take batches of one size only.
            program.close()
            program = self._start(1)
            program.measured(self._until(0.0))
            self._order(program, _ALONE, 1)
            found = program.measured(self._until(_ALONE))
        program.order(end=True)
        program.close()
        if found["full"] is None or found["count"] < 3:
            raise ConfigError(
                "program", self._request.program, f"made {found['count']} steps: a probe needs at least 3"
            )
        return found, kernels, first["seconds"]

    def _sharing(self, alone: dict[str, Any]) -> dict[int, float]:
        """Return how much slower each of several copies of the program is."""
        counts = [count for count in (2, 2 * self._cores) if count <= _MOST_COPIES and self._fits(alone, count)]
        if not counts:
            return {}
        self._progress.stage(f"measuring: {max(counts)} copies of the program start")
        copies = [self._start(max(counts)) for _ in range(max(counts))]
        found: dict[int, float] = {}
        until = self._until(0.0)
        try:
            for copy in copies:
                copy.measured(until)
            for count in sorted(set(counts)):
                self._progress.stage(f"measuring: {count} copies of the program at once")
                for copy in copies[:count]:
                    self._order(copy, _SHARED, count)
                answers = [copy.measured(self._until(_SHARED)) for copy in copies[:count]]
                times = [answer["full"]["mean_computing"] for answer in answers if answer["full"] is not None]
                if len(times) < count:
                    break
                # Of means: processes that take turns on a core make most of their short steps undisturbed, and a
                # median has none of the time in which they wait for their turn.
                slower = fmean(times) / alone["full"]["mean_computing"]
                found[count] = max(1.0, count / self._cores, slower)
                if any(answer["ended"] for answer in answers):
                    break
        except ConfigError as error:
            # Some scripts hold a file or an address that only one process can have.
            self._progress.note(f"copies of the program do not run at once, so cores count as shared evenly: {error}")
        finally:
            for copy in copies:
                copy.order(end=True)
                copy.close()
        return found

    def _fits(self, alone: dict[str, Any], count: int) -> bool:
        free = memory_limits().machine
        return free is None or int(alone["memory"]) * count <= _MEMORY_SHARE * free

    # --- the product ---------------------------------------------------------------------------------------------

    def _transports(self) -> dict[str, ProbedTransport]:
        """Time the transports between two processes."""
        spec = {"token": secrets.token_hex(32), "folder": str(self._folder)}
        module = "topotrain.tools.probe.transport_timing"
        answering = ProbedProcess(self._client, f"{module}:answer", spec, self._folder / "answering.log")
        with closing(answering):
            urls = self._answer(answering)
            self._loaded_s = time.monotonic() - self._began
            self._progress.stage("measuring: messages between two processes")
            asking = ProbedProcess(self._client, f"{module}:ask", {**spec, "urls": urls}, self._folder / "asking.log")
            with closing(asking):
                return {name: ProbedTransport(**each) for name, each in self._answer(asking).items()}

    def _answer(self, process: ProbedProcess) -> dict[str, Any]:
        try:
            return process.answer(self._until(0.0))
        except (ProcessEnded, TimeoutError) as error:
            text = str(error) or "no answer in time"
            raise ConfigError("probe", None, f"a process that measures messages has ended: {text}") from None

    def _small_job(self, parameters: int) -> SmallJob:
        try:
            return run_small_job(self._folder, self._path, parameters, _JOB * self._request.seconds)
        except SmallJobFailed as failed:
            if failed.code == 128 + signal.SIGINT:
                raise KeyboardInterrupt from None
            if failed.code > 128:
                raise SystemExit(failed.code) from None
            raise ConfigError("probe", None, str(failed)) from None


def _computing(answer: dict[str, Any]) -> float:
    return float(answer["full"]["forward"] + answer["full"]["backward"])


def _model(alone: dict[str, Any]) -> tuple[ProbedParameter, ...]:
    return tuple(
        ProbedParameter(each["name"], tuple(each["shape"]), each["dtype"], each["trainable"], ready)
        for each, ready in zip(alone["model"], alone["ready"], strict=True)
    )


def _batch(alone: dict[str, Any]) -> ProbedBatch:
    """Return the times of a step, with a line through two sizes of batch."""
    full, small = alone["full"], alone["small"]
    fixed, per_sample = 0.0, 0.0
    if small is not None and small["samples"] < full["samples"]:
        part = small["forward"] + small["backward"]
        fixed, per_sample = computing_line(_computing(alone), full["samples"], part, small["samples"])
    return ProbedBatch(
        size=max(1, full["samples"]),
        forward_s=full["forward"],
        backward_s=full["backward"],
        other_s=full["other"],
        optimizer_s=full["optimizer"],
        fixed_s=fixed,
        per_sample_s=per_sample,
        steps=full["steps"],
        samples_per_epoch=alone["samples_per_epoch"],
    )


def computing_line(whole_s: float, samples: int, part_s: float, fewer: int) -> tuple[float, float]:
    """Return the seconds of any batch and of each sample, from two sizes of batch.

    The line goes through the larger batch. By chance a smaller one takes longer, or less than its share. So the line is
    kept from falling with more samples, and from falling below zero without any.
    """
    per_sample = min(max(0.0, (whole_s - part_s) / (samples - fewer)), whole_s / samples)
    return max(0.0, whole_s - per_sample * samples), per_sample


def _machine(cores: int) -> Machine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(processor_name(), cores, memory, f"{platform.system()} {platform.release().partition('-')[0]}")


def _python() -> str:
    return ".".join(map(str, sys.version_info[:3]))
