"""The command `topotrain probe`, and the probe of other commands."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from topotrain.config.job import ConfigError
from topotrain.tools.amounts import seconds
from topotrain.tools.cli import job_arguments as arguments
from topotrain.tools.cli.job_arguments import BadInput, check_program, check_writable, writing
from topotrain.tools.monitor.terminal import progress_line

if TYPE_CHECKING:
    from topotrain.tools.probe.probe_file import Probe
    from topotrain.tools.probe.program_probe import ProgramProbe

PROBE_S = 20.0
LEAST_S = 10.0
"""A shorter probe would measure the start of torch."""


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


def probe(
    program: arguments.Program = None,
    args: arguments.Args = None,
    duration: Annotated[
        str, Option("--seconds", metavar="TIME", help="What the measurement may take, about; at least 10.")
    ] = "30",
    out: Annotated[Path, Option(metavar="FILE", help="Where the probe is written.")] = Path("probe.json"),
    as_json: Annotated[bool, Option("--json", help="Print the probe as JSON on stdout, too.")] = False,
    quiet: arguments.Quiet = False,
    forkserver: arguments.Forkserver = "",
) -> None:
    """Measure a program on this machine, for `predict` and `advise`.

    The script runs unchanged, as plain Python, for some of its steps. Besides there are a job of one worker and one
    server, and two processes that exchange messages.

    Example:
      topotrain probe --seconds 20 --out probe.json examples/digits.py --epochs 100
    """
    if not program:
        raise BadInput("no program: give a training script, or -m MODULE")
    check_program(program)
    check_writable("--out", out)
    wanted_s = seconds("--seconds", duration)
    if wanted_s < LEAST_S:
        raise ConfigError("--seconds", wanted_s, f"must be a number >= {LEAST_S:g}")
    began = time.monotonic()
    found = probe_of(program, args or (), wanted_s, quiet, forkserver)
    text = found.to_json()
    with writing("", out):
        out.write_text(text, encoding="utf-8")
    if as_json:
        print(text, end="")
    elif not quiet:
        print(summary(found))
    if not quiet:
        print(f"probe: {out}, measured in {time.monotonic() - began:.0f} s", file=sys.stderr)


def summary(probe: "Probe") -> str:
    batch, optimizer, kernels = probe.batch, probe.optimizer, probe.kernels
    elements = sum(parameter.elements for parameter in probe.model)
    line = f", {batch.fixed_s * 1e3:.2f} + {batch.per_sample_s * 1e3:.4f} ms per sample" if batch.per_sample_s else ""
    rows = [
        f"{probe.program}: {len(probe.model)} parameters with {elements:,} elements, {optimizer.name}",
        f"machine: {probe.machine.cpu}, {probe.machine.cores} cores, {probe.machine.memory_bytes / 1e9:.1f} GB",
        f"batch of {batch.size}: forward {_ms(batch.forward_s)}, backward {_ms(batch.backward_s)}, "
        f"the rest {_ms(batch.other_s)}; optimizer {_ms(batch.optimizer_s)}{line} ({batch.steps} steps)",
        f"spread of a step: {probe.spread:.1%}",
        f"server: update {optimizer.fixed_s * 1e6:.1f} us and {optimizer.element_s * 1e9:.3f} ns per element, "
        f"sum {kernels.byte_s * 1e9:.3f} ns per byte, copy {kernels.copy_byte_s * 1e9:.3f} ns per byte, "
        f"message {probe.server_message_s * 1e6:.0f} us",
        f"worker: {probe.worker_step_s * 1e6:.0f} us in each step",
    ]
    for name, each in probe.transports.items():
        rows.append(
            f"{name}: a message {each.send_message_s * 1e6:.0f} + {each.receive_message_s * 1e6:.0f} us, "
            f"its bytes {each.send_byte_s * 1e9:.3f} + {each.receive_byte_s * 1e9:.3f} ns each, "
            f"{each.latency_s * 1e6:.0f} us on the way"
        )
    shared = ", ".join(f"{count} at once {factor:.2f} times slower" for count, factor in probe.sharing.items())
    rows.append(f"processes on this machine: {shared or 'not measured'}")
    rows.append(f"start of a job: {probe.start_s:.1f} s")
    return "\n".join(rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
