"""What the loops of the Trainer and of Lightning are told in a fresh process; the libraries are left out."""

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from topotrain.compat.integrations import external_loop
from topotrain.compat.integrations.fit_resume import FitState, RestOfEpoch, _at_epoch, _at_validation
from topotrain.compat.integrations.trainer_resume import PartialEpoch, TrainerLoop
from topotrain.training import context


class Position:
    """A script that goes on in epoch `first`; `left`: the batches that are left, by epoch."""

    def __init__(self, first: int, steps: int, left: dict[int, int], batches: int = 10) -> None:
        self.first, self.steps, self._left, self._batches = first, steps, left, batches

    def batches_left(self, epoch: int) -> int:
        return self._left.get(epoch, self._batches)


# --- the Trainer -----------------------------------------------------------------------------------------------------


def schedule(kind: str = "lambda") -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if kind == "plateau":
        return ReduceLROnPlateau(optimizer)
    made = StepLR(optimizer, 1, gamma=0.5) if kind == "step" else LambdaLR(optimizer, lambda step: 1.0 - step / 100)
    optimizer.step()
    return made


@dataclass
class TrainerState:
    """As that of transformers."""

    global_step: int = 0


def trainer_loop(made: Any, *, saved_at: int = 20, batches: int = 10, together: int = 2, most: int = -1) -> TrainerLoop:
    """A loop of 10 batches in an epoch, whose earlier process had `batches` and has saved its state at a step."""
    args = SimpleNamespace(gradient_accumulation_steps=together, max_steps=most)
    loop = TrainerLoop(SimpleNamespace(args=args, lr_scheduler=made, state=SimpleNamespace(global_step=0)))
    loop.batches = 10
    text = json.dumps({"global_step": saved_at, "epoch": 4.0})
    loop.load_state_dict({"trainer": text, "schedule": 0, "steps": saved_at, "batches": batches})
    return loop


def test_steps_after_the_state_was_saved_count() -> None:
    state = json.loads(trainer_loop(schedule()).trainer_state(Position(4, 23, {4: 4}), 5))
    assert state == {"global_step": 23, "epoch": 4.0}


