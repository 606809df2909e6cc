"""Three models under one optimizer for 50 steps: MLP, CNN with BatchNorm, small transformer with tied weights."""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

STEPS, BATCH, SAMPLES = 50, 26, 130  # 26 over 3 workers: unequal shares


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(32, 17, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.embed(tokens)).mean(dim=1))


class Three(nn.Module):
    def __init__(self, batch_norm: bool = True) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(64, 70), nn.ReLU(), nn.Linear(70, 5))
        norm = nn.BatchNorm2d(6) if batch_norm else nn.Identity()
        self.cnn = nn.Sequential(nn.Conv2d(1, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 5))
        self.transformer = Transformer()

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        tokens = images.flatten(1)[:, :9].abs().mul(4).long().clamp(max=16)
        ce = nn.functional.cross_entropy
        return (
            ce(self.mlp(images.flatten(1)), labels)
            + ce(self.cnn(images), labels)
            + ce(self.transformer(tokens), labels)
        )


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(0, 5, (SAMPLES,), generator=generator))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=3e-3)
    return torch.optim.Adagrad(model.parameters(), lr=0.05)


def build(optimizer: str, batch_norm: bool = True) -> tuple[Three, torch.optim.Optimizer, DataLoader[Tensor]]:
    torch.manual_seed(1)
    model = Three(batch_norm)
    return model, optimizer_of(optimizer, model), DataLoader(data(), batch_size=BATCH, shuffle=True)


def train(optimizer_name: str, batch_norm: bool = True) -> Three:
    model, optimizer, loader = tt.prepare(*build(optimizer_name, batch_norm))
    for _ in tt.epochs(STEPS * BATCH // SAMPLES):
        for images, labels in loader:
            optimizer.zero_grad()
            model.loss(images, labels).backward()
            optimizer.step()
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("optimizer")
    parser.add_argument("--no-batch-norm", action="store_true")
    options = parser.parse_args()
    train(options.optimizer, not options.no_batch_norm)
