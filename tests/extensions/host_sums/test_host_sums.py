"""Jobs over several hosts, in which the workers of a unit send one sum: the bits, and the bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_job import (
    Result,
    Script,
    Trainer,
    WorkerHandle,
    building,
    cross_entropy,
    job_of,
    reference,
    run_hosted,
    usual_loop,
    vectors,
)
from torch import nn

from topotrain.config.job import Job
from topotrain.extensions.host_sums.host_reduction import HostReduction

HOSTS = (0, 1, 2)
"""Two units of workers and one of servers, each on a host of its own."""
BATCHES = vectors(6, 16)


def wide() -> nn.Module:
    """Large beside the messages without a body; its buckets end inside of parameters."""
    return nn.Sequential(nn.Linear(12, 2900), nn.Tanh(), nn.Linear(2900, 5))


def two_units(workers: int = 2, **changes: Any) -> Job:
    """Two units of so many workers of one group, and two servers in a third unit."""
    layout = {
        "nworkers_per_group": 2 * workers,
        "nworkers_per_procs": workers,
        "nservers_per_group": 2,
        "nservers_per_procs": 2,
        "server_worker_separate": True,
    }
    return job_of("one", **{**layout, "slice_bytes": 1 << 16, **changes})


def connected(script: Script) -> Script:
    """The script, begun when the workers of each unit are connected, so that the second step is one of sums."""

    def run(trainer: WorkerHandle) -> None:
        reduction = trainer.exchange.gradients
        if isinstance(reduction, HostReduction):
            trainer.exchange.channel.wait_until(lambda: reduction.is_connected)
        script(trainer)

    return run


def run(job: Job, script: Script, folder: Path, hosts: Sequence[int] = HOSTS, **more: Any) -> Result:
    folder.mkdir()
    return run_hosted(job, building(more.get("model", wide)), connected(script), folder, hosts)


def sums_of(result: Result) -> int:
    """How many sums the workers have sent to servers."""
    reductions = [handle.exchange.gradients for handle in result.workers]
    return sum(each.sums for each in reductions if isinstance(each, HostReduction))


@pytest.mark.parametrize("grads", ["kVisible", "kHidden"])
def test_a_unit_sends_one_gradient_and_gets_one_answer(tmp_path: Path, grads: str) -> None:
    script = usual_loop(BATCHES)
    one = run(two_units(4, grads=grads), script, tmp_path / "one")
    each = run(two_units(4, grads=grads, transport="kTcp"), script, tmp_path / "each")
    assert one.same_bits(each)
    assert one.same_bits(reference(two_units(4), building(wide), script))
    assert sums_of(one) > 0
    # The first step is as without sums, and so are the first values; the other five are a quarter.
    model = 4 * sum(value.numel() for value in one.values.values())
    parts = 3 if grads == "kVisible" else 2
    saved = 5 * parts * (8 - 2) * model
    assert sum(each.traffic) - sum(one.traffic) == pytest.approx(saved, rel=0.05)
