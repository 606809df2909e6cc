"""Dropout's masks in a split model are those of the unsplit one.

Every worker draws the masks of the whole batch from the same state of torch's default generator, in the order of the
graph, as `torch.nn.functional.dropout` would draw them there, and keeps its parts: one byte per element until they are
used. A module that is one piece (attention, a recurrent layer) has the masks that it draws inside put in its way
(`PredrawnMasks`). Whatever else it draws comes from a state of its own, so that the workers' generators stay alike.
"""

import hashlib
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
    """How a step drops: with probability p; whole features (channels) alike; as AlphaDropout; into its input."""

    p: float
    features: bool
    alpha: bool
    inplace: bool

    @property
    def draws(self) -> bool:
        """With p = 0 and 1 nothing is drawn."""
        return 0.0 < self.p < 1.0

    def __call__(self, given: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Dropped; `mask` is True where an element stays, None only where nothing is drawn."""
        if self.p == 0 or given.numel() == 0:
            return given
        if mask is None:
            return given.mul_(0.0) if self.inplace else given * torch.zeros((), dtype=given.dtype, device=given.device)
        noise = mask.to(device=given.device, dtype=given.dtype)
        if not self.alpha:
            noise.div_(1 - self.p)
            return given.mul_(noise) if self.inplace else given * noise
        scale = 1.0 / math.sqrt((ALPHA * ALPHA * self.p + 1) * (1 - self.p))
        shift = noise.add(-1).mul_(ALPHA * scale).add_(ALPHA * scale * self.p)
        noise.mul_(scale)
        return given.mul_(noise).add_(shift) if self.inplace else given * noise + shift


def dropout(step: ProgramStep, model: nn.Module) -> Dropout | None:
    """What a dropout does now, in its module's present mode; None: nothing, or the step is no dropout."""
    if step.kind is StepKind.MODULE:
        module: Any = model.get_submodule(step.target)
        found = next((how for kind, how in MODULES.items() if isinstance(module, kind)), None)
        return Dropout(module.p, *found, module.inplace) if found is not None and module.training else None
    name = getattr(step.target, "__name__", str(step.target))
    if step.kind is not StepKind.FUNCTION or name.rstrip("_") not in FUNCTIONS:
        return None
    features, alpha = FUNCTIONS[name.rstrip("_")]
    given = dict(zip(("input", "p", "training", "inplace"), step.args)) | dict(step.kwargs)
    training = given.get("training", given.get("train", "alpha" not in name))
    inplace = bool(given.get("inplace", False)) or name.endswith("_")
    return Dropout(given.get("p", 0.5), features, alpha, inplace) if training else None


def digest(program: Program, model: nn.Module, generator: torch.Generator) -> int:
    """A number that stands for the generator's state; 0 where this forward draws no masks."""
    drops = (dropout(step, model) for step in program.steps)
    if not any(drop is not None and drop.draws for drop in drops) and not inside(program, model):
        return 0
    hashed = hashlib.sha256(generator.get_state().numpy().tobytes()).digest()
    return int.from_bytes(hashed[:7], "little") + 1


def inside(program: Program, model: nn.Module) -> frozenset[int]:
    """The steps that draw masks themselves now. Of a module of which only a part is in training nothing is known."""
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
    """All masks of a forward; this worker's parts of them by (step, micro-batch), as bool tensors on the CPU.

    Args:
        drops: of steps, by number.
        samples: each worker's number.
        micros: micro-batches into which each worker cuts its samples (`layout.even`).
        generator: on the CPU; in the same state on all workers.
        themselves: the steps that draw inside (`inside`); all masks of one are one flat tensor.
    """
    kept = {}
    for step in program.steps:
        masks = list(_masks(step, drops.get(step.number), step.number in themselves))
        parts: dict[int, list[torch.Tensor]] = {micro: [] for micro in range(micros if step.layout.on(me) else 0)}
        for shape, keep, order in masks:
            sizes = shape.at(sum(samples))
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
    """What a step draws: shapes, the chance of an element to stay, and the order of memory
    (`split_program.DropoutMask`).
    """
    if drop is not None and drop.draws:
        yield _noise(step.shape, drop.features, step), 1 - drop.p, step.inside[0].order if step.inside else ()
    elif itself:
        yield from ((mask.shape, mask.keep, mask.order) for mask in step.inside)


def _drawn(
    sizes: Sequence[int], order: Sequence[int], keep: float, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """A mask of the whole batch, drawn in the order of memory that the unsplit step's would have."""
    order = order or range(len(sizes))
    mask = torch.empty([sizes[d] for d in order], dtype=dtype).bernoulli_(keep, generator=generator).bool()
    return mask.permute([order.index(d) for d in range(len(sizes))])


def _noise(shape: SymbolicShape | None, features: bool, step: ProgramStep) -> SymbolicShape:
    if shape is None:
        raise ValueError(f"{step.line or step.name}: dropout of what is no tensor")
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
    """Rows of the samples that the step computes with: every worker's of this micro-batch, or its own."""
    rows = _by_samples(
        mask, shape, [me] if step.layout.where is LocationKind.BATCH else range(len(samples)), samples, micro, micros
    )
    if step.layout.where is LocationKind.FEATURE and shape.sizes[step.layout.dim] > 1:
        sizes: Mapping[int, Any] = dict(enumerate(rows.shape))
        first, end = even(sizes[step.layout.dim], len(samples))[me]
        rows = rows.narrow(step.layout.dim, first, end - first)
    return rows.clone()


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
    """Inside, whoever draws a mask gets the next of those that were drawn for the whole batch.

    Args:
        masks: end to end, flat.
        name: of the step.
    """

    def __init__(self, masks: torch.Tensor, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._masks, self._name, self._at = masks, name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.bernoulli_.float:
            return func(*args, **(kwargs or {}))
        target: torch.Tensor = args[0]
        self._at += target.numel()
        self._check(self._at <= self._masks.numel())
        return target.copy_(self._masks[self._at - target.numel() : self._at].view(target.shape))

    def done(self) -> None:
        """The step has ended. Raises ConfigError if it has not drawn what it drew when its graph was made."""
        self._check(self._at == self._masks.numel())

    def _check(self, holds: bool) -> None:
        if not holds:
            accepted = "draws other masks than it did when its graph was made: its dropout must stay as it is"
            raise ConfigError("model", self._name, accepted)


@contextmanager
def apart(step: ProgramStep, masks: torch.Tensor | None, seed: int, micro: int, me: int) -> Iterator[None]:
    """Inside, a step that is one piece gets its masks, and draws nothing from the worker's generator.

    Args:
        masks: of this step and micro-batch, from `draw`; None: they are not known.
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
    """Whether a step draws from torch's generator where it is computed: a module with a dropout inside, attention."""
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
    """Inside, torch's CPU generator is where seed, step, micro-batch and worker put it; afterwards as before."""
    before = torch.get_rng_state()
    text = f"{seed} {step.number} {micro} {me}".encode()
    torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7], "little"))
    try:
        yield
    finally:
        torch.set_rng_state(before)
