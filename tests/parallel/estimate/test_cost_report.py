"""What a cut graph costs: bytes on edges against the layouts, memory against what autograd really keeps."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
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
from topotrain.parallel.placement.parameter_owners import divide
from topotrain.parallel.program.segments import stretches, words_of
from topotrain.parallel.program.split_program import (
    LayoutEdge,
    LocationKind,
    Program,
    ProgramStep,
    ResultRef,
    SizeArgument,
    StepKind,
    SymbolicShape,
    ValueLocation,
)

BATCH, WHOLE = ValueLocation(LocationKind.BATCH), ValueLocation(LocationKind.WHOLE)
AT0, AT1 = (ValueLocation(LocationKind.AT, worker=worker) for worker in (0, 1))
SAMPLES = (3, 5)


@dataclass(frozen=True)
class Assigned:
    dim: int = 0
    location: int | None = None


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 16)
        self.two = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(functional.relu(self.one(x)))  # type: ignore[no-any-return]


def rows(*sizes: int) -> SymbolicShape:
    return SymbolicShape((0, *sizes), "float32", 0)


def small(
    one: ValueLocation, two: ValueLocation, edges: tuple[LayoutEdge, ...], reads: Mapping[int, int | None], workers: int
) -> Program:
    """The steps of Small; `reads`: step -> the edge that its argument comes over."""
    steps = (
        ProgramStep(0, "x", StepKind.INPUT, "x", BATCH, shape=rows(6)),
        ProgramStep(1, "one", StepKind.MODULE, "one", one, (ResultRef(0, reads[1]),), shape=rows(16)),
        ProgramStep(2, "relu", StepKind.FUNCTION, functional.relu, one, (ResultRef(1),), shape=rows(16)),
        ProgramStep(3, "two", StepKind.MODULE, "two", two, (ResultRef(2, reads[3]),), shape=rows(4)),
    )
    return Program(workers, steps, edges, ("x",), ResultRef(3, reads[4]))


def piped() -> Program:
    edges = (
        LayoutEdge(0, 0, BATCH, AT0, rows(6)),
        LayoutEdge(1, 2, AT0, AT1, rows(16)),
        LayoutEdge(2, 3, AT1, BATCH, rows(4)),
    )
    return small(AT0, AT1, edges, {1: 0, 3: 1, 4: 2}, 2)


def alone() -> Program:
    return small(BATCH, BATCH, (), {1: None, 3: None, 4: None}, 1)


def piped_costs(microbatches: int = 1) -> CostReport:
    model = Small()
    return estimate_costs(piped(), model, divide(model, PIPED, 2), SAMPLES, microbatches)


PIPED = {"one": Assigned(-1, 0), "two": Assigned(-1, 1)}


def test_bytes_per_edge_and_pair() -> None:
    found = piped_costs()
    assert [dict(edge.forward) for edge in found.edges] == [{(1, 0): 5 * 6 * 4}, {(0, 1): 8 * 16 * 4}, {(1, 0): 3 * 16}]
    assert [dict(edge.backward) for edge in found.edges] == [{}, {(1, 0): 8 * 16 * 4}, {(0, 1): 3 * 16}]
    assert found.edges[1].nbytes == (512, 512)
    assert dict(found.pairs()) == {(0, 1): 512, (1, 0): 120 + 48}
    assert found.sent(0) == (512, 48)
    assert found.sent(1) == (168, 512)


@pytest.mark.parametrize("microbatches", [2, 3])
def test_what_has_rows_travels_once_however_a_batch_is_cut(microbatches: int) -> None:
    assert piped_costs(microbatches).pairs() == piped_costs().pairs()
    assert [sum(part) for part in zip(*chunks(SAMPLES, microbatches), strict=True)] == list(SAMPLES)


def test_what_has_no_rows_travels_once_per_micro_batch() -> None:
    model = Small()
    steps = (
        *piped().steps,
        ProgramStep(4, "loss", StepKind.METHOD, "mean", AT1, (ResultRef(3),), shape=SymbolicShape((), "float32")),
    )
    edges = (*piped().edges[:2], LayoutEdge(2, 4, AT1, WHOLE, SymbolicShape((), "float32")))
    program = Program(2, steps, edges, ("x",), ResultRef(4, 2))
    found = estimate_costs(program, model, divide(model, PIPED, 2), SAMPLES, microbatches=3)
    assert found.edges[2].nbytes == (12, 12)


def test_features_are_gathered_and_dealt() -> None:
    """`one` has half its rows on each worker: it reads the whole batch, and its result becomes samples again."""
    features = ValueLocation(LocationKind.FEATURE, 1)
    edges = (LayoutEdge(0, 0, BATCH, WHOLE, rows(6)), LayoutEdge(1, 2, features, BATCH, rows(16)))
    model = Small()
    division = divide(model, {"one": Assigned(1)}, 2)
    program = small(features, BATCH, edges, {1: 0, 3: 1, 4: None}, 2)
    found = estimate_costs(program, model, division, SAMPLES)
    assert dict(found.edges[0].forward) == {(1, 0): 120, (0, 1): 72}
    assert dict(found.edges[1].forward) == {(0, 1): 5 * 8 * 4, (1, 0): 3 * 8 * 4}
    assert [one.parameters for one in found.workers] == [4 * (8 * 7 + 17 * 4)] * 2
    assert [found.steps[worker][1].flops for worker in (0, 1)] == [2 * 8 * 6 * 8] * 2
    assert [found.steps[worker][3].flops for worker in (0, 1)] == [2 * 3 * 16 * 4, 2 * 5 * 16 * 4]


def test_memory_and_work_of_each_worker() -> None:
    found = piped_costs()
    first, second = found.workers
    assert (first.parameters, second.parameters) == (4 * 16 * 7, 4 * 4 * 17)
    assert first.trainable == first.parameters
    assert buffer_bytes(divide(Small(), PIPED, 2), 0) == first.buffers
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


def mixed() -> Program:
    image, small_image = rows(4, 8, 8), rows(4, 4, 4)
    steps = (
        ProgramStep(0, "x", StepKind.INPUT, "x", BATCH, shape=rows(1, 8, 8)),
        ProgramStep(1, "conv", StepKind.MODULE, "conv", BATCH, (ResultRef(0),), shape=image),
        ProgramStep(2, "norm", StepKind.MODULE, "norm", BATCH, (ResultRef(1),), shape=image),
        ProgramStep(3, "relu", StepKind.FUNCTION, functional.relu, BATCH, (ResultRef(2),), {"inplace": True}, image),
        ProgramStep(4, "pool", StepKind.MODULE, "pool", BATCH, (ResultRef(3),), shape=small_image),
        ProgramStep(
            5, "reshape", StepKind.METHOD, "reshape", BATCH, (ResultRef(4), SizeArgument(1, 0), -1), shape=rows(64)
        ),
        ProgramStep(6, "head", StepKind.MODULE, "head", BATCH, (ResultRef(5),), shape=rows(10)),
    )
    return Program(1, steps, (), ("x",), ResultRef(6))


def test_what_is_kept_is_what_autograd_keeps() -> None:
    model, kept = Mixed(), {}
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(torch.rand(6, 1, 8, 8))
    found = estimate_costs(mixed(), model, divide(model, {}, 1), (6,)).workers[0]
    assert found.kept == sum(size for size, _ in kept.values())
    assert out.shape == (6, 10)


def test_nothing_of_the_model_is_touched_or_made() -> None:
    """A model too large for any machine, made on the meta device."""
    with torch.device("meta"):
        model = Small()
        model.one, model.two = nn.Linear(6, 1 << 34), nn.Linear(1 << 34, 4)
    steps = (
        ProgramStep(0, "x", StepKind.INPUT, "x", BATCH, shape=rows(6)),
        ProgramStep(1, "one", StepKind.MODULE, "one", AT0, (ResultRef(0, 0),), shape=rows(1 << 34)),
    )
    program = Program(2, steps, (LayoutEdge(0, 0, BATCH, AT0, rows(6)),), ("x",), ResultRef(0))
    found = estimate_costs(program, model, divide(model, PIPED, 2), SAMPLES)
    assert found.workers[0].parameters == 7 * 4 << 34
    assert found.workers[0].peak == (8 * 6 + (8 << 34) + 3 * 6) * 4  # what arrived, the result, its own share
    assert all(parameter.is_meta for parameter in model.parameters())


def test_each_worker_needs_its_samples_said() -> None:
    found, model = stretches(piped()), Small()
    assert [(words_of(part.layout), part.title()) for part in found] == [("worker 0", "one"), ("worker 1", "two")]
    with pytest.raises(ValueError, match="one number for each of 2 workers"):
        estimate_costs(piped(), model, divide(model, PIPED, 2), (8,))


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
