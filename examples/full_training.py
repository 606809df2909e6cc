"""Handwritten digits, trained as in earnest: the lines marked `# topotrain` are what a job needs.

    python examples/full_training.py                                         # one process
    topotrain run examples/conf/allreduce.conf examples/full_training.py     # three workers: the same steps

Validation over all workers, the best checkpoint, early stopping, gradient accumulation, clipping, bfloat16, a schedule
with warm-up, curves, and a restart that goes on where it was.
"""

import argparse
import math

import torch
from digits import build_model, read_digits
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import topotrain as tt  # topotrain


class Patience:
    """Says when to stop: the loss has not become better for some epochs. A restart goes on with its state."""

    def __init__(self, epochs: int) -> None:
        self.epochs, self.best, self.waited = epochs, math.inf, 0

    def is_best(self, loss: float) -> bool:
        """Take note of the loss of an epoch, and return whether it is the best one so far."""
        better = loss < self.best
        self.best, self.waited = min(self.best, loss), 0 if better else self.waited + 1
        return better

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best, self.waited = state["best"], int(state["waited"])


def validate(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> tuple[float, float]:
    """Return loss and accuracy over the whole loader, the same on all workers."""
    loss = right = count = 0.0
    model.eval()
    with torch.no_grad():
        for images, labels in tt.split(loader):  # topotrain: each worker reads its share
            outputs = model(images)
            loss += nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
            right += (outputs.argmax(1) == labels).sum().item()
            count += len(labels)
    model.train()
    loss, right, count = tt.sum(loss), tt.sum(right), tt.sum(count)  # topotrain
    return loss / count, right / count


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits, with all that a training in earnest has.")
    parser.add_argument("--epochs", type=int, default=20, help="at most")
    parser.add_argument("--batch", type=int, default=48, help="samples of a backward, over all workers together")
    parser.add_argument("--accumulate", type=int, default=2, help="backwards for each step")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--patience", type=int, default=4, help="epochs without a better loss, after which it ends")
    parser.add_argument("--best", default="best.pt", help="file for the best parameters")
    options = parser.parse_args()

    torch.manual_seed(0)
    train, held_out = read_digits()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.01)
    loader = DataLoader(train, batch_size=options.batch, shuffle=True, drop_last=True)
    validation = DataLoader(held_out, batch_size=120)
    steps = options.epochs * math.ceil(len(loader) / options.accumulate)
    warm_up = max(1, steps // 20)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / warm_up) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / steps)))

    schedule = LambdaLR(optimizer, rate)
    patience = Patience(options.patience)

    model, optimizer, loader = tt.prepare(model, optimizer, loader)  # topotrain
    tt.keep(patience=patience)  # topotrain: the rest of the state is kept without a word
    for epoch in tt.epochs(options.epochs):  # topotrain
        for number, (images, labels) in tt.enumerate(loader, 1):  # topotrain: as enumerate
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images), labels)
            (loss / options.accumulate).backward()
            if number % options.accumulate == 0 or number == len(loader):
                norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                tt.log(norm=norm, rate=schedule.get_last_lr()[0])  # topotrain
        loss_held_out, accuracy = validate(model, validation)
        if tt.is_main():  # topotrain
            print(f"epoch {epoch + 1}: held-out loss {loss_held_out:.4f}, accuracy {accuracy:.1%}")
        if patience.is_best(loss_held_out):
            tt.save(tt.state_dict(model), options.best)  # topotrain: the main worker alone writes
        if patience.waited == patience.epochs:
            break
    tt.report(best=patience.best, accuracy=accuracy, epochs=epoch + 1)  # topotrain


if __name__ == "__main__":
    main()
