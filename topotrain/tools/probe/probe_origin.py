"""Differences of a probe from this machine, and from a named program.

A prediction of other machines needs no check. A prediction of this machine is as good as the probe is like it.
"""

from importlib.metadata import version
from pathlib import Path

from topotrain.launch.agent.worker_threads import allowed_cores
from topotrain.tools.diagnostics.environment_report import processor_name
from topotrain.tools.probe.probe_file import Probe


def unlike_this_machine(probe: Probe) -> str:
    """Return the differences between the probed machine and this one, in words.

    "": there are none.
    """
    here = {
        "cpu": (probe.machine.cpu, processor_name()),
        "cores": (str(probe.machine.cores), str(allowed_cores())),
        **{name: (probe.versions.get(name, "unknown"), version(name)) for name in ("torch", "topotrain")},
    }
    return ", ".join(f"{name} {there}, here {found}" for name, (there, found) in here.items() if there != found)


def is_of_other_file(probe: Probe, program: str) -> bool:
    """Whether a program has another file name than that of the probe.

    A probe has no folder of its program.
    """
    return bool(program) and Path(program).name != probe.program
