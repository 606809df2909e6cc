"""`tt.Trainer`: the usual loop's bits, every field's steps exact, tests that leave no trace, files that torch loads."""

import threading
import traceback
from pathlib import Path

import pytest
import torch
from in_process_job import mlp
from safetensors.torch import load_file, save_file
from script_job import job as job  # a fixture
from script_job import loader, unfused
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt
from topotrain.config import job_file
from topotrain.config.intervals import StepInterval
from topotrain.config.job import Adam, Cluster, ConfigError, Job, LRGen, Step, Updater
from topotrain.core import events
from topotrain.core.optim.updater_block import build, set_lr
from topotrain.training import context
from topotrain.training.trainer.evaluation import BackgroundEvaluator
from topotrain.training.trainer.parameter_files import load_checkpoints

SGD = Updater(
    type="kSGD",
    momentum=0.9,
    clip_norm=0.5,
    clip_low=-0.1,
    clip_high=0.1,
    learning_rate=LRGen(type="kStep", base_lr=0.1, step_conf=Step(gamma=0.5, change_freq=4)),
)
ADAM = Updater(type="kAdam", learning_rate=LRGen(type="kFixed", base_lr=0.01), adam_conf=Adam())


def held_out(count: int = 22, **more: object) -> DataLoader:
    rng = torch.Generator().manual_seed(9)
    data = TensorDataset(torch.randn(count, 12, generator=rng), torch.randint(5, (count,), generator=rng))
    return DataLoader(data, **{"batch_size": 5, "shuffle": True, **more})


