"""Three phases of Lightning, with averages: `fit` twice, a test of the best weights, and a `fit` from a checkpoint."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as cb
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt
from topotrain.compat.integrations.lightning import TopotrainStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
folder = parser.parse_args().out.parent
dice = torch.Generator().manual_seed(3)
X = torch.randn(62, 6, generator=dice)
Y = X.sum(1, keepdim=True).sin()
train = DataLoader(TensorDataset(X[:44], Y[:44]), batch_size=12, shuffle=True)
test = DataLoader(TensorDataset(X[44:], Y[44:]), batch_size=9)
gathered: list[float] = []


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        found = self.net(batch[0])
        loss = nn.functional.mse_loss(found, batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("largest", batch[0].max(), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        gathered.append(float(self.all_gather(found.detach()).sum()))
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        error = (self.net(batch[0]) - batch[1]).square()
        self.log("val_loss", error.mean(), sync_dist=True)
        self.log("val_sum", error.sum(), sync_dist=True, reduce_fx="sum")

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        schedules = [lr_scheduler.StepLR(optimizer, 2, gamma=0.8), lr_scheduler.ConstantLR(optimizer, 0.5, 100)]
        return [optimizer], [lr_scheduler.SequentialLR(optimizer, schedules, [2])]


def trainer(epochs: int, *callbacks: pl.Callback) -> pl.Trainer:
    more: Any = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": bool(callbacks)}
    place = {"strategy": TopotrainStrategy(), "accelerator": "cpu", "devices": 1, "default_root_dir": folder}
    return pl.Trainer(max_epochs=epochs, callbacks=[*callbacks], **place, **more)


def said(trainer: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()} | {"steps": trainer.global_step}


torch.manual_seed(0)
module, facts = Module(), []
# The first epochs are the worst: the best one must not be the last.
best = cb.ModelCheckpoint(folder / "checkpoints", "{epoch}-{val_loss:.2f}", monitor="val_loss", mode="max")
one = trainer(4, best, cb.EarlyStopping("train_loss", patience=3), cb.StochasticWeightAveraging(0.05, 2))
one.fit(module, train, test)
facts.append(said(one))
one.fit_loop.max_epochs = 6
one.fit(module, train, test)
one.save_checkpoint(folder / "phase.ckpt")
facts += [said(one), {"best": one.test(module, test, ckpt_path="best", verbose=False)[0]["val_loss"]}]
other = trainer(8)
other.fit(module, train, test, ckpt_path=folder / "phase.ckpt")
facts.append(said(other) | {"gathered": gathered[0]})
(folder / f"facts-{tt.rank()}.json").write_text(json.dumps(facts))
if tt.is_main():
    torch.save(module.state_dict(), folder / "phases.pt")
