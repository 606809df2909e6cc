"""Handwritten digits with Lightning. The lines marked `# topotrain` are all that was added.

python examples/lightning_digits.py                                        # one process
topotrain run examples/conf/sandblaster.conf examples/lightning_digits.py  # the same file, under a topology
"""

import argparse
from typing import Any

import pytorch_lightning as pl
import torch
from digits import build_model, read_digits
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from topotrain.compat.integrations.lightning import TopotrainStrategy  # topotrain


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = build_model()

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", default="workspace/lightning")
    options = parser.parse_args()

    pl.seed_everything(0)
    train, test = read_digits()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=TopotrainStrategy(),  # topotrain
        max_epochs=options.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=options.out,
        logger=CSVLogger(options.out),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=360))
    if trainer.is_global_zero:
        print(f"accuracy: {float(trainer.callback_metrics['accuracy']):.3f}")
    trainer.save_checkpoint(f"{options.out}/last.ckpt")


if __name__ == "__main__":
    main()
