"""The memory of a predicted job, by its plan."""

from collections import defaultdict
from collections.abc import Sequence

from topotrain.config.job import ConfigError, Job
from topotrain.config.topology import Topology
from topotrain.tools.plan.layout_plan import PlannedSchema, plan
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.prediction import ProcessMemory
from topotrain.tools.probe.probe_file import Probe


def planned_memory(job: Job, probe: Probe, machines: Machines, topology: Topology) -> Sequence[ProcessMemory]:
    """Return the training state of each process.

    Raises:
        ConfigError: a host would need more than it has.
    """
    optimizer = probe.optimizer
    planned = plan(job, PlannedSchema(probe.schema(), optimizer.state_factor, optimizer.momentum, (optimizer.name,)))
    if machines.memory_bytes is not None:
        on_host: dict[int, int] = defaultdict(int)
        for process in planned.memory:
            on_host[topology.host_of(process.resident)] += process.total
        host, most = max(on_host.items(), key=lambda each: each[1])
        if most > machines.memory_bytes:
            needed = f"host {host} needs {most / 1e9:,.3g} GB of training state, without activations"
            raise ConfigError("--memory", f"{machines.memory_bytes / 1e9:,.3g} GB", f"is too little: {needed}")
    return tuple(ProcessMemory(str(process.resident), process.total) for process in planned.memory)
