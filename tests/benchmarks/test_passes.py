"""P1 by count: how often a step over shared memory passes over the parameters, in real jobs."""

import pytest
import torch

from benchmarks.exchange import ARRIVAL, HIDDEN
from benchmarks.passes import count, count_reduction, least, merged, passes, with_torch
from benchmarks.programs.counting import CountingMode, Counts

SIZE = 1000 * 4


def counted(work) -> Counts:  # type: ignore[no-untyped-def]
    with CountingMode({}) as mode:
        work()
    return mode.counts


def test_an_operation_reads_its_inputs_and_writes_its_outputs() -> None:
    a, b, out = (torch.ones(1000) for _ in range(3))
    assert counted(lambda: torch.add(a, b, out=out)) == {"add": [1, 2 * SIZE, SIZE]}
    assert counted(lambda: a + b) == {"add": [1, 2 * SIZE, SIZE]}
    assert counted(lambda: a.mul_(0.5)) == {"mul_": [1, SIZE, SIZE]}
    assert counted(lambda: a.copy_(b)) == {"copy_": [1, SIZE, SIZE]}
    assert counted(lambda: a.zero_()) == {"zero_": [1, 0, SIZE]}


def test_the_same_memory_is_read_once_and_a_view_costs_nothing() -> None:
    a = torch.ones(1000)
    assert counted(lambda: torch.dot(a, a)) == {"dot": [1, SIZE, 4]}
    assert counted(lambda: a[:10].view(2, 5).detach()) == {}
    assert counted(lambda: a[:10].mul_(2.0)) == {"mul_": [1, 40, 40]}
    assert counted(lambda: torch.empty(1000)) == {}


def test_a_fused_update_reads_three_and_writes_two() -> None:
    value = torch.nn.Parameter(torch.zeros(1000))
    value.grad = torch.ones(1000)
    optimizer = torch.optim.SGD([value], lr=0.1, momentum=0.9, fused=True)
    optimizer.step()
    assert counted(optimizer.step)["_fused_sgd_"] == [1, 3 * SIZE, 2 * SIZE]


def test_counts_of_several_servers_are_added() -> None:
    assert merged([{"add": [1, 2, 3]}, {"add": [1, 1, 1], "dot": [1, 5, 0]}]) == {"add": [2, 3, 4], "dot": [1, 5, 0]}


@pytest.mark.journey
@pytest.mark.parametrize(
    ("workers", "top", "beyond"),
    [
        # Looking for numbers that are not finite is one pass.
        pytest.param(1, ARRIVAL, 1, id="1 worker"),
        pytest.param(1, f"{ARRIVAL} nonfinite: kAllow", 0, id="1 worker, unchecked"),
        # The division reads and writes the sum once more.
        pytest.param(2, ARRIVAL, 3, id="2 workers"),
        # Each gradient is looked at as it arrives.
        pytest.param(2, HIDDEN, 4, id="2 workers, kAtStep"),
        # The second worker has gradients of its own.
        pytest.param(2, "", 5, id="2 workers, kVisible"),
    ],
)
def test_a_step_over_shared_memory_copies_nothing(workers: int, top: str, beyond: int) -> None:
    """No pass is added to the kernels of torch that a step needs, and a worker makes none at all."""
    found = count(workers, top)
    assert passes(found.servers) == pytest.approx(with_torch(workers) + beyond, abs=0.01)
    assert passes(found.workers) == pytest.approx(0.0, abs=0.01)
    assert ("copy_" in found.servers) == (top == "")
    assert least(workers) <= with_torch(workers)


@pytest.mark.journey
def test_downpour_copies_its_values_once_for_each_group() -> None:
    found = count(1, ARRIVAL, groups=2)
    assert passes({"copy_": found.servers["copy_"]}) == pytest.approx(2 * 2, abs=0.01)
    assert passes(found.servers) == pytest.approx(2 * (with_torch(1) + 1 + 2), abs=0.01)


@pytest.mark.journey
def test_an_all_reduce_of_three_ranks_adds_divides_and_copies_once() -> None:
    found = count_reduction(3)
    # Two additions, a division, two copies; of all ranks together, each for a third of the parameters.
    assert passes({name: found[name] for name in ("add", "div_", "copy_")}) == pytest.approx(12.0, abs=0.01)
    assert passes(found) == pytest.approx(12.0, abs=0.01)
