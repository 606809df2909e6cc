"""A probe for a command: measured now, or given, with notes about it on stderr."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from topotrain.tools.monitor.terminal import progress_line, say

if TYPE_CHECKING:
    from topotrain.tools.probe.probe_file import Probe
    from topotrain.tools.probe.program_probe import ProgramProbe

PROBE_S = 20.0


@contextmanager
def _program_probe(
    program: str, args: Sequence[str], seconds: float, quiet: bool, forkserver: str
) -> "Iterator[ProgramProbe]":
    from topotrain.tools.probe.forked_processes import forked_processes
    from topotrain.tools.probe.program_probe import ProgramProbe

    with progress_line(quiet) as progress:
        progress.stage("measuring: torch is loaded")
        with forked_processes(forkserver) as processes:
            yield ProgramProbe(program, args, seconds, progress, processes)


def probe_of(
    program: str, args: Sequence[str], seconds: float = PROBE_S, quiet: bool = False, forkserver: str = ""
) -> "Probe":
    """Measure a program on this machine, and show how far that is. Raises ConfigError."""
    with _program_probe(program, args, seconds, quiet, forkserver) as made:
        return made.measure()


def check_model_of(probe: "Probe", program: str, args: Sequence[str], forkserver: str = "") -> None:
    """Run a program up to its first step, and check that a probe is of its model.

    Raises ConfigError.
    """
    with _program_probe(program, args, PROBE_S, False, forkserver) as made:
        made.check(probe)


def note_other_machine(probe: "Probe", file: Path) -> None:
    """Warn that a probe was made on another machine, or with other versions.

    A prediction of other machines needs no check. One of this machine is as good as the probe is like it.
    """
    differs = unlike_this_machine(probe)
    if differs:
        say(f"warning: {file} was not made here, so its figures may not hold: {differs}")


def unlike_this_machine(probe: "Probe") -> str:
    """Return how the probed machine differs from this one, in words; "": not at all."""
    from importlib.metadata import version

    from topotrain.launch.agent.worker_threads import allowed_cores
    from topotrain.tools.diagnostics.environment_report import processor_name

    here = {
        "cpu": (probe.machine.cpu, processor_name()),
        "cores": (str(probe.machine.cores), str(allowed_cores())),
        **{name: (probe.versions.get(name, "unknown"), version(name)) for name in ("torch", "topotrain")},
    }
    return ", ".join(f"{name} {there}, here {found}" for name, (there, found) in here.items() if there != found)
