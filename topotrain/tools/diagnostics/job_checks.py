"""Check on this machine whether a job can run, before it waits in a queue.

Every check is about this machine, now: a host of the job may be another one. Nothing is started, and no file is left.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from topotrain.config.job import ConfigError, Engine, Job
from topotrain.config.private_files import open_for_reading
from topotrain.config.python_module import find_module, module_of
from topotrain.config.topology import Topology
from topotrain.parallel.estimate.memory_check import COMMON, ITSELF, memory_limits
from topotrain.tools.diagnostics.environment_report import (
    SHARED_MEMORY,
    installed,
    own_version,
    shared_memory,
    torch_facts,
)
from topotrain.tools.diagnostics.finding import Finding, failed, ok, warning
from topotrain.tools.diagnostics.machine_checks import (
    host_findings,
    nearest,
    port_finding,
    rendezvous_findings,
    sharing_finding,
    workspace_findings,
)

SMALL_SHM_BYTES = 64 << 20
"""The size that containers have by default, in which loaders with worker processes fail."""
LEAST_TORCH = (2, 6)
LIBRARIES_NEEDED = ("numpy", "protobuf", "rich", "typer", "safetensors")


def findings(
    job: Job, topology: Topology, url: str, hosts: Sequence[str], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield the findings about a job that parses, one after another.

    Args:
        url: the rendezvous. Empty: the workspace.
        hosts: names of the machines, where they are known. Empty: this machine alone.

    Raises:
        StoreError: the URL is invalid.
    """
    yield ok("job file", topology.explain().splitlines()[0])
    if job.program:
        yield program_finding(job.program)
    yield from workspace_findings(Path(job.workspace))
    if len(hosts) > 1:
        yield sharing_finding(nearest(Path(job.workspace)))
    yield from rendezvous_findings(url, environ)
    yield from host_findings(url, hosts, environ)
    # One machine has its part of the units, and of a single machine that is all.
    units = -(-len(topology.units) // max(1, len(hosts)))
    largest = sorted((len(list(topology.processes(unit))) for unit in topology.units), reverse=True)[:units]
    yield port_finding(job.cluster.start_port, sum(largest))
    yield memory_finding(units, sum(largest), memory_limits().machine)
    yield shared_memory_finding(shared_memory())
    facts = torch_facts()
    yield version_finding(facts)
    yield gpu_finding(job, topology, facts)


def program_finding(program: str) -> Finding:
    module = module_of(program)
    try:
        path = Path(program if module is None else find_module(module))
        with open(open_for_reading(path), "rb") as file:  # bytes, because the script may name its encoding
            compile(file.read(), str(path), "exec", dont_inherit=True)
    except ConfigError as error:
        return failed(
            "program", str(error), "correct `program` of the job file, or go to the folder that has the module"
        )
    except (SyntaxError, ValueError) as error:
        return failed("program", f"{program} is not Python ({error})", "correct the script")
    except OSError as error:
        advice = "correct `program` of the job file, or go to the folder from which its path leads"
        return failed("program", f"{program} cannot be read ({error.strerror})", advice)
    return ok("program", f"{program} can be read and compiles")


def memory_finding(units: int, count: int, limit: int | None) -> Finding:
    # Processes of a unit are forks of one process, and share a part.
    needed = ITSELF * count - COMMON * (count - units)
    text = f"{count} processes take about {needed / 1e9:,.1f} GB before the model"
    if limit is None:
        return warning("memory", f"{text}; the size of this machine's memory is unknown", "compare with it")
    text += f", {limit / 1e9:,.1f} GB can be used here"
    if needed <= limit:
        return ok("memory", f"{text}; `topotrain plan JOB.conf PROGRAM` adds the model")
    return failed("memory", text, "use more machines or fewer processes")


def shared_memory_finding(found: Mapping[str, int] | None) -> Finding:
    name, advice = str(SHARED_MEMORY), "start the container with --shm-size=1g, or use num_workers=0"
    # Topotrain's shared memory is anonymous (memfd), so it counts as memory and not here.
    need = "loaders with num_workers above 0 need it; the job's own shared memory does not"
    if found is None:
        return warning(name, f"does not exist; {need}", advice)
    text = f"{found['size_bytes'] / 1e9:,.2f} GB, {found['free_bytes'] / 1e9:,.2f} GB free; {need}"
    small = found["free_bytes"] <= SMALL_SHM_BYTES
    return warning(name, text, advice) if small else ok(name, text)


def version_finding(facts: Mapping[str, Any]) -> Finding:
    python = ".".join(map(str, sys.version_info[:3]))
    if "error" in facts:
        return failed("versions", f"torch {facts['error']}", "install it again: pip install 'topotrain'")
    missing = [name for name in LIBRARIES_NEEDED if installed(name) is None]
    text = f"topotrain {own_version()}, Python {python}, torch {facts['version']}"
    if missing:
        return warning("versions", f"{text}; not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    numbers = tuple(int(part) for part in str(facts["version"]).split(".")[:2] if part.isdecimal())
    if numbers < LEAST_TORCH:
        return failed("versions", text, f"install torch {'.'.join(map(str, LEAST_TORCH))} or later")
    return ok("versions", f"{text}; they must be the same on all hosts")


def gpu_finding(job: Job, topology: Topology, facts: Mapping[str, Any]) -> Finding:
    gpus = [one for one in facts.get("gpus", ()) if "name" in one]
    broken = next((one["error"] for one in facts.get("gpus", ()) if "error" in one), "")
    there = f"torch sees {len(gpus)} here" + (f" ({broken})" if broken else "")
    advice = "run this check on a machine of the job, or correct the field"
    most = max((len(unit.workers) for unit in topology.units), default=0)
    # Worker number i of a unit takes gpu[i], cyclically.
    absent = sorted({number for number in job.gpu[:most] if number >= len(gpus)})
    if absent:
        return failed("GPUs", f"gpu names {', '.join(map(str, absent))}, {there}", advice)
    if job.cluster.engine is Engine.kNccl and not gpus:
        return failed("GPUs", f"engine kNccl needs GPUs, {there}", advice)
    if broken:
        return warning("GPUs", there, "correct the driver, or set CUDA_VISIBLE_DEVICES to an empty text")
    if job.gpu:
        return ok("GPUs", f"gpu names {', '.join(map(str, job.gpu))}, {there}")
    return ok("GPUs", f"the job names none, {there}")
