"""Training scripts made of blocks: a seed chooses the blocks, and the same blocks give the same text."""

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import indent

from tests.differential.blocks import Block, read_blocks

MOST = 5
"""Blocks of a script that are not the plain ones."""
_SLOT = re.compile(r"^( *)\{(\w+)\}$|\{(\w+)\}", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """The blocks of a script that are not the plain ones, in the order of the axes."""

    template: str = field(repr=False)
    defaults: Mapping[str, str] = field(repr=False, hash=False)
    blocks: tuple[Block, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(each.key for each in self.blocks)

    def __str__(self) -> str:
        return " ".join(self.keys) or "plain"

    def text(self) -> str:
        """The program. A slot that several blocks replace has the last one's code."""
        slots = {
            **dict.fromkeys((own or inline for _, own, inline in _SLOT.findall(self.template)), ""),
            **self.defaults,
        }
        for each in self.blocks:
            for slot, code in each.code.items():
                slots[slot] = code if slot in self.defaults else f"{slots[slot]}\n{code}".strip("\n")
        filled = _SLOT.sub(lambda m: indent(slots[m[2]], m[1]) if m[2] else slots[m[3]], self.template)
        return "\n".join(line for line in filled.splitlines() if line.strip()) + "\n"

    def without(self, block: Block) -> "Script":
        return replace(self, blocks=tuple(each for each in self.blocks if each is not block))

    def is_valid(self) -> bool:
        """Whether plain Python can combine these blocks."""
        present = {*self.keys, *(each.axis for each in self.blocks)}
        return not any(word in present - {each.axis} for each in self.blocks for word in each.without)


class ScriptSet:
    """The scripts of some blocks.

    Args:
        template: the file with the slots that the blocks fill.
        blocks: the file with the blocks.
        defaults: the code of slots in which a block replaces it.
        implied: by axis, a block that comes with each block of it unless there is another one of its axis.
        always: an axis of which each script of a seed has a block; "": none.
    """

    def __init__(
        self,
        template: str,
        blocks: str,
        defaults: Mapping[str, str],
        implied: Mapping[str, str] | None = None,
        always: str = "",
    ) -> None:
        self._plain = Script(Path(__file__).with_name(template).read_text(), defaults)
        self.blocks, self._implied = read_blocks(blocks), implied or {}
        self._always = [each for each in self.blocks if each.axis == always]
        self._axes = list(dict.fromkeys(each.axis for each in self.blocks))
        self._by_key = {each.key: each for each in self.blocks}

    def named(self, keys: Iterable[str]) -> Script:
        """The script of these blocks, `axis=name` each. Raises KeyError."""
        return self._made(self._by_key[key] for key in keys)

    def of_seed(self, seed: int) -> Script:
        """A script of two to `MOST` blocks."""
        chance = random.Random(seed)
        while True:
            axes = chance.sample(self._axes, chance.randint(2, MOST))
            blocks = [chance.choice(self._others(axis)) for axis in axes]
            script = self._made([*blocks, chance.choice(self._always)] if self._always else blocks)
            if script.is_valid():
                return script

    def single(self, axes: Iterable[str] = ()) -> list[Script]:
        """One script for each block that is not a plain one, of all axes or of these."""
        return [self._made([each]) for axis in list(axes) or self._axes for each in self._others(axis)]

    def _others(self, axis: str) -> list[Block]:
        """The blocks of an axis but its first, which is the plain one."""
        return [each for each in self.blocks if each.axis == axis][1:]

    def _made(self, blocks: Iterable[Block]) -> Script:
        chosen = {each.axis: each for each in blocks}
        for axis, key in self._implied.items():
            if axis in chosen:
                chosen.setdefault(self._by_key[key].axis, self._by_key[key])
        return replace(self._plain, blocks=tuple(chosen[axis] for axis in self._axes if axis in chosen))


PLAIN_LOOP = ScriptSet(
    "template.txt",
    "blocks.txt",
    {
        "data": "loader = DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)",
        "model": "model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))",
        "optimizer": "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "prepare": "model, optimizer, loader = tt.prepare(model, optimizer, loader)",
        "epochs": "range(2)",
        "batches": "loader",
        "fresh": "True",
        "due": "True",
        "gradients": "def gradients(a, b):\n    loss = loss_of(a, b)\n    scaled(loss).backward()\n    return loss",
        "read": "look([p.grad for p in model.parameters()])",
        "step": "optimizer.step()",
        "zero": "optimizer.zero_grad()",
    },
    # What is about the optimizer's state needs an optimizer that has one.
    {"state": "optimizer=adam"},
)
LIBRARY_LOOPS = ScriptSet(
    "library_template.txt",
    "library_blocks.txt",
    {
        "net": "net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))",
        "optimizer": "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        "schedule": "return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)",
    },
    always="library",
)
"""Scripts whose loop is one of transformers, accelerate or Lightning."""
SETS = {"plain": PLAIN_LOOP, "library": LIBRARY_LOOPS}
