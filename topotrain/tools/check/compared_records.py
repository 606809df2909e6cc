"""Find the first difference of a job's record to the script's, and a likely cause."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from topotrain.training.final_parameters import load_tensors

TOLERANCE = 1e-5
_MARGIN = 30.0
"""So many times what rounding alone changes is still rounding."""
_KINDS = ("before", "gradient", "after")
_ASSIGN = "use `with tt.assign(model):`, and do it on all workers alike"


def sample(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return at most so many elements of a tensor, spread evenly, which are recorded."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // most))].cpu().double().clone()


@dataclass(frozen=True)
class Record:
    """A run: values by step, kind (an index of _KINDS) and name, and notes."""

    values: Mapping[tuple[int, int, str], torch.Tensor]
    notes: Mapping[str, Any]

    @classmethod
    def load(cls, file: Path, final: Path | None = None, reported: Mapping[str, float] | None = None) -> "Record":
        """Read a record. final: the job's result, in place of the worker's last values."""
        notes = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        words = {tuple(key.split(" ", 2)): tensor for key, tensor in load_tensors(file).items()}
        found = {(int(step), _KINDS.index(kind), name): tensor for (step, kind, name), tensor in words.items()}
        last = [key for key in found if key[0] == notes["steps"]]
        known = {} if final is None else load_tensors(final)
        found.update({key: sample(known[key[2]], notes["most"]) for key in last if key[2] in known})
        return cls(found, notes if reported is None else {**notes, "reported": dict(reported)})

    def gradients(self, step: int) -> dict[str, torch.Tensor]:
        return {name: t for (at, kind, name), t in self.values.items() if at == step and _KINDS[kind] == "gradient"}


@dataclass(frozen=True)
class Comparison:
    """The result of comparing a job with the plain script."""

    steps: int
    parameters: int
    largest: float  # difference of a value, in relation to the parameter's largest
    step: int = 0  # of the first difference, from 1; 0 for a number that is reported
    what: str = ""  # differs there; "": nothing does
    size: float = 0.0
    cause: str = ""
    notices: tuple[str, ...] = ()


def compare(plain: Record, rounded: Record, job: Record, workers: int, visible: bool) -> Comparison:
    """Compare a job with the plain script, step by step.

    rounded: the plain script with other rounding; what it changes is no difference. workers: in the group. visible:
    the script sees the mean gradient.
    """
    steps, names = min(plain.notes["steps"], job.notes["steps"]), {name for _, _, name in plain.values}
    limit, largest = max(TOLERANCE, 100 * plain.notes["eps"]), 0.0
    noise: dict[tuple[int, str], float] = defaultdict(float)
    apart = plain.notes["steps"] != job.notes["steps"]
    for (step, kind, name), value in sorted(plain.values.items(), key=lambda item: item[0]):
        what = _KINDS[kind]
        if step > steps or (step == steps and apart) or (what == "gradient" and not visible):
            continue
        scale = 1e-3 if what != "gradient" else max(map(_largest, plain.gradients(step).values())) / 100
        blurred, other = (run.values.get((step, kind, name), torch.zeros_like(value)) for run in (rounded, job))
        noise[kind, name] = max(noise[kind, name], _apart(value, blurred, scale))
        far = _apart(value, other, scale)
        if not far <= limit + _MARGIN * noise[kind, name]:
            kind_of = "gradient" if what == "gradient" else "value"
            cause = _cause(step, what, plain, job, workers)
            return Comparison(steps, len(names), largest, step + 1, f"the {kind_of} of {name}", far, cause)
        largest = max(largest, far) if what != "gradient" else largest
    if apart:
        more = f"the plain script makes {plain.notes['steps']} steps and the job {job.notes['steps']}"
        cause = f"{more}: its loop counts or ends by what one worker sees"
        return Comparison(steps, len(names), largest, steps + 1, "the number of steps", 1.0, cause)
    for name, number in plain.notes["reported"].items():
        far, blur = (
            abs(number - run.notes["reported"].get(name, 0.0)) / max(1.0, abs(number)) for run in (job, rounded)
        )
        if not far <= TOLERANCE + _MARGIN * blur:
            cause = "it is computed from what one worker sees: give tt.report a function, or tt.mean of it"
            return Comparison(steps, len(names), largest, 0, f"the metric {name}", far, cause)
    return Comparison(steps, len(names), largest)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _apart(one: torch.Tensor, other: torch.Tensor, scale: float) -> float:
    if one.shape != other.shape:
        return float("inf")
    far = (one - other).abs()
    far[(one == other) | (one.isnan() & other.isnan())] = 0.0
    return _largest(far.nan_to_num(float("inf"))) / max(_largest(one.nan_to_num(0.0)), scale, 1e-30)


def _cause(step: int, what: str, plain: Record, job: Record, workers: int) -> str:
    by_share, steps = plain.notes["by_share"], plain.notes["steps"]
    if what == "before":
        return f"the script changes parameters between two steps: {_ASSIGN}"
    if what == "after" and step >= steps:
        return f"the script changes parameters after the last step: {_ASSIGN}"
    if what == "after":
        return "the gradients agree, so the optimizer, its state or its settings differ"
    if by_share:
        act = "act" if len(by_share) > 1 else "acts"
        return f"{' and '.join(by_share)} {act} on a worker's share (docs/exactness.md): --eval-mode shows the rest"
    if plain.notes["draws"] > steps / 3:
        return "the script draws random numbers in its steps, and each worker draws its own (docs/exactness.md)"
    ours, theirs = plain.gradients(step), job.gradients(step)
    one = torch.cat(list(ours.values()))
    other = torch.cat([theirs.get(name, torch.zeros_like(t)) for name, t in ours.items()])
    if float((other * workers - one).norm()) < 1e-3 * float(one.norm()):
        return "the loss is a sum over the batch: make it a mean over samples, or set `reduce: kSum`"
    return (
        "the loss is no mean over samples (tokens: see tt.weight; pairs: see tt.gather), a hook bounds "
        "each worker's gradient, or tt.as_is gives all workers other batches"
    )