class Dropping(nn.Module):
    """Draws in every forward, and counts in a buffer how often it was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.inner(nn.functional.dropout(x, 0.2, self.training))


def right(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def by_hand(steps: int, optimizer=unfused, updater=None):
    """The states after 0, 1, … steps of the loop that everybody writes, and the generator at its end."""
    torch.manual_seed(3)
    model, data = Dropping(), loader()
    made = optimizer(model) if updater is None else build(updater, model.named_parameters())
    states = [state(model)]
    while True:
        for x, y in data:
            made.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if updater is not None:
                set_lr(made, updater, len(states) - 1)
                nn.utils.clip_grad_norm_(model.parameters(), updater.clip_norm)
                nn.utils.clip_grad_value_(model.parameters(), updater.clip_high)
            made.step()
            states.append(state(model))
            if len(states) > steps:
                return states, torch.get_rng_state()


def measured(values: dict[str, torch.Tensor]) -> dict[str, float]:
    """Loss and accuracy of these values on the held-out data."""
    model = Dropping().eval()
    model.load_state_dict(values)
    x, y = held_out(shuffle=False).dataset.tensors
    with torch.no_grad():
        return {"loss": float(nn.functional.cross_entropy(model(x), y)), "right": float(right(model(x), y))}


def trainer(job=None, **more):
    torch.manual_seed(3)
    model = Dropping()
    given = {"test": held_out(), "metrics": {"right": right}, "optimizer": unfused(model), **more}
    return tt.Trainer(model, nn.CrossEntropyLoss(), loader(), job=job, **given)


def curve(trained: tt.Trainer, kind: str = "test") -> list[tuple[int, dict[str, float]]]:
    return [(result.step, result.values) for result in trained.results if result.kind == kind]


def assert_close(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found == pytest.approx(expected, rel=1e-5)


# --- when ---------------------------------------------------------------------------------------------------------


def test_what_is_due_when():
    for freq, after, steps in ((0, 0, []), (3, 0, [0, 3, 6, 9]), (4, 2, [2, 6, 10]), (1, 8, [8, 9, 10]), (5, 20, [])):
        interval = StepInterval(freq, after)
        assert [step for step in range(11) if interval.due(step)] == steps
        passed = [len([step for step in steps if 0 < step <= n]) for n in range(11)]
        assert [interval.passed(step) for step in range(11)] == passed


# --- an ordinary process ------------------------------------------------------------------------------------------


def test_the_bits_of_the_usual_loop_and_every_field_at_its_steps(tmp_path, capsys):
    job = Job(
        cluster=Cluster(workspace=str(tmp_path / "w"), nworkers_per_group=3),
        train_steps=12,
        disp_freq=5,
        disp_after=2,
        test_freq=4,
        test_steps=-1,
        validate_freq=3,
        validate_after=6,
        validate_steps=2,
        checkpoint_freq=5,
        checkpoint_after=4,
    )
    trained = trainer(job, validate=held_out(40))
    trained.fit()
    rng = torch.get_rng_state()
    states, expected_rng = by_hand(12)
    assert same(state(trained.model), states[12])
    assert torch.equal(rng, expected_rng)
    assert trained.model.training
    assert [step for step, _ in curve(trained)] == [0, 4, 8, 12]
    assert [step for step, _ in curve(trained, "validate")] == [6, 9, 12]
    for step, values in curve(trained):
        assert_close(values, measured(states[step]))
    files = {path.name for path in (tmp_path / "w").iterdir()}
    assert files == {"step-4.safetensors", "step-9.safetensors", "step-12.safetensors"}
    for step in (4, 9, 12):
        assert same(load_file(tmp_path / "w" / f"step-{step}.safetensors"), states[step])
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step")] == ["step 2", "step 7", "step 12"]
    assert [line.split(":")[0] for line in lines[-4:]] == ["test_loss", "right", "validate_loss", "validate_right"]
    assert "topotrain run JOB.conf" in printed.err


def test_the_updater_block_is_followed_in_an_ordinary_process(tmp_path):
    job = Job(train_steps=11, updater=SGD)
    trained = trainer(job, test=None, optimizer=None)
    trained.fit()
    assert same(state(trained.model), by_hand(11, updater=SGD)[0][11])


def test_a_path_a_loss_of_the_scripts_own_and_a_number_of_test_batches(tmp_path, capsys):
    conf = tmp_path / "job.conf"
    conf.write_text(job_file.dumps(Job(train_steps=3, test_freq=2, test_steps=2, updater=ADAM)))
    seen, tested = [], []

    def loss(model, batch):
        seen.append((model.training, len(batch[0])))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metric(model, batch):
        tested.append(batch[0])
        return 0.0

    made = tt.Trainer(mlp(), loss, loader(), held_out(), job=str(conf), metrics={"first": metric})
    made.fit()
    train, test = [(True, 8)], [(False, 5)] * 2
    assert seen == test + train * 2 + test + train + test
    assert curve(made)[0][1].keys() == {"loss", "first"}
    # Of shuffled data, every test has the same batches.
    assert all(torch.equal(one, other) for one, other in zip(tested, tested[2:]))
    assert f"topotrain run {conf}" in capsys.readouterr().err


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "given", "words"),
    [
        ({}, {}, "train_steps = 0"),
        ({"train_steps": 3, "resume": True}, {}, "resume = true"),
        ({"train_steps": 3, "test_freq": 2}, {}, "test_steps = 0"),
        ({"train_steps": 3, "test_freq": 2, "test_steps": 1}, {"test": None}, "test_freq = 2: needs data"),
        ({"train_steps": 3, "validate_freq": 2, "validate_steps": 1}, {}, "validate_freq = 2: needs data"),
        ({"train_steps": 3}, {"optimizer": None}, "updater"),
        (
            {"train_steps": 3, "checkpoint_path": ("nowhere.safetensors",)},
            {},
            "checkpoint_path = 'nowhere.safetensors'",
        ),
        ({"train_steps": 3}, {"test": [1]}, "test = 'list'"),
        ({"train_steps": 3}, {"metrics": {"loss": right}}, "not called loss"),
        ({"train_steps": 3}, {"metrics": {"right": 3}}, r"metrics\['right'\] = 3"),
        (
            {"train_steps": 3, "test_freq": 1, "test_steps": 1},
            {"test": held_out(0, shuffle=False)},
            "at least one batch",
        ),
    ],
)
def test_what_is_refused(fields, given, words):
    with pytest.raises(ConfigError, match=words):
        trainer(Job(**fields), **given).fit()


def test_what_is_refused_of_the_loss_the_batch_the_model_and_the_process():
    with pytest.raises(ConfigError, match=r"topotrain run JOB\.conf"):
        trainer(None).fit()
    with pytest.raises(ConfigError, match=r"tt.Trainer job = 'int'"):
        trainer(3)
    with pytest.raises(ConfigError, match="make it a part of the model"):
        tt.Trainer(mlp(), nn.Linear(5, 1), loader())
    triples = DataLoader(TensorDataset(*[torch.ones(4, 12)] * 3))
    made = tt.Trainer(mlp(), nn.MSELoss(), triples, job=Job(train_steps=1, updater=ADAM))
    with pytest.raises(ConfigError, match=r"needs batches \(input, target\)"):
        made.fit()
    sparse, job = nn.EmbeddingBag(9, 5, sparse=True), Job(train_steps=1, checkpoint_freq=2, updater=ADAM)
    made = tt.Trainer(sparse, nn.MSELoss(), loader(), job=job)
    with pytest.raises(ConfigError, match="checkpoint_freq = 2: must be 0"):
        made.fit()


# --- files --------------------------------------------------------------------------------------------------------


def test_files_are_read_one_after_another_and_what_does_not_fit_is_told(tmp_path):
    one, two = str(tmp_path / "one.safetensors"), str(tmp_path / "two.safetensors")
    save_file({"0.bias": torch.full((25,), 1.0), "2.bias": torch.full((5,), 1.0)}, one)
    save_file({"2.bias": torch.full((5,), 2.0), "old": torch.ones(1)}, two)
    model = mlp()
    weight = model[0].weight.clone()
    found = load_checkpoints(model, [one, two])
    assert model[0].bias.unique().item() == 1 and model[2].bias.unique().item() == 2
    assert torch.equal(model[0].weight, weight)
    assert found[0] == f"{one}: 2 tensors taken; not in it: 0.weight, 2.weight"
    assert found[1].endswith("not in it: 0.weight, 0.bias, 2.weight; not in the model: old")
    save_file({"2.bias": torch.ones(6), "0.bias": torch.zeros(25)}, two)
    with pytest.raises(ConfigError, match=r"2.bias must have the model's shape \(5,\), but has \(6,\)"):
        load_checkpoints(model, [two])
    assert model[0].bias.unique().item() == 1, "half of a file was taken"
    save_file({"other": torch.ones(6)}, two)
    with pytest.raises(ConfigError, match=r"has no tensor of the model: it has other; the model 0\.weight, 0\.bias"):
        load_checkpoints(model, [two])
    Path(two).write_text("no tensors")
    with pytest.raises(ConfigError, match=r"checkpoint_path = .*two\.safetensors.*must be a safetensors file"):
        load_checkpoints(model, [two])


# --- a job of one worker in this process --------------------------------------------------------------------------


@pytest.mark.parametrize("pull", ["kStep", "kLazy"])
def test_a_job_has_the_bits_of_the_usual_loop_and_tests_what_it_pulled(job, tmp_path, capsys, monkeypatch, pull):
    fields = {"train_steps": 9, "test_freq": 3, "test_steps": -1, "checkpoint_freq": 6}
    here = job(pull=pull, **fields)
    torch.manual_seed(3)
    model = Dropping()
    metrics = {"right": lambda model, batch: right(model(batch[0]), batch[1])}
    loss = InStep(3, monkeypatch)
    trained = tt.Trainer(model, loss, loader(), held_out(), optimizer=unfused(model), metrics=metrics)
    trained.fit()
    rng = torch.get_rng_state()
    here.finish()
    states, expected_rng = by_hand(9)
    assert torch.equal(rng, expected_rng), "the script's generator was used"
    assert same(load_file(tmp_path / "final.safetensors"), states[9])
    assert same(load_file(tmp_path / "step-6.safetensors"), states[6])
    assert {path.name for path in tmp_path.glob("step-*")} == {f"step-{n}.safetensors" for n in (0, 6, 9)}
    told = [(event.step, dict(event.values)) for event in here.heard(events.Tested)]
    assert told == curve(trained)
    assert [step for step, _ in told] == [0, 3, 6, 9]
    for step, values in told:
        assert_close(values, measured(states[step]))
    (metrics,) = here.heard(events.Metrics)
    assert metrics.values == {"test_loss": told[-1][1]["loss"], "right": told[-1][1]["right"]}
    assert not here.heard(events.Notice)
    assert "test @ step 3" in capsys.readouterr().out


class InStep:
    """A loss that lets an evaluation begin when the training is a step further, and end before the next is due."""

    def __init__(self, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.every, self.calls, self.further = every, 0, threading.Event()
        self.beside: list[BackgroundEvaluator] = []
        init = BackgroundEvaluator.__init__

        def noted(beside: BackgroundEvaluator, *args: object) -> None:
            init(beside, *args)
            self.beside.append(beside)

        monkeypatch.setattr(BackgroundEvaluator, "__init__", noted)

    def __call__(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if model.training:
            self.calls += 1
            if self.calls % self.every == 2:
                self.further.set()
            if self.calls % self.every == 0:
                running = self.beside[0]._running
                if running is not None:  # else its result was taken
                    running.result(30)
                self.further.clear()
        elif threading.current_thread().name.startswith("evaluation"):
            assert self.further.wait(30)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_while_an_evaluation_runs_others_are_left_out_and_counted(job):
    here = job(train_steps=5, test_freq=1, test_steps=1)
    over, steps = threading.Event(), []

    def loss(model, batch):
        if model.training:
            steps.append(1)
            if len(steps) == 5:
                over.set()
        else:
            assert over.wait(30)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    model = mlp()
    made = tt.Trainer(model, loss, loader(), held_out(), optimizer=unfused(model))
    made.fit()
    here.finish()
    assert [step for step, _ in curve(made)] == [0, 5]
    assert [event.skipped for event in here.heard(events.Tested)] == [4, 4]
    (notice,) = here.heard(events.Notice)
    assert notice.text.startswith("4 evaluations were left out")


def test_what_an_evaluation_raises_ends_the_training_with_its_own_lines(job):
    job(train_steps=500, test_freq=1, test_steps=1)

    def metric(output, target):
        return 1 / 0

    with pytest.raises(ZeroDivisionError) as found:
        trainer(metrics={"metric": metric}).fit()
    assert "return 1 / 0" in "".join(traceback.format_exception(found.value))
    assert not any(thread.name.startswith("evaluation") for thread in threading.enumerate())


def test_an_evaluation_tells_the_job_nothing(job):
    here = job(train_steps=1)
    trainer(test=None).fit()
    with context.outside_step():
        tt.weight(7)
        with tt.local():
            assert not here.context.worker.path.private
    assert here.context.worker.batches.weight() != 7
    tt.weight(7)
    assert here.context.worker.batches.weight() == 7
    here.finish()


def test_a_model_that_cannot_be_copied_is_refused_with_a_reason(job):
    job(train_steps=1, test_freq=1, test_steps=1, updater=ADAM)
    model = mlp()
    model.lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be copied for testing beside the training"):
        tt.Trainer(model, nn.CrossEntropyLoss(), loader(), held_out()).fit()
