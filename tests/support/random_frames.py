"""What a hostile peer may send: true messages and true bytes of real conversations, damaged in every way we thought of.

Everything comes from one seed, and is the same every time.
"""

import math
import os
import random as randomness
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from seeds import SOAK

from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.protocol import Message, ProtocolError, decode, encode

COUNT = int(os.environ.get("TOPOTRAIN_FUZZ_FRAMES", 20_000 if SOAK else 1_000))
SEED = int(os.environ.get("TOPOTRAIN_FUZZ_SEED", "20261"))

PACKAGE = Path(__file__).parents[2] / "topotrain"


def every_message() -> tuple[type[Message], ...]:
    """All messages of the package: those of the core, and those of every module of messages of an extension."""
    for path in sorted(PACKAGE.rglob("*_messages.py")):
        import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    return tuple(cls for _, cls in sorted(m.KINDS.items()))


KINDS = every_message()
NUMBERS = (
    *(-(1 << 63), -(1 << 62), -(1 << 31), -3, -2, -1, 0, 1, 2, 3, 5, 63, 64, 255, 256, 4096, 1 << 16),
    *((1 << 31) - 1, 1 << 31, 1 << 32, (1 << 53) + 1, (1 << 62) - 1, 1 << 62, (1 << 63) - 1),
)
DOUBLES = (math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0, 1e-320, 1e300, 1.7e308)
TEXTS = (
    *("", "x", "null", "[]", "{}", "[[[[", '"' * 3, "\0", "é" * 9, "1e999", "-1", "NaN", "Infinity", "[NaN]"),
    *("[" * 3000 + "]" * 3000, '{"lr":' * 50, '[{"lr": "x"}]', '[{"lr": 1e999}]', "[[], [], null, 3]", "torch.load"),
    *("__reduce__", "os:system", '{"name":"os:system","groups":[{}],"assignment":[0]}', "float32", "qint8", "x" * 9000),
)


def share(part: float, least: int = 20) -> int:
    """How many of the frames a test takes."""
    return max(least, int(COUNT * part))


@dataclass
class FrameGenerator:
    """The seed's random numbers, and what is done to messages and bytes with them."""

    seed: int = SEED
    random: randomness.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = randomness.Random(self.seed)

    # --- bytes ---------------------------------------------------------------------------------------------------

    def bytes(self, most: int = 40) -> bytes:
        return self.random.randbytes(self.random.randrange(most + 1))

    def spoiled(self, raw: bytes, others: Sequence[bytes]) -> bytes:
        """Bit flips, splices, cuts, repetitions; or what somebody else has said."""
        damaged = bytearray(raw)
        for _ in range(self.random.choice((1, 1, 1, 2, 5))):
            at = self.random.randrange(len(damaged) + 1)
            match self.random.randrange(8):
                case 0 | 1 if at < len(damaged):
                    damaged[at] ^= 1 << self.random.randrange(8)
                case 2:
                    del damaged[at:]
                case 3:
                    damaged[at:at] = self.bytes()
                case 4:
                    damaged[at : at + 8] = self.random.choice(NUMBERS).to_bytes(8, "little", signed=True)
                case 5:
                    other = self.random.choice(others)
                    damaged[at:] = other[self.random.randrange(len(other) + 1) :]
                case 6:
                    damaged[at:at] = damaged[self.random.randrange(at + 1) : at]
                case _ if at < len(damaged):
                    damaged[at] = self.random.choice((0, 1, 127, 128, 255))
        return bytes(damaged)

    # --- messages ------------------------------------------------------------------------------------------------

    def number(self) -> int:
        pick = self.random.random()
        return self.random.choice(NUMBERS) if pick < 0.6 else self.random.randrange(-4, 40)

    def text(self) -> str:
        return self.random.choice(TEXTS) if self.random.random() < 0.8 else "".join(map(chr, self.bytes(30)))

    def value(self, of: Any, old: Any) -> Any:
        if of is bool:
            return self.random.random() < 0.5
        if of is int:
            return old + self.random.choice((-1, 1)) if old and self.random.random() < 0.3 else self.number()
        if of is float:
            return self.random.choice(DOUBLES)
        if of is str:
            return self.text() if self.random.random() < 0.6 else _cut(self, old or "")
        if of is bytes:
            return self.random.choice((b"", self.bytes(), self.text().encode(), _cut(self, old or b""), b"\xff" * 9))
        numbers = tuple(old) if old else ()
        return self.random.choice((numbers[:-1], (*numbers, self.number()), tuple(self.number() for _ in range(6))))

    def changed(self, message: Message) -> Message:
        """The same message with one to three other fields; its body may be another, or none."""
        names = [f for f in fields(message) if f.name != "body"]
        changes = {
            f.name: self.value(f.type, getattr(message, f.name))
            for f in self.random.sample(names, min(len(names), self.random.choice((1, 1, 2, 3))))
        }
        return self.travelled(replace(message, **{n: _clamped(v) for n, v in changes.items()}, body=self.body(message)))

    def made(self) -> Message:
        """Any message, of any numbers."""
        kind = self.random.choice(KINDS)
        known = {f.name: self.value(f.type, None) for f in fields(kind) if f.name != "body"}
        made = kind(**{n: _clamped(v) for n, v in known.items()})
        return self.travelled(replace(made, body=self.body(made)))

    def body(self, message: Message) -> torch.Tensor | None:
        """Mostly the true one."""
        pick = self.random.random()
        if pick < 0.7:
            return message.body
        if pick < 0.8:
            return None
        if pick < 0.9 and message.body is not None and message.body.is_floating_point():
            whole = torch.full(message.body.shape, self.random.choice(DOUBLES), dtype=torch.float64)
            return whole.to(message.body.dtype)
        return torch.zeros(
            self.random.choice((0, 1, 3, 64, 257)), dtype=self.random.choice((torch.uint8, torch.float32))
        )

    def travelled(self, message: Message) -> Message:
        """As a receiver sees it: only what fits into a frame arrives at all."""
        try:
            return decode(*encode(message), message.body)
        except (ProtocolError, UnicodeEncodeError):
            return replace(m.Fetch(0), body=message.body)

    def someone(self, people: Sequence[Address]) -> Address:
        if self.random.random() < 0.85:
            return self.random.choice(people)
        return Address(Role(self.random.randrange(2)), self.random.choice((0, 1, 7, 1 << 40)), self.random.randrange(3))

    def spoil(self, message: Message, others: Sequence[Message]) -> Message:
        pick = self.random.random()
        if pick < 0.55:
            return self.changed(message)
        if pick < 0.7:
            return self.made()
        if pick < 0.85:
            return self.random.choice(others)
        kind, meta = encode(message)
        for _ in range(20):
            try:
                kind = self.random.choice(KINDS).KIND if self.random.random() < 0.3 else kind
                return decode(kind, self.spoiled(meta, [b"", meta]), self.body(message))
            except ProtocolError:
                continue
        return message


def _cut(rng: FrameGenerator, old: Any) -> Any:
    if not old:
        return old
    at = rng.random.randrange(len(old))
    return rng.random.choice((old[:at], old[at:], old + old[:at]))


def _clamped(value: Any) -> Any:
    """Into the 64 bits in which it would have to travel; a text for bytes is none."""
    if type(value) is int:
        return max(-(1 << 63), min(value, (1 << 63) - 1))
    if type(value) is tuple:
        return tuple(map(_clamped, value))
    return value
