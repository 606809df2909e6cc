"""Dropout of a split model, with the masks of the unsplit model.

Every worker draws the masks of the whole batch from the same state of torch's default generator, in the order of the
graph, as `torch.nn.functional.dropout` would draw them. It keeps its parts, one byte per element, until they are used.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from topotrain.config.job import ConfigError
from topotrain.parallel.program.layouts import even
from topotrain.parallel.program.split_program import LocationKind, Program, ProgramStep, StepKind, SymbolicShape
from topotrain.parallel.program.worker_program import hash_number
from topotrain.training.rng_state import seed_torch, set_torch_state, torch_state

# Each with (drops whole channels, is an alpha dropout).
FUNCTIONS = {
    "dropout": (False, False),
    "dropout1d": (True, False),
    "dropout2d": (True, False),
    "dropout3d": (True, False),
    "feature_dropout": (True, False),
    "alpha_dropout": (False, True),
    "feature_alpha_dropout": (True, True),
}
MODULES: dict[type[nn.Module], tuple[bool, bool]] = {
    nn.Dropout: (False, False),
    nn.Dropout1d: (True, False),
    nn.Dropout2d: (True, False),
    nn.Dropout3d: (True, False),
    nn.AlphaDropout: (False, True),
    nn.FeatureAlphaDropout: (True, True),
}
ALPHA = 1.7580993408473766  # of SELU (Klambauer et al., 2017), to torch's digits


@dataclass(frozen=True, slots=True)
class Dropout:
    """A dropout with probability `p`, by element or by whole channels (`features`)."""

    p: float
    features: bool
    alpha: bool  # AlphaDropout
    inplace: bool

    @property
    def draws(self) -> bool:
        """Whether masks are drawn, which p = 0 and p = 1 do not need."""
        return 0.0 < self.p < 1.0

    def __call__(self, given: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the input after dropout.

        `mask` is True where an element is kept. It may be None only if no mask is drawn.
        """
        if self.p == 0 or given.numel() == 0:
            return given
        if mask is None:
            return given.mul_(0.0) if self.inplace else given * torch.zeros((), dtype=given.dtype, device=given.device)
        noise = mask.to(device=given.device, dtype=given.dtype)
        # Operation by operation as in torch's own implementation, for its bits.
        if not self.alpha:
            noise.div_(1 - self.p)
            return given.mul_(noise) if self.inplace else given * noise
        scale = 1.0 / math.sqrt((ALPHA * ALPHA * self.p + 1) * (1 - self.p))
        shift = noise.add(-1).mul_(ALPHA * scale).add_(ALPHA * scale * self.p)
        noise.mul_(scale)
        return given.mul_(noise).add_(shift) if self.inplace else given * noise + shift


def dropout(step: ProgramStep, model: nn.Module) -> Dropout | None:
    """Return the dropout of a step, or None if it drops nothing in the present mode."""
    if step.kind is StepKind.MODULE:
        module: Any = model.get_submodule(step.target)
        found = next((how for kind, how in MODULES.items() if isinstance(module, kind)), None)
        return Dropout(module.p, *found, module.inplace) if found is not None and module.training else None
    name = getattr(step.target, "__name__", str(step.target))
    if step.kind is not StepKind.FUNCTION or name.rstrip("_") not in FUNCTIONS:
        return None
    features, alpha = FUNCTIONS[name.rstrip("_")]
    given = dict(zip(("input", "p", "training", "inplace"), step.args)) | dict(step.kwargs)
    # The default of `training` is False in the alpha functions. torch's own operators name the argument `train`.
    training = given.get("training", given.get("train", "alpha" not in name))
    inplace = bool(given.get("inplace", False)) or name.endswith("_")
    return Dropout(given.get("p", 0.5), features, alpha, inplace) if training else None


def digest(program: Program, model: nn.Module, generator: torch.Generator) -> int:
    """Return a number for the generator's state, or 0 if this forward draws no masks."""
    drops = (dropout(step, model) for step in program.steps)
    if not any(drop is not None and drop.draws for drop in drops) and not inside(program, model):
        return 0
    return hash_number(generator.get_state().numpy().tobytes()) + 1  # 0 means that no masks are drawn


def inside(program: Program, model: nn.Module) -> frozenset[int]:
    """Return the steps that draw masks themselves now."""
    # The masks of a module of which only a part is in training mode are not known.
    return frozenset(step.number for step in program.steps if step.inside and not step.random and _trains(step, model))


def _trains(step: ProgramStep, model: nn.Module) -> bool:
    return step.kind is not StepKind.MODULE or all(
        module.training for module in model.get_submodule(step.target).modules()
    )


def draw(
    program: Program,
    drops: Mapping[int, Dropout],
    me: int,
    samples: Sequence[int],
    micros: int,
    generator: torch.Generator,
    themselves: Container[int] = (),
) -> dict[tuple[int, int], torch.Tensor]:
    """Draw all masks of a forward.

    Args:
        drops: the dropouts of steps, by number.
        samples: each worker's number of samples.
        micros: the micro-batches into which each worker cuts its samples (`layouts.even`).
        generator: a CPU generator, in the same state on all workers.
        themselves: steps that draw inside (`inside`). All masks of such a step are one flat tensor.

    Returns:
        This worker's parts by (step, micro-batch), as bool tensors on the CPU.
    """
    kept = {}
    for step in program.steps:
        # Every mask is drawn on every worker, also where the step is not, so that the generators stay alike.
        masks = list(_masks(step, drops.get(step.number), step.number in themselves))
        parts: dict[int, list[torch.Tensor]] = {micro: [] for micro in range(micros if step.layout.on(me) else 0)}
        for shape, keep, order in masks:
            sizes = shape.at(sum(samples))
            # torch draws nothing for an empty tensor.
            if math.prod(sizes) == 0:
                continue
            mask = _drawn(sizes, order, keep, getattr(torch, shape.dtype), generator)
            for micro, found in parts.items():
                found.append(_part(mask, step, shape, me, samples, micro, micros))
        for micro, found in parts.items():
            if found:
                whole = torch.cat([part.flatten() for part in found]) if step.number in themselves else found[0]
                kept[step.number, micro] = whole
    return kept


