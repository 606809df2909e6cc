"""What a cut graph costs: bytes on edges against the layouts, memory against what autograd really keeps."""

import pytest
import torch
from split_workers import Block, cut
from torch import nn
from torch.nn import functional

from topotrain.config.job import ConfigError
from topotrain.config.topology import Address, Role
from topotrain.parallel.estimate.cost_report import CostReport, buffer_bytes, chunks, estimate_costs
from topotrain.parallel.estimate.memory_check import (
    ITSELF,
    LIMITED,
    MemoryLimits,
    check,
    memory_limits,
    on_host,
    stacks,
)
from topotrain.parallel.estimate.process_memory import ProcessNeed
from topotrain.parallel.program.segments import stretches, words_of

SAMPLES = (3, 5)
PIPED = (Block("one", location=0), Block("two", location=1))


class Small(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(functional.relu(self.one(x)))  # type: ignore[no-any-return]


class Loss(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


def costs(model: nn.Module, blocks: tuple[Block, ...] = PIPED, microbatches: int = 1) -> CostReport:
    made, division = cut(model, blocks, (torch.zeros(3, 6),))
    return estimate_costs(made, model, division, SAMPLES, microbatches)


def test_bytes_per_edge_and_pair() -> None:
    found = costs(Small())
    assert [dict(edge.forward) for edge in found.edges] == [{(1, 0): 5 * 6 * 4}, {(0, 1): 8 * 16 * 4}, {(1, 0): 3 * 16}]
    assert [dict(edge.backward) for edge in found.edges] == [{}, {(1, 0): 8 * 16 * 4}, {(0, 1): 3 * 16}]
    assert found.edges[1].nbytes == (512, 512)
    assert dict(found.pairs()) == {(0, 1): 512, (1, 0): 120 + 48}
    assert (found.sent(0), found.sent(1)) == ((512, 48), (168, 512))
    # What has rows travels once, however a batch is cut, and what has none once per micro-batch.
    for microbatches in (2, 3):
        assert costs(Small(), microbatches=microbatches).pairs() == found.pairs()
        assert [sum(part) for part in zip(*chunks(SAMPLES, microbatches), strict=True)] == list(SAMPLES)
    assert costs(Loss(), microbatches=3).edges[2].nbytes == (12, 12)


def test_features_are_gathered_and_dealt() -> None:
    """`one` has half its rows on each worker: it reads the whole batch, and its result becomes samples again."""
    found = costs(Small(), (Block("one", 1),))
    assert dict(found.edges[0].forward) == {(1, 0): 120, (0, 1): 72}
    assert dict(found.edges[1].forward) == {(0, 1): 5 * 8 * 4, (1, 0): 3 * 8 * 4}
    assert [one.parameters for one in found.workers] == [4 * (8 * 7 + 17 * 4)] * 2
    assert [found.steps[worker][1].flops for worker in (0, 1)] == [2 * 8 * 6 * 8] * 2
    assert [found.steps[worker][3].flops for worker in (0, 1)] == [2 * 3 * 16 * 4, 2 * 5 * 16 * 4]


def test_memory_and_work_of_each_worker() -> None:
    found = costs(Small())
    first, second = found.workers
    assert (first.parameters, second.parameters) == (4 * 16 * 7, 4 * 4 * 17)
    assert first.trainable == first.parameters
    assert buffer_bytes(cut(Small(), PIPED, (torch.zeros(3, 6),))[1], 0) == first.buffers
    assert first.kept == 8 * 6 * 4 + 8 * 16 * 4  # what `one` reads, what relu made
    assert second.kept == 8 * 16 * 4  # what `two` reads
    assert first.peak >= first.kept
    assert found.steps[0][1].flops == 2 * 8 * 6 * 16
    assert found.steps[0][1].backward_flops == 2 * 8 * 6 * 16 + 16  # for the weight and the bias; x has no gradient
    assert found.steps[1][3].backward_flops == 2 * (2 * 8 * 16 * 4) + 4
    assert 3 not in found.steps[0]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(4 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pool(functional.relu(self.norm(self.conv(x)), inplace=True))
        return self.head(y.reshape(x.size(0), -1))  # type: ignore[no-any-return]


def test_what_is_kept_is_what_autograd_keeps() -> None:
    model, kept = Mixed(), {}
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(torch.rand(6, 1, 8, 8))
    made, division = cut(model, (), (torch.rand(6, 1, 8, 8),), 1)
    found = estimate_costs(made, model, division, (6,)).workers[0]
    assert found.kept == sum(size for size, _ in kept.values())
    assert out.shape == (6, 10)


def test_nothing_of_the_model_is_touched_or_made() -> None:
    """A model too large for any machine, made on the meta device."""
    with torch.device("meta"):
        model = Small(1 << 34)
    found = costs(model)
    assert found.workers[0].parameters == 7 * 4 << 34
    assert found.workers[0].peak > 8 * 4 << 34
    assert all(parameter.is_meta for parameter in model.parameters())


def test_each_worker_needs_its_samples_said() -> None:
    model = Small()
    made, division = cut(model, PIPED, (torch.zeros(3, 6),))
    assert [(words_of(part.layout), part.title()) for part in stretches(made)] == [
        ("worker 0", "one"),
        ("worker 1", "two"),
    ]
    with pytest.raises(ValueError, match="one number for each of 2 workers"):
        estimate_costs(made, model, division, (8,))


# --- memory -----------------------------------------------------------------------------------------------------------


MB = 1_000_000
FIRST, SECOND = ((Address(Role.WORKER, 0, index),) for index in range(2))
SERVER = (Address(Role.SERVER, 0, 0),)


def test_what_does_not_fit_is_refused_with_numbers_and_what_would_help() -> None:
    need = ProcessNeed(SECOND, values=60 * MB, activations=70 * MB)
    own = LIMITED + stacks(0)
    check([need], MemoryLimits())
    check([need], MemoryLimits(data=own + 130 * MB))
    with pytest.raises(ConfigError) as caught:
        check([need], MemoryLimits(data=own + 129 * MB))
    bound = f"RLIMIT_DATA allows {(own + 129 * MB) / 1e6:,.1f} MB"
    for words in ("worker 0/1", f"{(own + 130 * MB) / 1e6:,.1f} MB", "60.0", "activations 70.0", bound, "k1F1B"):
        assert words in str(caught.value)


def test_shared_memory_is_no_data_of_the_process_and_counts_once_on_the_host() -> None:
    one = ProcessNeed(FIRST, values=60 * MB, activations=50 * MB, shared=60 * MB)
    other = ProcessNeed(SECOND, activations=50 * MB, seen=60 * MB)
    check([one, other], MemoryLimits(data=LIMITED + stacks(0) + 50 * MB))
    with pytest.raises(ConfigError, match="RLIMIT_AS allows 500"):
        check([one, other], MemoryLimits(addresses=500 * MB))
    assert on_host([one, other], ITSELF) - on_host([ProcessNeed(FIRST), ProcessNeed(SECOND)], ITSELF) == 160 * MB


def test_all_processes_of_a_host_together_must_fit() -> None:
    here = [ProcessNeed(FIRST, values=400 * MB), ProcessNeed(SERVER, state=500 * MB)]
    there = ProcessNeed(SECOND, unit=1, host=1, values=400 * MB)
    total = on_host(here, ITSELF)
    check([*here, there], MemoryLimits(machine=total))
    with pytest.raises(ConfigError) as caught:
        check([*here, there], MemoryLimits(machine=total - 1, words="85% of its memory"))
    for words in ("host 0", "2 processes", "server 0/0 with 500.0 MB", "85% of its memory is", "optimizer with less"):
        assert words in str(caught.value)
    check([*here, there], MemoryLimits(machine=total - 1), host=1)
    with pytest.raises(ConfigError, match="host 1"):  # the script has made much besides the model
        check([there], MemoryLimits(machine=total - 1), host=1, each=total)


def test_the_limits_of_a_machine_are_the_same_at_any_time() -> None:
    first = memory_limits()
    held = torch.zeros(5_000_000)
    assert first == memory_limits()
    assert first.machine is not None
    assert first.machine > held.nbytes
