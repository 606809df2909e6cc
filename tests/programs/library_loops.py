"""Programs whose loop is another library's, and which show whether a job went on where it was.

LIBRARY KIND OUT: `ledger` fills a ledger (see ledger.py); `net` and `plain` train a model, with
and without random numbers and statistics of its own. The main worker writes to OUT how far the library's loop says it
has come. `--die RANK:STEP` ends that worker once, as by SIGKILL, right behind the servers' step and before the
library's own work, and `RANK:STEP:validating` in a validation behind it; of several, one after the other. Steps are
those of the process.
"""

import argparse
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from resuming import BATCH, SAMPLES, Ledger, Net
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import topotrain as tt


class Plain(Net):
    """A model whose bits depend on its data only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 1))


class Wrapped(nn.Module):
    """Returns the loss as the Trainer wants it."""

    def __init__(self, inner: Net | Ledger) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, number: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.inner.loss(number, x, y)}


class Samples(Dataset[Any]):
    """Rows with noise, which is drawn when a row is read."""

    def __init__(self, noisy: bool) -> None:
        dice = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(SAMPLES, 6, generator=dice), torch.randn(SAMPLES, generator=dice)
        self.noisy = noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"number": i, "x": self.x[i] + (torch.randn(6) / 10 if self.noisy else 0.0), "y": self.y[i]}


parser = argparse.ArgumentParser()
parser.add_argument("library", choices=["transformers", "accelerate", "lightning"])
parser.add_argument("kind", choices=["ledger", "net", "plain"])
parser.add_argument("out", type=Path)
parser.add_argument("--die", nargs="*", default=[])
given = parser.parse_args()

torch.manual_seed(5)
inner = {"ledger": Ledger, "net": Net, "plain": Plain}[given.kind]()
train, test = Samples(given.kind == "net"), Samples(False)
LEDGER = given.kind == "ledger"
EPOCHS, TOGETHER = 3, 2
RATE = float(TOGETHER) if LEDGER else 0.05  # a loss is divided by the number of batches in a step
steps, still = 0, threading.Event()


def die(where: str = "") -> None:
    for number, each in enumerate(given.die):
        mark = given.out.with_suffix(f".died-{number}")
        if not mark.exists():
            rank, step, *at = each.split(":")
            if [where] == (at or [""]) and tt.rank() == int(rank) and steps >= int(step):
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return


def stepped(*_: Any) -> None:
    global steps
    steps += 1
    still.wait(0.01)  # computing, in place of a larger model
    die()


def told(**what: Any) -> None:
    if tt.is_main():
        given.out.write_text(json.dumps(what))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer.register_step_post_hook(stepped)
    return optimizer


def with_transformers() -> None:
    from transformers import TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState

    from topotrain.compat.integrations.transformers import Trainer

    class Counter(TrainerCallback, ExportableState):
        begun = 0

        def on_step_begin(self, *_: Any, **more: Any) -> None:
            self.begun += 1

        def on_evaluate(self, *_: Any, **more: Any) -> None:
            die("validating")

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"begun": self.begun}}

    arguments = TrainingArguments(
        output_dir=str(given.out.parent / "trainer"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=TOGETHER,
        lr_scheduler_type="constant" if LEDGER else "linear",
        max_grad_norm=0.0 if LEDGER else 1.0,
        learning_rate=RATE,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )

    class Making(Trainer):
        def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
            self.optimizer = sgd(self.model)
            return self.optimizer

    trainer = Making(
        model=Wrapped(inner), args=arguments, train_dataset=train, eval_dataset=test, callbacks=[Counter()]
    )
    trainer.train()
    (counter,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, Counter)]
    logs = [(log["step"], round(log["epoch"], 4)) for log in trainer.state.log_history if "loss" in log]
    evaluated = [log["step"] for log in trainer.state.log_history if "eval_runtime" in log]
    told(step=trainer.state.global_step, counted=counter.begun, logs=logs, evaluated=evaluated)


def with_accelerate() -> None:
    from topotrain.compat.integrations.accelerate import Accelerator

    class Counter:
        begun = 0

        def state_dict(self) -> dict[str, int]:
            return {"begun": self.begun}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.begun = state["begun"]

    accelerator, counter, model = Accelerator(cpu=True, gradient_accumulation_steps=TOGETHER), Counter(), inner
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=1.0 if LEDGER else 0.8)
    loader = DataLoader(train, batch_size=BATCH, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    accelerator.register_for_checkpointing(counter)
    for _ in tt.epochs(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model.loss(batch["number"], batch["x"], batch["y"]))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            counter.begun += 1
    told(counted=counter.begun, rate=round(schedule.get_last_lr()[0], 9))


def with_lightning() -> None:
    import pytorch_lightning as pl

    from topotrain.compat.integrations.lightning import TopotrainStrategy

    class Counter(pl.Callback):
        begun = 0
        validated: list[int]

        def __init__(self) -> None:
            self.validated = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.begun += 1

        def on_validation_epoch_end(self, trainer: Any, _: Any) -> None:
            if not trainer.sanity_checking:
                die("validating")
                self.validated.append(trainer.global_step)

        def state_dict(self) -> dict[str, Any]:
            return {"begun": self.begun, "validated": list(self.validated)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.begun, self.validated = state["begun"], state["validated"]

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner
            self.batches: list[int] = []

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            self.batches.append(number)
            data.seen += 1
            return self.inner.loss(batch["number"], batch["x"], batch["y"])

        def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
            self.log("loss", self.inner.loss(batch["number"], batch["x"], batch["y"]))

        def configure_optimizers(self) -> Any:
            optimizer = sgd(self)
            gamma = 1.0 if LEDGER else 0.8
            by_step = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=gamma)
            by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=gamma)
            return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["batches"] = list(self.batches)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.batches = checkpoint["batches"]

    class Data(pl.LightningDataModule):
        seen = 0

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(train, BATCH, shuffle=True)

        def val_dataloader(self) -> DataLoader[Any]:
            return DataLoader(test, SAMPLES)

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    counter, module, data = Counter(), Module(), Data()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=TopotrainStrategy(),
        max_epochs=EPOCHS,
        accumulate_grad_batches=TOGETHER,
        callbacks=[counter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    told(
        step=trainer.global_step,
        epoch=trainer.current_epoch,
        counted=counter.begun,
        seen=data.seen,
        batches=module.batches,
        validated=counter.validated,
        logged=trainer.fit_loop.epoch_loop._batches_that_stepped,
        rates=[round(each.scheduler.get_last_lr()[0], 9) for each in trainer.lr_scheduler_configs],
    )


{"transformers": with_transformers, "accelerate": with_accelerate, "lightning": with_lightning}[given.library]()
