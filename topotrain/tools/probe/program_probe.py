"""Measure one program on this machine: stages of a probe, and their time.

Nothing else computes while something is measured. Only processes that start do so side by side.
"""

import os
import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from topotrain.config.job import Cluster, ConfigError, Job
from topotrain.config.topology import layout
from topotrain.launch.agent.worker_threads import allowed_cores, worker_threads
from topotrain.parallel.estimate.memory_check import memory_limits
from topotrain.tools.diagnostics.environment_report import processor_name
from topotrain.tools.monitor.terminal import ProgressLine
from topotrain.tools.probe.forked_processes import ForkedProcess, ForkedProcesses, ProcessEnded
from topotrain.tools.probe.probe_file import VERSION, Machine, Probe, ProbedParameter, parse_probe
from topotrain.tools.probe.small_job import run_small_job

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
class ProgramProbe:
    """The measurements of a program."""

    program: str  # a script, or "-m MODULE"
    args: Sequence[str]
    seconds: float  # that the probe may take, about
    progress: ProgressLine
    processes: ForkedProcesses
    cores: int = field(default_factory=allowed_cores, init=False)

    def measure(self) -> Probe:
        """Measure the program.

        Raises:
            ConfigError: the program never reaches `tt.prepare`, has no steps, or fails; or servers cannot train it.
            KeyboardInterrupt, SystemExit: Ctrl-C; the second during the small job.
        """
        loaded, transports = self._messages()
        first, alone = self._alone()
        sharing = self._sharing(alone)
        self.progress.stage("measuring: a job of one worker and one server")
        update_s = first["optimizer"]["fixed_s"]
        job = run_small_job(self.processes, len(alone["model"]), _JOB * self.seconds, transports["shm"], update_s)
        versions = {"topotrain": version("topotrain"), "torch": version("torch"), "python": platform.python_version()}
        # As the file has it: what is measured is checked as what is read.
        return parse_probe(
            {
                "version": VERSION,
                "machine": asdict(_machine(self.cores)),
                "versions": versions,
                "program": Path(self.program).name,
                "model": alone["model"],
                **{name: alone["full"][name] for name in ("batch", "spread")},
                **{name: first[name] for name in ("optimizer", "kernels")},
                "transports": transports,
                "sharing": sharing,
                **job,
                "start_s": loaded - self.processes.began + job["start_s"] + first["seconds"],
            }
        )

    def check(self, probe: Probe) -> None:
        """Run the program up to its first step, and check that a probe is of its model.

        Raises ConfigError: the probe is of another model, or the program makes no step.
        """
        self.progress.stage("measuring: the model of the program")
        with closing(self._start("model")) as program:
            model = self._answer(program)["model"]
        probe.check_model([ProbedParameter(**each) for each in model], self.program)

    def _messages(self) -> tuple[float, dict[str, Any]]:
        """Return when torch was loaded, by `time.monotonic`, and the times of transports."""
        spec = {"folder": str(self.processes.folder)}
        try:
            with closing(self.processes.start(f"{_MODULES}.machine_timing:run", spec, "messages")) as process:
                process.answer(self._patience_s(0.0))
                loaded = time.monotonic()
                self.progress.stage("measuring: messages between two processes")
                return loaded, process.answer(self._patience_s(0.0))
        except (ProcessEnded, TimeoutError) as error:
            text = str(error) or "no answer in time"
            raise ConfigError("probe", None, f"a process that measures messages has ended: {text}") from None

    def _alone(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the program's first step, with times of kernels, and its steps alone."""
        self.progress.stage("measuring: the program alone")
        with closing(self._start("alone", kernels=True)) as program:
            first = self._answer(program)
            if first["ended"]:
                raise self._failed("made 1 step: a probe needs at least 3")
            try:
                found = self._steps([program], _ALONE, sizes=True)[0]
            except ConfigError:
                found = None
        if found is None:
            # Some scripts take batches of one size only.
            with closing(self._start("alone-again")) as program:
                self._answer(program)
                found = self._steps([program], _ALONE)[0]
        if found["full"] is None or found["count"] < 3:
            raise self._failed(f"made {found['count']} steps: a probe needs at least 3")
        return first, found

    def _sharing(self, alone: dict[str, Any]) -> dict[str, float]:
        """Return how much slower each of several copies of the program is."""
        counts = [count for count in (2, 2 * self.cores) if count <= _MOST_COPIES and _fits(alone, count)]
        found: dict[str, float] = {}
        with ExitStack() as stack:
            if counts:
                self.progress.stage(f"measuring: {max(counts)} copies of the program start")
            copies = [
                stack.enter_context(closing(self._start(f"copy-{number}", max(counts))))
                for number in range(max(counts, default=0))
            ]
            try:
                for copy in copies:
                    self._answer(copy)
                for count in sorted(set(counts)):
                    self.progress.stage(f"measuring: {count} copies of the program at once")
                    answers = self._steps(copies[:count], _SHARED)
                    if any(answer["full"] is None for answer in answers):
                        break
                    # Of means: processes that take turns on a core make most of their short steps undisturbed, and a
                    # median has none of the time in which they wait for their turn.
                    slower = fmean(answer["full"]["computing"] for answer in answers) / alone["full"]["computing"]
                    found[str(count)] = max(1.0, count / self.cores, slower)
                    if any(answer["ended"] for answer in answers):
                        break
            except ConfigError as error:
                # Some scripts hold a file or an address that only one process can have.
                why = f"copies of the program do not run at once, so cores count as shared evenly: {error}"
                self.progress.note(why)
        return found

    def _start(self, name: str, processes: int = 1, kernels: bool = False) -> ForkedProcess:
        """Start the program with a worker's threads. kernels: it also times them."""
        program, args, threads = self.program, list(self.args), self._threads(processes)
        spec = {"program": program, "args": args, "threads": threads, "kernels": kernels}
        return self.processes.start(f"{_MODULES}.measured_program:run", spec, name)

    def _threads(self, processes: int) -> int:
        """Return the threads of each of so many workers here; 0: as the environment says."""
        job = Job(cluster=Cluster(nworkers_per_group=processes, server_worker_separate=True))
        return worker_threads(job, layout(job.cluster), 0, os.environ, self.cores)

    def _steps(self, copies: list[ForkedProcess], share: float, sizes: bool = False) -> list[dict[str, Any]]:
        """Let programs make steps at once for a share of the budget."""
        seconds, threads = share * self.seconds, self._threads(len(copies))
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
        return ConfigError("program", self.program, why)

    def _patience_s(self, share: float) -> float:
        return (share + _PATIENCE) * self.seconds


def _fits(alone: dict[str, Any], count: int) -> bool:
    free = memory_limits().machine
    return free is None or int(alone["memory"]) * count <= _MEMORY_SHARE * free


def _machine(cores: int) -> Machine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(processor_name(), cores, memory)
