"""What the state of the inner optimizer is worth after a death: `python -m benchmarks.inner_states [--seeds 3]`.

A model of four islands in one process, with rounds in step. The task, the model and the number of steps are those of
`islands_loss`, and so are sync_freq 24, 6 fragments and the outer optimizer. An island that dies is away for 12 steps
of the others, and takes the agreed values. It goes on with a fresh AdamW, or with a copy of the state of a living one.
The figure is the held-out loss, and the gap to the same job without deaths. No time and no order of arrival is in it.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import Figure, Row, row
from benchmarks.islands_loss import BATCH, RATE, STEPS, WORKERS
from benchmarks.programs.characters import LENGTH, fresh_model, held_out_loss, text, windows
from benchmarks.record import run_table, say
from topotrain.extensions.outer_optimizer.rounds import fragments_of

NAME, TITLE, GOALS = "inner_states", "Islands: the state of the inner optimizer after a death", ()
SYNC_FREQ, FRAGMENTS, AWAY = 24, 6, 12
OUTER_RATE, MOMENTUM = 0.7, 0.5
Deaths = frozenset[tuple[int, int]]
"""(island, the step of its own behind which it dies) pairs."""
DEATHS: Mapping[int, Deaths] = {
    3: frozenset((number, 100 * number) for number in range(1, 4)),
    9: frozenset((1 + number % 3, 40 * (number + 1)) for number in range(9)),
}


class Island:
    """One island: its values and optimizer, and the values that it has received."""

    def __init__(self, words: int, seed: int) -> None:
        self.model = fresh_model(words, seed)
        self.optimizer = self.fresh()
        self.received = [p.detach().clone() for p in self.model.parameters()]
        self.steps = self.away = 0

    def fresh(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=RATE)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * (1 + math.cos(math.pi * min(1.0, self.steps / STEPS))) / 2
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten()).backward()
        self.optimizer.step()
        self.steps += 1

    @torch.no_grad()
    def come_back(self, agreed: Sequence[Tensor], donor: "Island | None") -> None:
        """Begin with these values, and with the donor's state, if there is a donor."""
        for own, received, value in zip(self.model.parameters(), self.received, agreed):
            own.copy_(value)
            received.copy_(value)
        self.optimizer = self.fresh()
        if donor is not None:
            self.optimizer.load_state_dict(deepcopy(donor.optimizer.state_dict()))


class Servers:
    """The agreed values, and the outer optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [p.detach().clone() for p in model.parameters()]
        self._buffers = [torch.zeros_like(value) for value in self.values]
        self._fragments = fragments_of([value.nbytes for value in self.values], FRAGMENTS)

    @torch.no_grad()
    def round(self, islands: Sequence[Island], fragment: int) -> None:
        """One round of a fragment with these islands, as with a quorum: the rate is that of their share."""
        rate = OUTER_RATE * len(islands) / WORKERS
        for number, (value, buffer) in enumerate(zip(self.values, self._buffers)):
            if self._fragments[number] == fragment:
                owns = [list(each.model.parameters())[number] for each in islands]
                told = [each.received[number] - own for each, own in zip(islands, owns)]
                gradient = torch.stack(told).mean(0)
                buffer.mul_(MOMENTUM).add_(gradient)
                value.sub_(gradient.add(buffer, alpha=MOMENTUM), alpha=rate)
                for each, own in zip(islands, owns):
                    own.copy_(value)
                    each.received[number].copy_(value)


def train(seed: int, deaths: Deaths, from_others: bool) -> float:
    """Train to the end; return the held-out loss of the agreed values."""
    numbers, held, words = text()
    draw = torch.Generator().manual_seed(seed)
    samples = STEPS * BATCH * WORKERS
    inputs, targets = windows(numbers, torch.randint(len(numbers) - LENGTH, (samples,), generator=draw)).tensors
    batches = iter(torch.randperm(samples, generator=draw).split(BATCH))
    islands = [Island(words, seed) for _ in range(WORKERS)]
    servers, turn, left = Servers(islands[0].model), 0, samples // BATCH
    while left:
        turn += 1
        for number, each in enumerate(islands):
            if each.away:
                each.away -= 1
                if not each.away:
                    living = (other for other in islands if other is not each and not other.away)
                    each.come_back(servers.values, next(living) if from_others else None)
            elif left:
                rows, left = next(batches), left - 1
                each.step(inputs[rows], targets[rows])
                each.away = AWAY if (number, each.steps) in deaths else 0
        interval = SYNC_FREQ // FRAGMENTS
        if turn % interval == 0 or not left:
            for fragment in range(FRAGMENTS) if not left else ((turn // interval - 1) % FRAGMENTS,):
                servers.round([each for each in islands if not each.away], fragment)
    final = fresh_model(words, seed)
    with torch.no_grad():
        for own, value in zip(final.parameters(), servers.values):
            own.copy_(value)
    return held_out_loss(final, held)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trial", action="store_true", help="save nothing")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    torch.set_num_threads(1)
    ways = [("no deaths", frozenset[tuple[int, int]](), False)]
    for count, deaths in DEATHS.items():
        ways += [(f"{count} deaths, fresh states", deaths, False), (f"{count} deaths, states of others", deaths, True)]
    losses: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        for what, deaths, from_others in ways:
            losses.setdefault(what, []).append(train(seed, deaths, from_others))
            say(f"seed {seed}, {what}: {losses[what][-1]:.4f}")
    rows: list[Row] = []
    least = losses["no deaths"]
    for what, found in losses.items():
        rows.append(row("", what, Figure(mean(found), min(found), max(found)), "nats"))
        if found is not least:
            gaps = [100 * (loss / best - 1) for loss, best in zip(found, least)]
            rows.append(row("", f"{what}: gap", Figure(mean(gaps), min(gaps), max(gaps)), "%"))
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
