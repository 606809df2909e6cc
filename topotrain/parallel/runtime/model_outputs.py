"""Output of the model: joined from micro-batches, and tied to its moves."""

from collections.abc import Sequence
from typing import Any

import torch

from topotrain.config.field_checks import ConfigError
from topotrain.parallel.program.split_program import LocationKind, Program, ResultRef, SizeArgument, SymbolicShape
from topotrain.parallel.program.worker_program import edges_of, references, replaced
from topotrain.parallel.runtime.microbatch import MicroBatchState
from topotrain.parallel.runtime.transfers import TieTokens
from topotrain.parallel.runtime.worker_sync import WorkerSync


class OutputMerger:
    """Joins the results of micro-batches.

    Rows are concatenated. Numbers are averaged, weighted by samples.
    """

    def __init__(self, program: Program) -> None:
        edges, steps = edges_of(program), {step.number: step for step in program.steps}
        self.output = program.output
        self.shapes: dict[ResultRef, SymbolicShape | None] = {}
        self.layouts: dict[ResultRef, LocationKind] = {}
        for ref in references(program.output):
            edge = None if ref.edge is None else edges[ref.edge]
            step = steps[ref.number]
            self.shapes[ref] = step.shape if edge is None else edge.shape
            self.layouts[ref] = (step.layout if edge is None else edge.target).where

    def joined(self, batches: Sequence[MicroBatchState], me: int) -> Any:
        """Return the output for all micro-batches of this worker's share."""
        share = sum(batch.samples[me] for batch in batches)

        def leaf(found: ResultRef | SizeArgument) -> Any:
            if isinstance(found, SizeArgument):
                return found.per_sample * share + found.more
            return self._join(found, batches, me)

        return replaced(self.output, leaf)

    def _join(self, ref: ResultRef, batches: Sequence[MicroBatchState], me: int) -> Any:
        values, shape, where = [batch.values[ref] for batch in batches], self.shapes[ref], self.layouts[ref]
        if len(values) == 1 or where is LocationKind.SAME:
            return values[0]
        if shape is not None and shape.batch >= 0:
            return torch.cat(values, shape.batch)
        if isinstance(values[0], torch.Tensor) and values[0].dim() == 0 and values[0].is_floating_point():
            # A value that all workers have was computed from all samples, others from this worker's own.
            counts = [sum(batch.samples) if where is LocationKind.WHOLE else batch.samples[me] for batch in batches]
            return mean(values, counts)
        if isinstance(values[0], tuple | list) and all(isinstance(item, torch.Tensor) for item in values[0]):
            raise ConfigError(
                "microbatches",
                None,
                "the model returns a tuple of tensors from one call; return its tensors one by one",
            )
        kind = f"{type(values[0]).__name__} {list(getattr(values[0], 'shape', []))}"
        raise ConfigError(
            "microbatches",
            None,
            f"the model returns neither rows of samples nor a mean (one number), but a {kind}: take microbatches: 1",
        )


def mean(values: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    """Return the mean of numbers, weighted by counts, without those of count 0."""
    total = sum(counts)
    terms = [value * (count / total) for value, count in zip(values, counts, strict=True) if count]
    return torch.stack(terms).sum() if terms else values[0]


def tied(output: Any, tokens: Sequence[torch.Tensor], sync: WorkerSync, factor: float) -> Any:
    """Tie an output to tokens: a backward from any tensor of it runs all their moves."""
    found = [
        tensor for tensor in references(output, (torch.Tensor,)) if tensor.is_floating_point() or tensor.is_complex()
    ]
    # Also without an output that needs a gradient: other workers wait for the gradients of this worker's moves.
    chosen = [tensor for tensor in found if tensor.requires_grad] or (found if tokens else [])
    if not chosen:
        return output
    # An output may contain a tensor twice, and each node of autograd needs it once.
    distinct = list({id(tensor): tensor for tensor in chosen}.values())
    results = TieTokens.apply(sync, factor, len(distinct), *distinct, *tokens)  # type: ignore[no-untyped-call]
    new = {id(tensor): result for tensor, result in zip(distinct, results, strict=True)}
    return replaced(output, lambda tensor: new.get(id(tensor), tensor), (torch.Tensor,))
