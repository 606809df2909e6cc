"""Training scripts made of blocks: a seed chooses the blocks, and the same blocks give the same text."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import indent

from tests.differential.blocks import BLOCKS, ONE, SUMS, Block

AXES = list(dict.fromkeys(each.axis for each in BLOCKS))
PLAIN = {axis: next(each for each in BLOCKS if each.axis == axis) for axis in AXES}
BY_KEY = {each.key: each for each in BLOCKS}
MOST = 5
"""Blocks of a script that are not the plain ones."""

TEMPLATE = """\
import copy, json, os
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

TURNED = bool(os.environ.get("TURNED"))  # each batch the other way round: what rounding alone changes
torch.manual_seed(3)
x = torch.randn(54, 6)
y = x.sum(1, keepdim=True).sin()
values, seen, looks, hooked = {{}}, [0], [], []
scaled = lambda loss: loss


def loss_of(a, b):
    return F.mse_loss(model(a), b)


def again(a, b):
    {zero}
    return gradients(a, b)


def look(found):
    looks.append(float(sum(t.detach().double().abs().sum() for t in found if t is not None)))


def total(states):
    found = (t for kept in states.values() for t in kept.values() if t is not None)
    return sum(float(torch.as_tensor(t).double().abs().sum()) for t in found)


{data}
{model}
{optimizer}
{before}
{prepare}
{after}
{gradients}


for epoch in {epochs}:
{epoch}
    for number, (a, b) in enumerate({batches}):
        if TURNED:
            a, b = a.flip(0), b.flip(0)
{top}
        if {fresh}:
            {zero}
        gradients(a, b)
{made}
        if {due}:
{edit}
{read}
{step}
            seen[0] += 1
            look(model.parameters())
{stepped}
{ended}
{end}


def size():
    return float(sum(t.detach().double().abs().sum() for t in model.parameters()))


tt.report(size=size)
if tt.is_main():
    with open(os.environ["VALUES"], "w") as file:
        json.dump({{**values, "looks": looks, "size": size(), "hooked": len(hooked)}}, file)
if os.environ.get("PLAIN"):
    from safetensors.torch import save_model

    save_model(model, os.environ["PLAIN"])
"""
DEPTH = {"epoch": 1, "top": 2, "made": 2, "edit": 3, "read": 3, "step": 3, "stepped": 3, "ended": 1}


@dataclass(frozen=True)
class Script:
    """The blocks of a script that are not the plain ones, in the order of the axes."""

    blocks: tuple[Block, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(each.key for each in self.blocks)

    def __str__(self) -> str:
        return " ".join(self.keys) or "plain"

    def text(self) -> str:
        """The program. A slot that several blocks replace has the last one's code."""
        slots = dict(ONE)
        slots.update(dict.fromkeys(SUMS, ""))
        for each in self.blocks:
            for slot, code in each.code.items():
                slots[slot] = f"{slots[slot]}\n{code}".strip("\n") if slot in SUMS else code
        filled = {slot: indent(code, "    " * DEPTH.get(slot, 0)) for slot, code in slots.items()}
        return "\n".join(line for line in TEMPLATE.format(**filled).splitlines() if line.strip()) + "\n"

    def without(self, block: Block) -> "Script":
        return Script(tuple(each for each in self.blocks if each is not block))

    def is_valid(self) -> bool:
        """Whether plain Python can combine these blocks."""
        present = {*self.keys, *(each.axis for each in self.blocks)}
        return not any(word in present - {each.axis} for each in self.blocks for word in each.without)


def named(keys: Iterable[str]) -> Script:
    """The script of these blocks, `axis=name` each. Raises KeyError."""
    return _made(BY_KEY[key] for key in keys)


def of_seed(seed: int) -> Script:
    """A script of two to `MOST` blocks."""
    chance = random.Random(seed)
    while True:
        axes = chance.sample(AXES, chance.randint(2, MOST))
        script = _made(chance.choice([each for each in BLOCKS if each.axis == axis][1:]) for axis in axes)
        if script.is_valid():
            return script


def single(axes: Iterable[str] = ()) -> list[Script]:
    """One script for each block that is not a plain one, of all axes or of these."""
    wanted = list(axes) or AXES
    return [_made([each]) for each in BLOCKS if each is not PLAIN[each.axis] and each.axis in wanted]


def _made(blocks: Iterable[Block]) -> Script:
    """A script of these blocks, and of an optimizer with a state where one of them is about the state."""
    chosen = {each.axis: each for each in blocks}
    if "state" in chosen:
        chosen.setdefault("optimizer", BY_KEY["optimizer=adam"])
    return Script(tuple(chosen[axis] for axis in AXES if axis in chosen))
