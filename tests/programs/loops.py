"""The usual loop in its many forms: each function is a plain PyTorch script that `tt.prepare` must leave right."""

import sys
from collections.abc import Callable, Iterator
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import topotrain as tt

EPOCHS, SAMPLES, BATCH = 4, 60, 12


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 10, generator=generator)
    return TensorDataset(x, (x[:, :4].argmax(dim=1)).long())


class Net(nn.Module):
    """Tied layers, a frozen one, and a head that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.head = nn.Linear(10, 4)
        self.spare = nn.Linear(10, 4)
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor, spare: bool = False) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x)))) + self.frozen(x)
        return self.head(hidden) + (self.spare(hidden) if spare else 0)


def start(model: nn.Module | None = None, **options: object) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    torch.manual_seed(2)
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data(), **{"batch_size": BATCH, "shuffle": True, **options})
    return model, optimizer, loader


loss_of = nn.functional.cross_entropy


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> nn.Module:
    for _ in tt.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
    return model


def accumulation() -> nn.Module:
    model, optimizer, loader = tt.prepare(*start())
    for _ in tt.epochs(EPOCHS):
        for number, (x, y) in enumerate(loader):
            (loss_of(model(x), y) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return model


def several_loaders() -> nn.Module:
    """One loader beside another, both of uneven batches; then a new one; one to validate with, without `no_grad`."""
    model, optimizer, loader = start()
    free = DataLoader(TensorDataset(data()[:50][0]), batch_size=11, shuffle=True)
    model, optimizer, loader, free = tt.prepare(model, optimizer, loader, free)
    for epoch in tt.epochs(EPOCHS):
        if epoch == 2:
            model, optimizer, loader = tt.prepare(model, optimizer, DataLoader(data(), 17, shuffle=True))
        for (x, y), (other,) in zip(loader, cycle(free)):
            optimizer.zero_grad()
            (loss_of(model(x), y) + (model(other) + model(-other)).square().mean()).backward()
            optimizer.step()
            sum(loss_of(model(x), y) for x, y in DataLoader(data(), 30))
        for x, y in tt.as_is(DataLoader(data(), 30)):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
    return model


def two_losses() -> nn.Module:
    model, optimizer, loader = tt.prepare(*start())
    for _ in tt.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss_of(out, y).backward(retain_graph=True)
            (0.01 * out.pow(2).mean()).backward()
            optimizer.step()
    return model


def clipping() -> nn.Module:
    model, optimizer, loader = tt.prepare(*start())
    for _ in tt.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=False)
            loss_of(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
    return model


def scaler() -> nn.Module:
    model, optimizer, loader = tt.prepare(*start())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)  # overflows at first
    for _ in tt.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            scaler.scale(loss_of(model(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return model


def scheduler_before() -> nn.Module:
    model, optimizer, loader = start()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, loader, schedule = tt.prepare(model, optimizer, loader, schedule)
    return scheduled(model, optimizer, loader, schedule)


def scheduler_after() -> nn.Module:
    model, optimizer, loader = tt.prepare(*start())
    return scheduled(model, optimizer, loader, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12))


def scheduled(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, schedule: object) -> nn.Module:
    for _ in tt.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
            schedule.step()
    return model


def groups() -> nn.Module:
    model, _, loader = start()
    heads = [*model.head.parameters(), *model.spare.parameters()]
    rest = [p for p in model.parameters() if p.requires_grad and all(p is not h for h in heads)]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": heads, "lr": 0.01}], lr=0.001)
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    for epoch in tt.epochs(EPOCHS):
        optimizer.param_groups[1]["lr"] = 0.01 / (1 + epoch)
        optimizer.param_groups[0]["weight_decay"] = 0.1 * epoch
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss_of(model(x, spare=number % 3 == 0), y).backward()
            optimizer.step()
    return model


def skipped() -> nn.Module:
    model, optimizer, loader = tt.prepare(*start())
    for _ in tt.epochs(EPOCHS):
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            if number % 3 != 1:
                optimizer.step()
    return model


def left_early() -> nn.Module:
    model, optimizer, loader = tt.prepare(*start())
    for _ in tt.epochs(EPOCHS):
        for number, (x, y) in enumerate(loader):
            if number == 3:
                break
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
    return model


def compiled() -> nn.Module:
    model, optimizer, loader = start()
    compiled_model, optimizer, loader = tt.prepare(torch.compile(model, backend="aot_eager"), optimizer, loader)
    train(compiled_model, optimizer, loader)
    return model


def loader_processes() -> nn.Module:
    return train(*tt.prepare(*start(num_workers=2, persistent_workers=True, prefetch_factor=2)))


def loader_collate() -> nn.Module:
    def collate(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in rows]) * 2, torch.stack([y for _, y in rows])

    return train(*tt.prepare(*start(collate_fn=collate, drop_last=True)))


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from reversed(range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


def loader_sampler() -> nn.Module:
    return train(*tt.prepare(*start(sampler=Backwards(), shuffle=False)))


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Every item is a whole batch."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = data().tensors
        return x[index * BATCH : (index + 1) * BATCH], y[index * BATCH : (index + 1) * BATCH]

    def __len__(self) -> int:
        return SAMPLES // BATCH


def loader_whole_batches() -> nn.Module:
    model, optimizer, _ = start()
    return train(*tt.prepare(model, optimizer, DataLoader(Batches(), batch_size=None, shuffle=True)))


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*data().tensors, strict=True)


def loader_stream() -> nn.Module:
    model, optimizer, _ = start()
    return train(*tt.prepare(model, optimizer, DataLoader(Stream(), batch_size=BATCH)))


def dropout() -> nn.Module:
    """No worker draws the mask that one process would: this one is right only in what it learns."""
    model, optimizer, loader = start(nn.Sequential(nn.Dropout(0.1), Net()))
    return train(*tt.prepare(model, optimizer, loader))


LOOPS: dict[str, Callable[[], nn.Module]] = {
    loop.__name__: loop
    for loop in (
        accumulation,
        two_losses,
        clipping,
        scaler,
        scheduler_before,
        scheduler_after,
        groups,
        skipped,
        left_early,
        compiled,
        loader_processes,
        loader_collate,
        loader_sampler,
        loader_whole_batches,
        loader_stream,
        several_loaders,
    )
}

if __name__ == "__main__":
    {**LOOPS, "dropout": dropout}[sys.argv[1]]()
