"""One model, cut over a group before it runs, as text and as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from topotrain.config.job import ConfigError, Job, Placement, Schedule
from topotrain.config.sharding import Parameter
from topotrain.config.topology import layout
from topotrain.launch.runtime.round_traffic import mb
from topotrain.parallel.api.automatic_placement import place_call
from topotrain.parallel.api.example_inputs import ExampleInputs, inputs_of, parse_inputs
from topotrain.parallel.api.prepare_split import tagged
from topotrain.parallel.api.split_costs import PlacementRequest, call_of, costs_of, needs_of, schema_of
from topotrain.parallel.capture.capture_model import capture
from topotrain.parallel.estimate.cost_report import CostReport, EdgeCost, WorkerCost
from topotrain.parallel.estimate.memory_check import ITSELF, MemoryLimits, check, memory_limits, on_host
from topotrain.parallel.estimate.process_memory import ProcessNeed
from topotrain.parallel.placement.assign_modules import assignments
from topotrain.parallel.placement.parameter_owners import divide
from topotrain.parallel.program.segments import stretches, words_of
from topotrain.parallel.program.split_program import LocationKind, ProgramStep, StepKind, ValueLocation
from topotrain.tools.plan.layout_plan import columns

_SIZES = ("unit", "host", "gradients", "exchange", "state", "activations", "snapshot", "total", "shared", "seen")


@dataclass(frozen=True, slots=True)
class CutPlan:
    """The costs of a partitioned graph, and the estimates that come with them."""

    bill: CostReport
    inputs: str  # the assumed inputs of the forward
    needs: tuple[ProcessNeed, ...]  # the memory of each process of the job
    room: MemoryLimits  # of this machine
    chosen: str = ""  # the reasons of an automatic placement; "": the job sets it
    conf: str = ""  # the placement as partition blocks
    warnings: tuple[str, ...] = ()  # processes that do not fit on this machine

    def as_data(self) -> dict[str, Any]:
        """Return plain data for `plan --json`, with sizes in bytes."""
        bill = self.bill
        return {
            "workers": bill.program.workers,
            "samples": list(bill.samples),
            "microbatches": bill.microbatches,
            "inputs": self.inputs,
            "chosen": self.chosen.splitlines(),
            "conf": self.conf.splitlines(),
            "warnings": list(self.warnings),
            "steps": [_step_data(step, bill) for step in bill.program.steps],
            "edges": [_edge_data(edge, bill) for edge in bill.edges],
            "memory": [_memory_data(one, bill) for one in bill.workers],
            "processes": [
                {"process": need.who, "parameters": need.values, **{name: getattr(need, name) for name in _SIZES}}
                for need in self.needs
            ],
            "hosts": [{"host": host, "total": total, "room": self.room.machine} for host, total in self._hosts()],
        }

    def explain(self) -> str:
        """Return the plan as text: segments, transfers, and the cost of each worker."""
        bill = self.bill
        parts = f", in {bill.microbatches} micro-batches" if bill.microbatches > 1 else ""
        head = [
            f"one model over {bill.program.workers} workers of a group, {sum(bill.samples)} samples per step "
            f"({', '.join(map(str, bill.samples))}{parts})",
            f"inputs: {self.inputs}",
        ]
        chosen = ["", self.chosen] if self.chosen else []
        conf = ["", "as partition blocks:", self.conf] if self.conf else []
        body = ["", *_stretches(bill), "", *_edges(bill), "", *self._workers(), "", *self._memory()]
        return "\n".join([*head, *chosen, *body, *conf, *(f"warning: {text}" for text in self.warnings)])

    def _workers(self) -> list[str]:
        rows = []
        for one in self.bill.workers:
            forward, back = self.bill.sent(one.worker)
            work = f"{sum(one.flops) / 1e6:,.1f}"
            rows.append((f"worker {one.worker}", *map(amount, (one.parameters, one.kept, forward, back)), work))
        header = ("worker", "parameters", "kept", "sends", "sends back", "MFLOP")
        head = "per worker of a group, and per step what it keeps for the backward, sends and computes:"
        return [head, *columns(header, rows)]

    def _memory(self) -> list[str]:
        rows = []
        for need in self.needs:
            parts = (need.values, need.gradients, need.exchange, need.state, need.activations, need.snapshot)
            rows.append((need.who, *map(amount, (*parts, need.total, need.shared))))
        made = ("parameters", "gradients", "on its way", "state", "activations", "snapshot")
        header = ("process", *made, "total", "shared")
        own = f"each process takes about {amount(ITSELF)} more itself"
        room = self.room.machine
        bound = "" if room is None else f" of {amount(room)} ({self.room.words})"
        hosts = [f"host {host}: {amount(total)} with that{bound}" for host, total in self._hosts()]
        return [f"memory at its most, an estimate; {own}:", *columns(header, rows), *hosts]

    def _hosts(self) -> list[tuple[int, int]]:
        """Return the bytes of all processes of each host, including their own overhead."""
        hosts = sorted({need.host for need in self.needs})
        return [(host, on_host([need for need in self.needs if need.host == host], ITSELF)) for host in hosts]


def amount(size: int) -> str:
    """Format bytes: 512 B, 4.1 kB, 1.30 MB (10^6 bytes)."""
    if size < 1000:
        return f"{size} B"
    # `mb` has two decimals, so below 0.1 MB it would show almost nothing.
    return f"{size / 1e3:,.1f} kB" if size < 100_000 else f"{mb(size)} MB"


def _stretches(bill: CostReport) -> list[str]:
    rows = []
    for stretch in stretches(bill.program):
        numbers = [step.number for step in stretch.steps]
        runs = [worker for worker in range(bill.program.workers) if stretch.layout.on(worker)]
        costs = [bill.steps[worker][number] for worker in runs for number in numbers]
        work = sum(cost.flops + cost.backward_flops for cost in costs)
        kept = sum(cost.kept for cost in costs)
        count = str(len(numbers))
        rows.append(
            (str(stretch.number), words_of(stretch.layout), stretch.title(), count, amount(kept), f"{work / 1e6:,.1f}")
        )
    return [
        "what is computed where, in order (kept: for the backward, on all workers together):",
        *_left(("", "by", "what", "steps", "kept", "MFLOP"), rows, 3),
    ]


def _edges(bill: CostReport) -> list[str]:
    if not bill.edges:
        return ["workers of a group exchange nothing besides parameters and gradients"]
    names = {step.number: step.name for step in bill.program.steps}
    rows = []
    for one in bill.edges:
        edge = one.edge
        shape = "x".join(map(str, edge.shape.at(sum(bill.samples)))) or "one number"
        sizes = [amount(size) for size in one.nbytes]
        layouts = words_of(edge.source), words_of(edge.target)
        rows.append((names[edge.value], *layouts, f"{shape} {edge.shape.dtype}", *sizes))
    forward, back = (sum(bill.pairs(way).values()) for way in (False, True))
    lines = _left(("value", "layout", "needed as", "of", "forward", "back"), rows, 4)
    pairs = _pairs(bill)
    return [f"transfers per step: {amount(forward)} forward, {amount(back)} back", *lines, *pairs]


def _pairs(bill: CostReport) -> list[str]:
    ahead, back = bill.pairs(), bill.pairs(backward=True)
    told_pairs = [
        f"{source} to {target} {amount(ahead.get((source, target), 0) + back.get((source, target), 0))}"
        for source, target in sorted({*ahead, *back})
    ]
    # One pair would repeat the total, and more than a dozen would fill the screen.
    return [f"from worker to worker: {', '.join(told_pairs)}"] if 1 < len(told_pairs) <= 12 else []


def _left(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """Return a table with `words` columns of left-aligned text at the left."""
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(words)]
    joined = [("  ".join(cell.ljust(width) for cell, width in zip(row[:words], widths)), *row[words:]) for row in table]
    return columns(joined[0], joined[1:])


# --- data ------------------------------------------------------------------------------------------------------------


def _step_data(step: ProgramStep, bill: CostReport) -> dict[str, Any]:
    target = step.target if isinstance(step.target, str) else getattr(step.target, "__name__", str(step.target))
    costs: list[Mapping[str, Any]] = []
    for worker in range(bill.program.workers):
        cost = bill.steps[worker].get(step.number)
        # Inputs and attributes are only named, and cost nothing.
        if cost is not None and step.kind not in (StepKind.INPUT, StepKind.ATTRIBUTE):
            flops = [cost.flops, cost.backward_flops]
            costs.append({"worker": worker, "flops": flops, "kept": cost.kept, "made": cost.made})
    shape = None if step.shape is None else list(step.shape.at(sum(bill.samples)))
    return {
        "number": step.number,
        "name": step.name,
        "kind": step.kind.value,
        "target": target,
        "layout": _layout_data(step.layout),
        "shape": shape,
        "dtype": None if step.shape is None else step.shape.dtype,
        "line": step.line,
        "costs": costs,
    }


def _edge_data(one: EdgeCost, bill: CostReport) -> dict[str, Any]:
    edge = one.edge
    forward, back = one.nbytes
    return {
        "number": edge.number,
        "value": edge.value,
        "source": _layout_data(edge.source),
        "target": _layout_data(edge.target),
        "shape": list(edge.shape.at(sum(bill.samples))),
        "dtype": edge.shape.dtype,
        "forward": forward,
        "backward": back,
        "pairs": [[source, target, size] for (source, target), size in one.forward.items()],
    }


def _layout_data(layout: ValueLocation) -> dict[str, Any]:
    name = {LocationKind.FEATURE: "dim", LocationKind.AT: "worker"}.get(layout.where)
    return {"where": layout.where.value, **({name: getattr(layout, name)} if name else {})}


def _memory_data(one: WorkerCost, bill: CostReport) -> dict[str, Any]:
    return {
        "worker": one.worker,
        "parameters": one.parameters,
        "trained": one.trainable,
        "kept": one.kept,
        "peak": one.peak,
        "flops": list(one.flops),
        "sent": list(bill.sent(one.worker)),
    }


@dataclass(frozen=True, slots=True)
class ModelCut:
    """A planned cut: the plan to show, and the schema with its parts and owners."""

    plan: CutPlan
    parameters: tuple[Parameter, ...]


def cut_of(
    job: Job,
    model: nn.Module,
    loader: Any,
    said: Sequence[str] = (),
    measured: bool = False,
    state_factor: float = 0.0,
) -> ModelCut | None:
    """Cut a model for a plan; return None where every worker holds all of it.

    Args:
        job: its groups share a model, by its conf or by the script's tags.
        model: as the script passes it to `prepare`. It is not changed.
        loader: the script's, which gives the shapes of the forward's arguments.
        said: shapes to use instead, as `--input` gives them.
        measured: with kAuto, use times measured here, and show the result as partition blocks.
        state_factor: elements of optimizer state per element of a parameter.

    Raises:
        ConfigError: the model cannot be cut in this way, or shapes are not known.
    """
    workers = job.cluster.nworkers_per_group
    if workers == 1 or not (job.splits or tagged(model)):
        return None
    # In the mode that the script left it in: dropout and batch norm differ between the two.
    captured = capture(model, model.training)
    found = assignments(model, job, workers, captured)
    given = parse_inputs(said) if said else inputs_of(model, loader, job.schedule is Schedule.k1F1B)
    call = call_of(job, model, given)
    asked = PlacementRequest(job, layout(job.cluster), model, captured, found, call, state_factor)
    here, words, blocks = memory_limits(), "", ""
    if job.placement is Placement.kAuto:
        # Only measuring runs the model, and needs inputs with data.
        chosen = place_call(asked, here, _real(given) if measured else None)
        found, words, blocks = chosen.found, chosen.text, chosen.blocks if measured else ""
    costs = costs_of(asked, found)
    planned = needs_of(asked, found, costs)
    plan = CutPlan(costs, given.text(), planned, here, words, blocks, _warnings(planned, here))
    return ModelCut(plan, schema_of(divide(model, found, workers)))


def _real(given: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments to compute with: sizes without data become zeros."""

    def real(value: Any) -> Any:
        return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value

    return tuple(map(real, given.args)), {name: real(value) for name, value in given.kwargs.items()}


def _warnings(planned: Sequence[ProcessNeed], here: MemoryLimits) -> tuple[str, ...]:
    """Return the parts that would not fit, if the job ran here as this process."""
    try:
        # A plan is often made on another machine than the job's, so this only warns.
        check(planned, here)
    except ConfigError as error:
        return (str(error),)
    return ()
