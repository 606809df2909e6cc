"""Server groups without servers: their values, how they agree, and the messages under way between them."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from topotrain.config.sharding import Parameter, cut

BUCKETS = cut([Parameter("w", (192,), (1,), "float32", True)], 1, groups=3).buckets
"""Three, one for each master group."""

View = Callable[[int], torch.Tensor]


class Groups:
    """Server groups and what is under way between them; `others`: what an extension does with messages of its own."""

    def __init__(
        self,
        count: int,
        make: Callable[[int, Any, int], Any],
        freq: int = 1,
        others: tuple[type, ...] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.values = [torch.zeros(192, dtype=dtype) for _ in range(count)]
        self.agreements = [make(g, SimpleNamespace(buckets=BUCKETS, values=self.view(g)), freq) for g in range(count)]
        self.ways: dict[tuple[int, int], deque[Any]] = {(a, b): deque() for a in range(count) for b in range(count)}
        self.said: list[tuple[int, int, Any, torch.Tensor]] = []
        self._others = others
        for agreement in self.agreements:
            agreement.begin()

    def view(self, group: int) -> View:
        return lambda bucket: self.values[group][BUCKETS[bucket].lo : BUCKETS[bucket].hi]

    def update(self, group: int, amount: float, buckets: Sequence[int] = (0, 1, 2)) -> None:
        for bucket in buckets:
            self.view(group)(bucket).add_(amount)
        self.post(group, self.agreements[group].updated(buckets))

    def post(self, sender: int, out: Sequence[tuple[int, Any]]) -> None:
        for to, message in out:
            assert to != sender, f"{message} to the group itself"
            # A body is a snapshot: what happens to the sender's values meanwhile does not show in it.
            self.ways[sender, to].append(message)
            if message.body is not None:
                self.said.append((sender, to, message, message.body.clone()))

    def deliver(self, way: tuple[int, int], twice: bool = False) -> None:
        message = self.ways[way].popleft()
        for _ in range(1 + twice):
            agreement = self.agreements[way[1]]
            if isinstance(message, self._others):
                agreement.forget_reply(way[0], message)
            else:
                self.post(way[1], agreement.meet(way[0], message, message.body.clone()))

    def run_dry(self, rng: random.Random, duplicates: float = 0.0) -> None:
        while ways := [way for way, queue in self.ways.items() if queue]:
            self.deliver(rng.choice(ways), rng.random() < duplicates)

    def drain(self, rng: random.Random, duplicates: float = 0.0) -> None:
        for group, agreement in enumerate(self.agreements):
            assert not agreement.drained()
            self.post(group, agreement.drain())
        self.run_dry(rng, duplicates)
        assert all(agreement.drained() for agreement in self.agreements)
        for sender, _, message, body in self.said:
            assert torch.equal(message.body, body), f"a body of {sender} changed after it was sent"


def walk(groups: Groups, rng: random.Random, updates: int, duplicates: float) -> int:
    """Updates of integer size at random moments between random deliveries; returns their sum."""
    total = 0
    for _ in range(updates):
        amount = rng.randint(1, 9)
        total += amount
        groups.update(rng.randrange(len(groups.values)), amount)
        for _ in range(rng.randint(0, 3)):
            if ways := [way for way, queue in groups.ways.items() if queue]:
                groups.deliver(rng.choice(ways), rng.random() < duplicates)
    return total