def test_where_an_epoch_is_divided_anew_the_steps_are_those_of_the_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer ends at a number of steps, and would leave batches unread, or would not end."""
    position: Any = Position(4, 23, {4: 4})
    on_another = trainer_loop(schedule(), batches=15)
    assert json.loads(on_another.trainer_state(position, 5))["global_step"] == 4 * 5 + 3
    assert json.loads(trainer_loop(schedule(), batches=15, most=30).trainer_state(position, 5))["global_step"] == 23
    monkeypatch.setattr(external_loop, "keeps_its_batches", lambda: False)
    assert json.loads(trainer_loop(schedule(), saved_at=30).trainer_state(position, 5))["global_step"] == 23
    assert TrainerLoop(SimpleNamespace()).trainer_state(position, 5) == ""


def rate(made: Any) -> float:
    return float(made.optimizer.param_groups[0]["lr"])


def test_the_schedule_stands_at_the_trainers_step() -> None:
    for kind, batches, was, step, expected in (
        ("lambda", 10, 22, 23, 0.77),  # it died before the schedule's step
        ("lambda", 10, 23, 23, 0.77),
        ("lambda", 20, 46, 23, 0.77),  # on another layout
        ("step", 10, 2, 3, 0.125),
        ("step", 20, 2, 3, 0.25),  # the script's own: what it does on another layout is not known
        ("plateau", 10, 0, 3, 1.0),
    ):
        made = schedule(kind)
        for _ in range(was):
            made.step(*([1.0] if kind == "plateau" else []))
        loop = trainer_loop(made, batches=batches)
        loop._trainer.state.global_step = step
        loop.align_schedule()
        assert kind == "plateau" or made.last_epoch == was  # only once an epoch has begun
        loop.epoch_begins()
        loop.align_schedule()
        assert rate(made) == pytest.approx(expected), (kind, batches)
        loop._trainer.state.global_step += 1
        loop.align_schedule()
        assert rate(made) == pytest.approx(expected), "once in an epoch"


def test_a_second_death_in_an_epoch_finds_where_the_schedule_stood_before_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(external_loop, "steps_so_far", lambda: 23)
    made = schedule()
    for _ in range(22):
        made.step()
    loop = trainer_loop(made)
    loop._trainer.full_state = lambda: TrainerState()
    loop._trainer.state.global_step = 23
    loop.epoch_begins()
    assert loop.state_dict()["schedule"] == 0  # it died before the schedule's step
    loop.align_schedule()
    assert loop.state_dict()["schedule"] == 0


def test_a_partial_epoch_has_the_length_of_the_whole() -> None:
    batches = PartialEpoch(None, 0, 3, 2)
    assert len(batches) == 5 and batches.collate_fn("as it is") == "as it is"


# --- Lightning -------------------------------------------------------------------------------------------------------


def progress(total: int, current: int, *names: str) -> dict[str, Any]:
    every = ("ready", "completed", *names)
    return {"total": dict.fromkeys(every, total), "current": dict.fromkeys(every, current)}


def loops(batches: int, current: int, steps: int) -> dict[str, Any]:
    """As `fit_loop.state_dict()` has it, in the middle of a batch."""
    trained = {**progress(batches, current, "started", "processed"), "is_last_batch": False}
    trained["total"]["ready"] += 1
    trained["current"]["ready"] += 1
    epoch = progress(1, 1, "started", "processed")
    for each in epoch.values():
        each |= {"ready": 2, "started": 2}
    return {
        "state_dict": {"combined_loader": ["of the loader"]},
        "epoch_progress": epoch,
        "epoch_loop.state_dict": {"_batches_that_stepped": steps},
        "epoch_loop.batch_progress": trained,
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": progress(steps, 2), "zero_grad": progress(steps, 2, "started")}
        },
        "epoch_loop.manual_optimization.optim_step_progress": progress(0, 0),
        "epoch_loop.val_loop.batch_progress": {**progress(3, 0, "started", "processed"), "is_last_batch": True},
    }


def counts(tracker: dict[str, int]) -> set[int]:
    return set(tracker.values())


def test_the_loops_are_put_at_the_begin_of_the_epoch_with_the_steps_that_were_made() -> None:
    found = _at_epoch(loops(batches=14, current=4, steps=7), epoch=1, taken=3)
    assert found["state_dict"] == {}
    for name in ("total", "current"):
        assert counts(found["epoch_progress"][name]) == {1}
    assert counts(found["epoch_loop.batch_progress"]["total"]) == {10}
    assert counts(found["epoch_loop.batch_progress"]["current"]) == {0}
    for each in found["epoch_loop.automatic_optimization.optim_progress"]["optimizer"].values():
        assert counts(each["total"]) == {10} and counts(each["current"]) == {0}
    assert found["epoch_loop.state_dict"] == {"_batches_that_stepped": 10}


def test_an_epoch_without_a_batch_left_goes_on_in_its_validation() -> None:
    """As Lightning reads it from a checkpoint that was written in the middle of a validation."""
    found = _at_validation(_at_epoch(loops(14, 4, 7), 1, 3), 10)
    epoch, validated = found["epoch_progress"]["total"], found["epoch_loop.val_loop.batch_progress"]["total"]
    assert epoch == {"ready": 2, "started": 2, "processed": 1, "completed": 1}
    assert counts(found["epoch_loop.batch_progress"]["total"]) == {20}
    assert counts(found["epoch_loop.batch_progress"]["current"]) == {10}
    assert found["epoch_loop.batch_progress"]["is_last_batch"]
    assert validated == {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    assert found["epoch_loop.state_dict"] == {"_batches_that_stepped": 9}


class Share:
    """A worker's share of 10 batches, of which some are left in each epoch."""

    def __init__(self, left: dict[int, int]) -> None:
        self.left, self.passes, self.opened = left, 0, []

    def skip_to(self, epoch: int) -> None:
        self.passes = epoch

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        self.opened.append(self.passes)
        self.passes += 1
        return (number for number in range(self.left.get(self.passes - 1, 10)))