def _masks(
    step: ProgramStep, drop: Dropout | None, itself: bool
) -> Iterator[tuple[SymbolicShape, float, tuple[int, ...]]]:
    """Yield the masks of a step: shape, probability to keep, order as `DropoutMask`."""
    if drop is not None and drop.draws:
        yield _noise(step.shape, drop.features, step), 1 - drop.p, step.inside[0].order if step.inside else ()
    elif itself:
        yield from ((mask.shape, mask.keep, mask.order) for mask in step.inside)


def _drawn(
    sizes: Sequence[int], order: Sequence[int], keep: float, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Draw a mask of the whole batch."""
    # torch fills a tensor in the order of its memory, so the mask is drawn in that of the unsplit step.
    order = order or range(len(sizes))
    mask = torch.empty([sizes[d] for d in order], dtype=dtype).bernoulli_(keep, generator=generator).bool()
    return mask.permute([order.index(d) for d in range(len(sizes))])


def _noise(shape: SymbolicShape | None, features: bool, step: ProgramStep) -> SymbolicShape:
    if shape is None:
        raise ValueError(f"{step.line or step.name}: the input of dropout must be a tensor")
    ones = max(0, len(shape.sizes) - 2) if features else 0
    return replace(shape, sizes=shape.sizes[: len(shape.sizes) - ones] + (1,) * ones)


def _part(
    mask: torch.Tensor,
    step: ProgramStep,
    shape: SymbolicShape,
    me: int,
    samples: Sequence[int],
    micro: int,
    micros: int,
) -> torch.Tensor:
    """Return the rows of a mask for the samples that the step computes with.

    These are the samples of all workers in this micro-batch, or this worker's own.
    """
    rows = _by_samples(
        mask, shape, [me] if step.layout.where is LocationKind.BATCH else range(len(samples)), samples, micro, micros
    )
    if step.layout.where is LocationKind.FEATURE and shape.sizes[step.layout.dim] > 1:
        sizes: Mapping[int, Any] = dict(enumerate(rows.shape))
        first, end = even(sizes[step.layout.dim], len(samples))[me]
        rows = rows.narrow(step.layout.dim, first, end - first)
    return rows.clone()  # a view would keep the masks of the whole batch in memory


def _by_samples(
    mask: torch.Tensor, shape: SymbolicShape, workers: Sequence[int], samples: Sequence[int], micro: int, micros: int
) -> torch.Tensor:
    if shape.batch < 0:
        return mask
    parts = []
    for worker in workers:
        first, end = even(samples[worker], micros)[micro]
        start = (sum(samples[:worker]) + first) * shape.per_sample
        parts.append(mask.narrow(shape.batch, start, (end - first) * shape.per_sample))
    return torch.cat(parts, shape.batch)


class PredrawnMasks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces masks drawn inside the block by masks drawn for the whole batch.

    Args:
        masks: all masks of a step, flat, one after another.
        name: the name of the step, for errors.
    """

    def __init__(self, masks: torch.Tensor, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._masks, self._name, self._at = masks, name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every dropout of torch draws with this one operation.
        if func is not torch.ops.aten.bernoulli_.float:
            return func(*args, **(kwargs or {}))
        target: torch.Tensor = args[0]
        self._at += target.numel()
        self._check(self._at <= self._masks.numel())
        return target.copy_(self._masks[self._at - target.numel() : self._at].view(target.shape))

    def done(self) -> None:
        """Raise ConfigError if the step has drawn fewer masks than its graph has."""
        self._check(self._at == self._masks.numel())

    def _check(self, holds: bool) -> None:
        if not holds:
            accepted = "draws other masks than it did when its graph was made: its dropout must stay as it is"
            raise ConfigError("model", self._name, accepted)


@contextmanager
def apart(step: ProgramStep, masks: torch.Tensor | None, seed: int, micro: int, me: int) -> Iterator[None]:
    """Run a step that is one node with its own masks and a separate random state.

    Args:
        masks: the masks of this step and micro-batch, from `draw`, or None if they are not known.
        seed, micro, me: see `state_of_its_own`.
    """
    with state_of_its_own(seed, step, micro, me):
        if masks is None:
            yield
            return
        given = PredrawnMasks(masks, str(step.target if step.kind is StepKind.MODULE else step.name))
        with given:
            yield
        given.done()


def draws_by_itself(step: ProgramStep, model: nn.Module) -> bool:
    """Whether a step draws random numbers while it runs: a module, or attention."""
    if step.kind is not StepKind.MODULE:
        return float(step.kwargs.get("dropout_p", 0.0) or 0.0) > 0
    whole = model.get_submodule(step.target)
    for module in () if isinstance(whole, tuple(MODULES)) else whole.modules():
        chance: Any = module.p if isinstance(module, tuple(MODULES)) else getattr(module, "dropout", 0.0)
        if module.training and isinstance(chance, float | int) and chance > 0:
            return True
    return False


@contextmanager
def state_of_its_own(seed: int, step: ProgramStep, micro: int, me: int) -> Iterator[None]:
    """Set torch's CPU generator from these numbers for the block."""
    # Draws that not all workers make must not move the generator that all have in the same state.
    before = torch_state()
    seed_torch(hash_number(f"{seed} {step.number} {micro} {me}".encode()))
    try:
        yield
    finally:
        set_torch_state(before)
