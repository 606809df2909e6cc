"""A probe for a command that needs one and was given none."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from topotrain.tools.cli.performance.probe_command import stages

if TYPE_CHECKING:
    from topotrain.tools.probe.probe_file import Probe

PROBE_S = 20.0


def probe_of(
    program: str, args: Sequence[str], seconds: float = PROBE_S, quiet: bool = False, forkserver: str = ""
) -> "Probe":
    """Measure a program on this machine, and show how far that is. Raises ConfigError."""
    from topotrain.tools.probe.program_probe import ProbeRequest, measure

    with stages(quiet) as progress:
        return measure(ProbeRequest(program, tuple(args), seconds, forkserver), progress)


def check_model_of(probe: "Probe", program: str, args: Sequence[str], forkserver: str = "") -> None:
    """Run a program up to its first step, and check that a probe is of its model.

    Raises ConfigError.
    """
    from topotrain.tools.probe.program_probe import ProbeRequest, check_program_model

    with stages(quiet=False) as progress:
        check_program_model(probe, ProbeRequest(program, tuple(args), PROBE_S, forkserver), progress)
