"""What the plan says that servers with second copies will hold, beside what they hold."""

import pytest
from job_runner import JobRunner
from programs import weighed

from topotrain.config.job_file import load_with_warnings
from topotrain.config.sharding import Parameter
from topotrain.tools.plan.layout_plan import PlannedSchema, plan

pytestmark = pytest.mark.journey

ITSELF = 25e6
"""What Python, torch and the connections take in a server's process that it does not share with the forkserver."""


def test_a_process_holds_its_own_server_and_the_second_copy_of_another(runner: JobRunner) -> None:
    cluster = "nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true transport: kTcp replicas: 2"
    ended = runner.run(cluster, "weighed.py", str(runner.folder / "job"), extra="snapshot_s: 0")
    job, _ = load_with_warnings(str(runner.folder / "job.conf"))
    weights = weighed.made()[0].named_parameters()
    parameters = tuple(Parameter(name, tuple(w.shape), w.stride(), "float32", True) for name, w in weights)
    found = plan(job, PlannedSchema(parameters, state_factor=2.0))
    for memory in found.memory[2:]:
        smallest = min(memory.values, memory.state, memory.staging, memory.second)
        # On one host both copies of a server read gradients in memory that they share, and a process shares those of
        # its own server and of the other one.
        shared = 2 * 2 * memory.values
        told = memory.total + ITSELF - shared
        assert smallest > 0.1 * told
        assert told == pytest.approx(ended.report["metrics"][str(memory.resident)], rel=0.1)