class Progress:
    def __init__(self) -> None:
        self.count = 0

    def increment_by(self, count: int) -> None:
        self.count += count


def fitting(limit: float | int = 1.0) -> Any:
    updated: list[tuple[str, bool]] = []
    inner = SimpleNamespace(
        batch_progress=Progress(),
        update_lr_schedulers=lambda kind, update_plateau_schedulers: updated.append((kind, update_plateau_schedulers)),
    )
    fit = SimpleNamespace(epoch_loop=inner, _data_fetcher=SimpleNamespace(fetched=0))
    return SimpleNamespace(fit_loop=fit, limit_train_batches=limit, updated=updated)


def test_the_rest_of_an_epoch_is_opened_once_and_counted_when_its_first_batch_is_drawn() -> None:
    share, trainer = Share({2: 4, 3: 7}), fitting()
    rest = RestOfEpoch(share, trainer, Position(2, 0, share.left))  # type: ignore[arg-type]
    unused, batches = iter(rest), iter(rest)  # Lightning asks twice
    assert share.opened == [] and trainer.fit_loop._data_fetcher.fetched == 0
    assert list(batches) == [0, 1, 2, 3] and share.opened == [2]
    assert trainer.fit_loop._data_fetcher.fetched == trainer.fit_loop.epoch_loop.batch_progress.count == 6
    # The groups were in different epochs at the snapshot.
    assert len(list(rest)) == 7 and trainer.fit_loop.epoch_loop.batch_progress.count == 9
    # From here on as without a death, when the iterator is made.
    assert iter(rest) is not None and share.opened == [2, 3, 4]
    assert len(list(iter(rest))) == 10 and trainer.fit_loop.epoch_loop.batch_progress.count == 9
    unused.close()  # type: ignore[attr-defined]
    assert share.opened == [2, 3, 4, 5]


@pytest.mark.parametrize("limit", [1.0, 6, 0.6])
def test_an_epoch_without_a_batch_left_is_opened_for_its_schedulers_only(limit: float | int) -> None:
    left = {2: 0} if limit == 1.0 else {2: 4}
    share, trainer = Share(left), fitting(limit)
    rest = RestOfEpoch(share, trainer, Position(2, 0, left))  # type: ignore[arg-type]
    assert rest.left(2) == 0 and rest.done(2) == (10 if limit == 1.0 else 6)
    assert list(rest) == [] and share.opened == []
    rest.finish()
    assert share.opened == [2] and trainer.updated == [("epoch", False)]


class Callback:
    state_key = "mine"

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def on_save_checkpoint(self, *_: object) -> None:
        """Add nothing."""


def test_what_a_state_cannot_hold_is_named_once_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    here: Any = SimpleNamespace(me="worker 0/0", emit=lambda event: told.append(event.text), worker=None)
    monkeypatch.setattr(context, "_current", here)
    module = SimpleNamespace(state_dict=dict, on_save_checkpoint=lambda kept: kept.update(mine={1, 2}, number=3))
    trainer = SimpleNamespace(
        lightning_module=module,
        current_epoch=1,
        global_step=7,
        fit_loop=SimpleNamespace(state_dict=lambda: {"loops": 1}),
        callbacks=[Callback(print)],
        precision_plugin=SimpleNamespace(state_dict=dict),
        datamodule=None,
    )
    state = FitState(trainer)
    for _ in range(2):
        found = state.state_dict()["checkpoint"]
    assert found == {"loops": {"fit_loop": {"loops": 1}}, "callbacks": {}, "precision": {}, "number": 3}
    assert told == [
        "the checkpoint's callback mine holds a builtin_function_or_method: it is not there after a restart",
        "the checkpoint's mine holds a set: it is not there after a restart",
    ]
