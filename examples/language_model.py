"""A small language model: a transformer that learns, letter by letter, to write like Python's own reference.

    python examples/language_model.py                                         # one process
    topotrain run examples/conf/allreduce.conf examples/language_model.py     # the same file, under a topology

The text is that of `help()`, which every Python has on its disk. Bits per character say how well the model guesses the
next letter of pages that it has not read: 6.6 for a model that knows nothing, about 2 for a good guess of English.
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

LETTERS = "\n " + "".join(map(chr, range(33, 127)))
CONTEXT = 64


def encode(text: str) -> Tensor:
    """Return the number of each letter; one that is not ASCII counts as a space."""
    return torch.tensor([max(LETTERS.find(letter), 1) if letter != "\n" else 0 for letter in text])


def read_pages() -> tuple[TensorDataset, Tensor]:
    """Pieces of CONTEXT letters and the letter after each, and the text of the pages that are held out."""
    pages = [topics[name] for name in sorted(topics)]
    held_out = encode("\n".join(pages[::20]))
    text = encode("\n".join(page for number, page in enumerate(pages) if number % 20))
    pieces = text.unfold(0, CONTEXT + 1, CONTEXT)
    return TensorDataset(pieces[:, :-1], pieces[:, 1:]), held_out


class Block(nn.Module):
    """A layer of a transformer: each letter attends to those before it, and then passes two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_linear = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.linear = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, values: Tensor) -> Tensor:
        samples, length, width = values.shape
        shape = (samples, length, 3, self.heads, width // self.heads)
        query, key, value = self.project(self.before_attention(values)).view(shape).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.merge(attended.transpose(1, 2).reshape(samples, length, width))
        return values + self.linear(self.before_linear(values))


class Transformer(nn.Module):
    """Scores for the next letter at every place of a text: [samples, places] -> [samples, places, letters]."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(len(LETTERS), width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.scores = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(LETTERS)))

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        scores: Tensor = self.scores(self.blocks(self.letter(text) + self.place(places)))
        return scores


@torch.no_grad()
def bits_per_character(model: nn.Module, text: Tensor) -> float:
    """The mean of -log2 of the probability that the model gives to the letter that comes."""
    pieces = text.unfold(0, CONTEXT + 1, CONTEXT)
    scores = model(pieces[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), pieces[:, 1:].flatten()).item() / math.log(2)


@torch.no_grad()
def write(model: nn.Module, begin: str, length: int) -> str:
    """Continue a text, letter by letter, each drawn with the probability that the model gives it."""
    drawn = torch.Generator().manual_seed(0)
    text = encode(begin)
    for _ in range(length):
        chances = (model(text[None, -CONTEXT:])[0, -1] / 0.7).softmax(dim=0)  # below 1: likely letters more often
        text = torch.cat([text, torch.multinomial(chances, 1, generator=drawn)])
    return "".join(LETTERS[number] for number in text.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to write like Python's reference.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="pieces per step, over all workers of a group together")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--letters", type=int, default=240, help="how much to write in the end")
    options = parser.parse_args()

    torch.manual_seed(0)
    train, held_out = read_pages()
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    loader = DataLoader(train, batch_size=options.batch, shuffle=True)

    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    for epoch in tt.epochs(options.epochs):
        for text, following in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(text).flatten(0, 1), following.flatten()).backward()
            optimizer.step()
        if tt.is_main():
            print(f"epoch {epoch + 1}: {bits_per_character(model, held_out):.2f} bits per character", flush=True)

    def result() -> float:
        """Called once, with the final parameters of the job."""
        print(write(model, "The statement ", options.letters), flush=True)
        return bits_per_character(model, held_out)

    tt.report(bits_per_character=result)


if __name__ == "__main__":
    main()
