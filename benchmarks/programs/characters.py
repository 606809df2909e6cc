"""A script that trains a small transformer on the characters of Python's own help pages (`pydoc_data.topics`).

Every Python has this text. The last tenth of it is held out. The rate of AdamW falls as a cosine with the share of the
job's samples that are done. A worker may kill itself.
"""

import argparse
import json
import math
import os
import signal
from collections.abc import Collection
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt
from benchmarks.models import CharacterModel

LENGTH = 64
"""Characters in a sample."""
HELD_OUT = 0.1


def text() -> tuple[Tensor, Tensor, int]:
    """The characters to learn from, those held out, and how many different ones there are."""
    whole = "".join(topics[name] for name in sorted(topics))
    characters = {each: number for number, each in enumerate(sorted(set(whole)))}
    numbers = torch.tensor([characters[each] for each in whole])
    last = int(len(numbers) * (1 - HELD_OUT))
    return numbers[:last], numbers[last:], len(characters)


def windows(numbers: Tensor, starts: Tensor) -> TensorDataset:
    """The characters from these places on, and those that follow each of them."""
    rows = numbers[starts[:, None] + torch.arange(LENGTH + 1)]
    return TensorDataset(rows[:, :-1], rows[:, 1:])


def fresh_model(words: int, seed: int) -> CharacterModel:
    """The model at the start of a run."""
    torch.manual_seed(seed)
    return CharacterModel(words, LENGTH)


@torch.no_grad()
def held_out_loss(model: nn.Module, held: Tensor) -> float:
    """The mean loss of a character over the whole text that is held out."""
    starts = torch.arange(0, len(held) - LENGTH, LENGTH)
    inputs, targets = windows(held, starts).tensors
    parts = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in zip(inputs.split(64), targets.split(64))]
    sizes = torch.tensor([len(part) for part in inputs.split(64)], dtype=torch.float64)
    return float((torch.stack(parts).double() * sizes).sum() / sizes.sum())


def saved_loss(final: Path, seed: int) -> float:
    """The held-out loss of the parameters that a job has ended with."""
    from safetensors.torch import load_file

    _, held, words = text()
    model = fresh_model(words, seed)
    model.load_state_dict(load_file(final))
    return held_out_loss(model, held)


class OwnSteps:
    """The steps of one worker, over all its starts."""

    def __init__(self, file: Path, deaths: Collection[tuple[int, int]]) -> None:
        self._file = file
        self.count = int(file.read_text()) if file.exists() else 0
        self._dies_at = {step for worker, step in deaths if worker == tt.rank()}

    def add(self) -> None:
        """Count a step; this process may die here."""
        self.count += 1
        self._file.write_text(str(self.count))
        # It comes back with a higher count, so it dies once behind each of these steps.
        if self.count in self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


def deaths_of(words: list[str]) -> set[tuple[int, int]]:
    """(worker, the step behind which it dies) pairs, from words such as 1:100."""
    return {(int(worker), int(step)) for worker, _, step in (word.partition(":") for word in words)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, required=True, help="of all workers together")
    parser.add_argument("--batch", type=int, required=True, help="samples in a batch of a worker group")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--every", type=int, default=0, help="worker (0,0) looks at the held-out loss after so many")
    parser.add_argument("--deaths", nargs="*", default=[], help="1:100: worker 1 dies behind its step 100")
    options = parser.parse_args()
    torch.set_num_threads(1)
    numbers, held, words = text()
    draw = torch.Generator().manual_seed(options.seed)
    starts = torch.randint(len(numbers) - LENGTH, (options.samples,), generator=draw)
    model = fresh_model(words, options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    loader = DataLoader(windows(numbers, starts), batch_size=options.batch)
    wrapped, optimizer, loader = tt.prepare(model, optimizer, loader)
    own = OwnSteps(options.out.with_name(f"steps-{tt.rank()}"), deaths_of(options.deaths))
    looks = options.every if tt.is_main() else 0
    with open(options.out if tt.is_main() else os.devnull, "w") as points:
        # The share of the job's samples needs the number of epochs.
        for _ in tt.epochs(1):
            for inputs, targets in loader:
                rate = options.rate * (1 + math.cos(math.pi * tt.progress())) / 2
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.zero_grad()
                F.cross_entropy(wrapped(inputs).flatten(0, 1), targets.flatten()).backward()
                optimizer.step()
                own.add()
                if looks and own.count % looks == 0:
                    points.write(json.dumps([own.count, held_out_loss(wrapped, held)]) + "\n")


if __name__ == "__main__":
    main()
