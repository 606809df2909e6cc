"""A script that trains a small transformer on the characters of Python's own help pages (`pydoc_data.topics`).

Every Python has this text. The last tenth of it is held out. The rate of AdamW falls as a cosine with the share of the
job's samples that are done. A worker may kill itself.
"""

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt
from benchmarks.models import CharacterModel
from benchmarks.programs.timed_steps import die_once

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="the marks of deaths are beside this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, required=True, help="of all workers together")
    parser.add_argument("--batch", type=int, required=True, help="samples in a batch of a worker group")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--deaths", nargs="*", default=[], help="1:100: worker 1 dies behind its step 100")
    options = parser.parse_args()
    torch.set_num_threads(1)
    numbers, _, words = text()
    draw = torch.Generator().manual_seed(options.seed)
    starts = torch.randint(len(numbers) - LENGTH, (options.samples,), generator=draw)
    model = fresh_model(words, options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    loader = DataLoader(windows(numbers, starts), batch_size=options.batch)
    wrapped, optimizer, loader = tt.prepare(model, optimizer, loader)
    # One death of a worker at most: its next start counts from 0 again.
    deaths = {int(step) for worker, step in (word.split(":") for word in options.deaths) if int(worker) == tt.rank()}
    # The share of the job's samples needs the number of epochs.
    for _ in tt.epochs(1):
        for number, (inputs, targets) in enumerate(loader, 1):
            rate = options.rate * (1 + math.cos(math.pi * tt.progress())) / 2
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            F.cross_entropy(wrapped(inputs).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            if number in deaths:
                die_once(options.out.with_name(f"killed-{tt.rank()}"))


if __name__ == "__main__":
    main()
