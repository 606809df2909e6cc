"""The unchanged loop, in its many forms, under a synchronous job: the same values as the plain script's.

The plain side is the same function, called here: outside a job `prepare` changes nothing.
"""

import pytest
import torch
from job_runner import ALLREDUCE, DOWNPOUR, SANDBLASTER, JobRunner
from programs.loops import LOOPS, Net
from soak_cases import soaked
from torch import nn

pytestmark = pytest.mark.journey

TRANSPORTS = ("kShm", "kTcp")


@pytest.mark.parametrize("loop", LOOPS)
def test_same_values_as_the_plain_script(runner: JobRunner, loop: str) -> None:
    plain = dict(LOOPS[loop]().named_parameters())
    number = list(LOOPS).index(loop)
    cluster = (SANDBLASTER, ALLREDUCE)[number // 2 % 2]
    final = runner.run(f"{cluster} transport: {TRANSPORTS[number % 2]}", "loops.py", loop).final
    start = Net()
    assert plain.keys() == final.keys()
    for name, value in plain.items():
        assert torch.linalg.vector_norm(final[name] - value) <= 1e-5 * torch.linalg.vector_norm(value), name
    assert any(not torch.equal(plain[name], p) for name, p in start.named_parameters())


def test_dropout_learns_in_a_synchronous_group(runner: JobRunner) -> None:
    final = runner.run(SANDBLASTER, "loops.py", "dropout").final
    assert loss_of({name.removeprefix("1."): value for name, value in final.items()}) < loss_of({})


def loss_of(values: dict[str, torch.Tensor]) -> float:
    """Of a model with these values on samples that nobody has seen."""
    model = Net()
    model.load_state_dict(values, strict=False)
    x = torch.randn(500, 10, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1)))


@pytest.mark.parametrize(
    "loop", soaked(["loader_stream"], ["accumulation", "left_early", "loader_processes", "scaler"])
)
def test_asynchronous_groups_learn_with_the_same_loop(runner: JobRunner, loop: str) -> None:
    ended = runner.run(DOWNPOUR, "loops.py", loop)
    assert loss_of(ended.final) < loss_of({})
    steps = [process["steps"] for process in ended.report["processes"] if process["workers"]]
    assert len(steps) == 4
    assert sum(steps) > 0
