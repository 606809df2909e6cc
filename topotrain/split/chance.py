"""Dropout's masks in a split model are those of the unsplit one.

Every worker draws the masks of the whole batch from the same state of torch's default generator, in the order of the
graph, as `torch.nn.functional.dropout` would draw them there, and keeps its parts: one byte per element until they are
used. A module that draws by itself (attention, a recurrent layer) gets a state of its own, so that the workers'
generators stay alike.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from topotrain.split.layout import even
from topotrain.split.program import Kind, Program, Shape, Step, Where

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


def dropout(step: Step, model: nn.Module) -> Dropout | None:
    """What a dropout does now, in its module's present mode; None: nothing, or the step is no dropout."""
    if step.kind is Kind.MODULE:
        module: Any = model.get_submodule(step.target)
        found = next((how for kind, how in MODULES.items() if isinstance(module, kind)), None)
        return Dropout(module.p, *found, module.inplace) if found is not None and module.training else None
    name = getattr(step.target, "__name__", str(step.target))
    if step.kind is not Kind.FUNCTION or name.rstrip("_") not in FUNCTIONS:
        return None
    features, alpha = FUNCTIONS[name.rstrip("_")]
    given = dict(zip(("input", "p", "training", "inplace"), step.args)) | dict(step.kwargs)
    training = given.get("training", given.get("train", "alpha" not in name))
    inplace = bool(given.get("inplace", False)) or name.endswith("_")
    return Dropout(given.get("p", 0.5), features, alpha, inplace) if training else None


def digest(program: Program, model: nn.Module, generator: torch.Generator) -> int:
    """A number that stands for the generator's state; 0 where this forward draws no masks."""
    drops = (dropout(step, model) for step in program.steps)
    if not any(drop is not None and drop.draws for drop in drops):
        return 0
    hashed = hashlib.sha256(generator.get_state().numpy().tobytes()).digest()
    return int.from_bytes(hashed[:7], "little") + 1


def draw(
    program: Program,
    drops: Mapping[int, Dropout],
    me: int,
    samples: Sequence[int],
    micros: int,
    generator: torch.Generator,
) -> dict[tuple[int, int], torch.Tensor]:
    """All masks of a forward; this worker's parts of them by (step, micro-batch), as bool tensors on the CPU.

    Args:
        drops: of steps, by number.
        samples: each worker's number.
        micros: micro-batches into which each worker cuts its samples (`layout.even`).
        generator: on the CPU; in the same state on all workers.
    """
    kept = {}
    for step in program.steps:
        drop = drops.get(step.number)
        if drop is None or not drop.draws:
            continue
        shape = _noise(step.shape, drop.features, step)
        sizes = shape.at(sum(samples))
        if math.prod(sizes) == 0:
            continue
        mask = torch.empty(sizes, dtype=getattr(torch, shape.dtype)).bernoulli_(1 - drop.p, generator=generator).bool()
        if step.layout.on(me):
            for micro in range(micros):
                kept[step.number, micro] = _part(mask, step, shape, me, samples, micro, micros)
    return kept


def _noise(shape: Shape | None, features: bool, step: Step) -> Shape:
    if shape is None:
        raise ValueError(f"{step.line or step.name}: dropout of what is no tensor")
    ones = max(0, len(shape.sizes) - 2) if features else 0
    return replace(shape, sizes=shape.sizes[: len(shape.sizes) - ones] + (1,) * ones)


def _part(
    mask: torch.Tensor, step: Step, shape: Shape, me: int, samples: Sequence[int], micro: int, micros: int
) -> torch.Tensor:
    """Rows of the samples that the step computes with: every worker's of this micro-batch, or its own."""
    rows = _by_samples(
        mask, shape, [me] if step.layout.where is Where.BATCH else range(len(samples)), samples, micro, micros
    )
    if step.layout.where is Where.FEATURE and shape.sizes[step.layout.dim] > 1:
        sizes: Mapping[int, Any] = dict(enumerate(rows.shape))
        first, end = even(sizes[step.layout.dim], len(samples))[me]
        rows = rows.narrow(step.layout.dim, first, end - first)
    return rows.clone()


def _by_samples(
    mask: torch.Tensor, shape: Shape, workers: Sequence[int], samples: Sequence[int], micro: int, micros: int
) -> torch.Tensor:
    if shape.batch < 0:
        return mask
    parts = []
    for worker in workers:
        first, end = even(samples[worker], micros)[micro]
        start = (sum(samples[:worker]) + first) * shape.per_sample
        parts.append(mask.narrow(shape.batch, start, (end - first) * shape.per_sample))
    return torch.cat(parts, shape.batch)


def draws_by_itself(step: Step, model: nn.Module) -> bool:
    """Whether a step draws from torch's generator where it is computed: a module with a dropout inside, attention."""
    if step.kind is not Kind.MODULE:
        return float(step.kwargs.get("dropout_p", 0.0) or 0.0) > 0
    whole = model.get_submodule(step.target)
    for module in () if isinstance(whole, tuple(MODULES)) else whole.modules():
        chance: Any = module.p if isinstance(module, tuple(MODULES)) else getattr(module, "dropout", 0.0)
        if module.training and isinstance(chance, float | int) and chance > 0:
            return True
    return False


@contextmanager
def state_of_its_own(seed: int, step: Step, micro: int, me: int) -> Iterator[None]:
    """Inside, torch's CPU generator is where seed, step, micro-batch and worker put it; afterwards as before."""
    before = torch.get_rng_state()
    text = f"{seed} {step.number} {micro} {me}".encode()
    torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7], "little"))
    try:
        yield
    finally:
        torch.set_rng_state(before)
