"""The building blocks of the generated training scripts.

A block fills slots of a template. Its code replaces the default of a slot; in slots without one the code of several
blocks adds up in the order of the axes. Losses are means over samples, and no model draws random
numbers or uses statistics of a batch: differences that the documentation promises (`DOCUMENTED`) are not generated.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent, indent

WHEN = {"epoch1": ("epoch", "if epoch == 1:"), "step4": ("stepped", "if seen[0] == 4:")}
DOCUMENTED = {
    "dropout, or noise in forward": "each worker draws for its share: docs/exactness.md",
    "BatchNorm in training": "statistics of a worker's share: docs/exactness.md",
    "a sum over samples, or a mean over something else": "shares weigh by samples: tt.weight in docs/python.md",
    "pairs of samples": "a worker sees its share only: docs/exactness.md",
    "p.grad, read before step(), that no backward of the worker made": "a share's, or None: docs/exactness.md",
    "buffers that each forward changes, on workers that make none": "those of worker 0: docs/exactness.md",
    "random numbers beside the loader's": "each worker draws its own: docs/exactness.md",
}
"""Differences to plain Python: what, and why and where it is documented. No block makes them."""


@dataclass(frozen=True)
class Block:
    """One block: its axis, its name there, code by slot, and what it cannot be combined with."""

    axis: str
    name: str
    code: dict[str, str] = field(default_factory=dict, hash=False, compare=False)
    without: tuple[str, ...] = field(default=(), compare=False)

    @property
    def key(self) -> str:
        return f"{self.axis}={self.name}"


def _sections(text: str, depth: int) -> Iterator[tuple[str, str]]:
    """The lines at this indentation, each with the lines below it."""
    for part in re.split(rf"^(?= {{{depth}}}[^ \n])", text, flags=re.MULTILINE)[1:]:
        head, _, below = part.partition("\n")
        yield head.strip(), below


def _blocks(text: str) -> Iterator[Block]:
    snippets: dict[str, str] = {}
    for head, below in _sections(re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), 0):
        kind, name = head.split()
        if kind == "let":
            snippets[f"${name}"] = dedent(below).strip()
            continue
        for words, body in _sections(below, 2):
            yield from _read(name, words, body, snippets)


def _read(axis: str, words: str, body: str, snippets: dict[str, str]) -> Iterator[Block]:
    """One block, or several that differ in the slot of a part of their code."""
    name, _, without = words.partition(" without ")
    code: dict[str, dict[str, str]] = {"": {}}
    for head, below in _sections(body, 4):
        slots, _, line = head.partition(":")
        text = snippets.get(line.strip(), line.strip()) or dedent(below).strip("\n")
        for each in slots.split(" | "):
            suffix, _, slot = each.rpartition("=")
            slot, condition = WHEN.get(slot, (slot, ""))
            code.setdefault(suffix, {})[slot] = f"{condition}\n{indent(text, '    ')}" if condition else text
    for suffix, filled in code.items():
        if filled or len(code) == 1:
            yield Block(axis, name + suffix, filled, tuple(without.split()))


def read_blocks(name: str) -> list[Block]:
    """The blocks of a file beside this one."""
    return list(_blocks(Path(__file__).with_name(name).read_text()))
