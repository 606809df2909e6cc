"""A model cut over workers that are threads: the same outputs, losses and gradients as the whole model's."""

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_workers import (
    BATCH,
    NUMBER,
    SAME,
    WHOLE,
    Cut,
    GroupMailboxes,
    MailboxChannel,
    at,
    feature,
    make_runner,
    mean_gradients,
    rows,
    together,
)
from torch import nn
from torch.nn import functional as F

from topotrain.config.field_checks import ConfigError
from topotrain.parallel.program.split_program import Program, SizeArgument, StepKind, SymbolicShape
from topotrain.parallel.runtime.channel import ControlEdge, TensorKey
from topotrain.parallel.runtime.program_runner import Runner, hash_of

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def train(
    program: Program,
    model: nn.Module,
    shares: list[tuple[Any, ...]],
    loss: Loss = lambda output, *_: output.square().mean(),
    weights: list[float] | None = None,
    steps: int = 2,
    mailboxes: GroupMailboxes | None = None,
    **settings: Any,
) -> tuple[list[float], nn.Module]:
    """Losses of the group and the model after so many steps; every worker has a copy of the whole model."""
    weights = weights or [float(len(share[0])) for share in shares]
    count = len(shares)
    models = [copy.deepcopy(model) for _ in shares]
    channels: list[MailboxChannel | None] = [None] * count
    mailboxes = mailboxes or GroupMailboxes(count)
    runners = [
        make_runner(program, models[k], MailboxChannel(mailboxes, k), lambda k=k: weights[k], **settings)
        for k in range(count)
    ]
    losses = []
    for _ in range(steps):

        def work(channel: MailboxChannel) -> float:
            channels[channel.me] = channel
            value = loss(runners[channel.me](*shares[channel.me]), *shares[channel.me])
            value.backward()
            return value.item()

        told = together(count, work, mailboxes)
        counts = [runner.counts for runner in runners]
        losses.append(sum(w * v for w, v in zip(weights, told, strict=True) if w) / sum(weights))
        means = mean_gradients(models, counts)
        for replica in models:
            for name, parameter in replica.named_parameters():
                with torch.no_grad():
                    if means[name] is not None:
                        parameter -= 0.1 * means[name]
                parameter.grad = None
    assert not any(len(store) for store in mailboxes.stores)
    return losses, models[0]


def whole(
    model: nn.Module,
    shares: list[tuple[Any, ...]],
    loss: Loss = lambda output, *_: output.square().mean(),
    steps: int = 2,
) -> tuple[list[float], nn.Module]:
    model = copy.deepcopy(model)
    given = [torch.cat([share[n] for share in shares]) for n in range(len(shares[0]))]
    losses = []
    for _ in range(steps):
        value = loss(model(*given), *given)
        value.backward()
        losses.append(value.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return losses, model


def same(one: tuple[list[float], nn.Module], other: tuple[list[float], nn.Module], exactly: bool = False) -> None:
    tolerance = 0.0 if exactly else 2e-6
    assert one[0] == pytest.approx(other[0], rel=2e-6)
    for name, parameter in one[1].named_parameters():
        assert near(parameter, other[1].get_parameter(name), tolerance), name


def near(one: torch.Tensor, other: torch.Tensor, tolerance: float = 2e-6) -> bool:
    return bool(one.shape == other.shape and ((one - other).abs() <= tolerance * (1 + other.abs())).all())


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(
            x.mean() + self.act(self.b(self.act(self.a(x)))) if False else self.act(self.b(self.act(self.a(x))))
        )


def three(workers: int, *places: Any) -> Program:
    """Three's graph with a, b and c at these places, the activations where their input is."""
    cut = Cut(workers)
    x = cut.input("x", rows(4))
    for name, size, place in zip("abc", (8, 8, 2), places, strict=True):
        x = cut.module(name, place, rows(size), cut.move(x, place))
        if name != "c":
            x = cut.module("act", place, rows(size), x)
    return cut.program(cut.move(x, BATCH))


def shares_of(*counts: int) -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=generator),) for n in counts]


@pytest.mark.parametrize("places", [(at(0), at(1), at(0)), (BATCH, at(1), BATCH), (at(1), BATCH, at(0)), (at(0),) * 3])
@pytest.mark.parametrize("counts", [(4, 4), (3, 5), (7, 1)])
def test_layers_at_places(places, counts):
    same(train(three(2, *places), Three(), shares_of(*counts)), whole(Three(), shares_of(*counts)))


def test_a_layer_on_one_worker_has_the_whole_models_bits():
    places = (at(0), at(1), at(0))
    same(train(three(2, *places), Three(), shares_of(4, 4)), whole(Three(), shares_of(4, 4)), exactly=True)


@pytest.mark.parametrize("counts", [(4, 4), (5, 0), (0, 0, 6), (1, 0, 2)])
def test_a_worker_without_samples_takes_part(counts):
    workers = len(counts)
    program = three(workers, at(0), at(workers - 1), at(0))
    weights = [float(count) for count in counts]
    same(train(program, Three(), shares_of(*counts), weights=weights), whole(Three(), shares_of(*counts)))


def test_repeated_samples_of_weight_0_count_nothing_and_parameters_that_live_there_count():
    shares = shares_of(4, 2)
    split = train(three(2, BATCH, at(1), BATCH), Three(), [shares[0], (shares[0][0][:1],)], weights=[4.0, 0.0])
    same(split, whole(Three(), shares[:1]))


@pytest.mark.parametrize("micros", [2, 3, 8])
@pytest.mark.parametrize("counts", [(4, 4), (5, 3)])
def test_microbatches(micros, counts):
    program = three(2, at(0), at(1), BATCH)
    same(train(program, Three(), shares_of(*counts), microbatches=micros), whole(Three(), shares_of(*counts)))


class Noting(MailboxChannel):
    """Writes down what a worker says and hears of gradients."""

    def __init__(self, mailboxes: GroupMailboxes, me: int) -> None:
        super().__init__(mailboxes, me)
        self.noted: list[str] = []

    def send(self, to: int, key: TensorKey, tensor: torch.Tensor, grad: bool = False) -> None:
        self.noted += ["says"] * key.backward
        super().send(to, key, tensor, grad)

    def receive(self, source: int, key: TensorKey) -> tuple[torch.Tensor, bool]:
        self.noted += ["hears"] * key.backward
        return super().receive(source, key)


def test_the_last_stage_receives_all_micro_batches_before_the_first_one_goes_back():
    program, shares, mailboxes = three(2, at(0), at(1), at(1)), shares_of(8, 8), GroupMailboxes(2)
    channels = [Noting(mailboxes, k) for k in range(2)]
    runners = [make_runner(program, copy.deepcopy(Three()), channels[k], lambda: 8.0, microbatches=4) for k in range(2)]
    together(2, lambda channel: runners[channel.me](*shares[channel.me]).square().mean().backward(), mailboxes)
    assert channels[0].noted == ["says"] * 4 + ["hears"] * 4


class Halves(nn.Module):
    """Rows of a linear layer are cut over workers: its weight here is all rows, sliced where it is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.wide(x)))


def halves(workers: int, me: int) -> Program:
    first, end = 6 * me // workers, 6 * (me + 1) // workers

    def part(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight[first:end], bias[first:end])

    cut = Cut(workers)
    x = cut.input("x", rows(4))
    weight = cut.step(StepKind.ATTRIBUTE, "wide.weight", SAME, SymbolicShape((6, 4), "float32"))
    bias = cut.step(StepKind.ATTRIBUTE, "wide.bias", SAME, SymbolicShape((6,), "float32"))
    hidden = cut.call(part, feature(1), rows(6), cut.move(x, WHOLE), weight, bias)
    hidden = cut.call(torch.tanh, feature(1), rows(6), hidden)
    return cut.program(cut.module("last", BATCH, rows(3), cut.move(hidden, BATCH)))


@pytest.mark.parametrize("counts", [(4, 4), (2, 5, 1)])
def test_features_that_are_cut(counts):
    workers = len(counts)
    model, shares = Halves(), shares_of(*counts)
    replicas = [copy.deepcopy(model) for _ in counts]
    weights = [float(count) for count in counts]

    def work(channel: MailboxChannel) -> float:
        runner = make_runner(halves(workers, channel.me), replicas[channel.me], channel, lambda: weights[channel.me])
        value = runner(*shares[channel.me]).square().mean()
        value.backward()
        return value.item()

    told = together(workers, work)
    assert sum(w * v for w, v in zip(weights, told, strict=True)) / sum(weights) == pytest.approx(
        whole(model, shares, steps=1)[0][0]
    )
    model(torch.cat([share[0] for share in shares])).square().mean().backward()
    found = mean_gradients(replicas, weights)
    assert all(near(found[name], parameter.grad) for name, parameter in model.named_parameters())


# --- both ways through one graph --------------------------------------------------------------------------------------


def call_all(
    program: Program,
    model: nn.Module,
    shares: list[tuple[Any, ...]],
    use: Callable[[Runner, MailboxChannel], Any],
    **kwargs: Any,
) -> tuple[list[Any], list[nn.Module]]:
    """What `use` gives with each worker's runner, and the workers' models."""
    models = [copy.deepcopy(model) for _ in shares]
    mailboxes = GroupMailboxes(len(shares))

    def work(channel: MailboxChannel) -> Any:
        return use(
            make_runner(program, models[channel.me], channel, lambda: float(len(shares[channel.me][0])), **kwargs),
            channel,
        )

    results = together(len(shares), work, mailboxes)
    assert not any(len(store) for store in mailboxes.stores)
    return results, models


def test_without_gradients_nothing_is_kept_and_nothing_goes_back():
    shares = shares_of(3, 2)

    def use(runner: Runner, channel: MailboxChannel) -> torch.Tensor:
        runner.model.eval()
        with torch.no_grad():
            return runner(*shares[channel.me])

    found, _ = call_all(three(2, at(0), at(1), at(0)), Three(), shares, use)
    assert not any(output.requires_grad for output in found)
    assert torch.equal(torch.cat(found), Three()(torch.cat([share[0] for share in shares])))


def test_a_graph_is_gone_through_twice():
    shares = shares_of(4, 4)

    def use(runner: Runner, channel: MailboxChannel) -> None:
        output = runner(*shares[channel.me])
        output.square().mean().backward(retain_graph=True)
        output.abs().mean().backward()

    _, models = call_all(three(2, at(0), at(1), BATCH), Three(), shares, use)
    model = Three()
    output = model(torch.cat([share[0] for share in shares]))
    (output.square().mean() + output.abs().mean()).backward()
    found = mean_gradients(models, [4.0, 4.0])
    assert all(near(found[name], parameter.grad) for name, parameter in model.named_parameters())


def test_a_loss_that_needs_only_one_output_lets_all_moves_go_back():
    """Worker 1 looks at the left half alone, so on it nothing depends on what came from b and c."""

    class Two(Three):
        def forward(self, x: torch.Tensor) -> Any:
            return {"left": self.a(x), "right": (self.b(self.a(x)), 3)}

    cut = Cut(2)
    x = cut.input("x", rows(4))
    left = cut.module("a", at(0), rows(8), cut.move(x, at(0)))
    right = cut.module("b", at(1), rows(8), cut.move(left, at(1)))
    program = cut.program({"left": cut.move(left, BATCH), "right": (cut.move(right, BATCH), 3)})
    shares = shares_of(4, 4)

    def use(runner: Runner, channel: MailboxChannel) -> None:
        output = runner(*shares[channel.me])
        assert output["right"][1] == 3
        (output["left"].mean() + (output["right"][0].mean() if channel.me == 0 else 0.0)).backward()

    _, models = call_all(program, Two(), shares, use)
    model = Two()
    outputs = [model(share[0]) for share in shares]
    (sum(output["left"].mean() for output in outputs) / 2 + outputs[0]["right"][0].mean() / 2).backward()
    found = mean_gradients(models, [4.0, 4.0])
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or near(found[name], parameter.grad), name


def test_a_value_is_used_here_and_there_and_its_pieces_are_views():
    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, other = self.a(x).chunk(2, 1)
            return self.b(one) * other + one

    cut = Cut(2)
    x = cut.input("x", rows(4))
    made = cut.module("a", BATCH, rows(8), x)
    pieces = cut.step(StepKind.METHOD, "chunk", BATCH, None, made, 2, 1)
    one, other = (cut.call(operator.getitem, BATCH, rows(4), pieces, index) for index in range(2))
    there = cut.move(cut.module("b", at(1), rows(4), cut.move(one, at(1))), BATCH)
    product = cut.call(torch.mul, BATCH, rows(4), there, other)
    program = cut.program(cut.call(torch.add, BATCH, rows(4), product, one))
    same(train(program, Pieces(), shares_of(4, 2)), whole(Pieces(), shares_of(4, 2)))


def test_what_is_written_over_after_it_has_left_arrives_as_it_was():
    shares = shares_of(2, 2)
    cut = Cut(2)
    x = cut.input("x", rows(4))
    made = cut.module("a", BATCH, rows(8), x)
    there = cut.move(made, at(1))
    over = cut.module("act", BATCH, rows(8), made)
    back = cut.move(cut.module("b", at(1), rows(8), there), BATCH)
    program = cut.program((cut.call(torch.add, BATCH, rows(8), over, back), back))
    found, _ = call_all(program, Three(), shares, lambda runner, channel: runner(*shares[channel.me])[0])
    model = Three()
    hidden = model.a(torch.cat([share[0] for share in shares]))
    assert near(torch.cat(found), model.b(hidden) + torch.relu(hidden))


def test_what_the_model_returns_may_be_written_to():
    shares = shares_of(2, 2)

    def use(runner: Runner, channel: MailboxChannel) -> None:
        output = runner(*shares[channel.me])
        output += 1.0
        output[:, 0] = 0.0
        output.sum().backward()

    _, models = call_all(three(2, at(0), at(1), BATCH), Three(), shares, use)
    assert all(found is not None for found in mean_gradients(models, [1.0, 1.0]).values())


def test_numbers_of_samples_are_those_of_the_place():
    """A mean written with x.size(0): by the whole batch on one worker, by the share elsewhere."""
    cut = Cut(2)
    x = cut.input("x", rows(4))
    total = cut.step(
        StepKind.METHOD, "sum", at(1), NUMBER, cut.move(cut.module("a", at(1), rows(8), cut.move(x, at(1))), at(1))
    )
    mean = cut.call(torch.div, at(1), NUMBER, total, SizeArgument(1, 0))
    program = cut.program((cut.move(mean, WHOLE), SizeArgument(2, 1)))
    shares = shares_of(3, 5)

    def use(runner: Runner, channel: MailboxChannel) -> tuple[float, int]:
        loss, size = runner(*shares[channel.me])
        loss.backward()
        return loss.item(), size

    found, models = call_all(program, Three(), shares, use)
    model = Three()
    loss = model.a(torch.cat([share[0] for share in shares])).sum() / 8
    loss.backward()
    assert [value for value, _ in found] == pytest.approx([loss.item()] * 2)
    assert [size for _, size in found] == [7, 11]
    assert near(mean_gradients(models, [3.0, 5.0])["a.weight"], model.a.weight.grad)


def test_batchnorm_on_one_worker_sees_the_whole_batch_and_micro_batches_in_order():
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.a(x))

    cut = Cut(2)
    x = cut.input("x", rows(4))
    hidden = cut.module("a", BATCH, rows(8), x)
    program = cut.program(cut.move(cut.module("norm", at(1), rows(8), cut.move(hidden, at(1))), BATCH))
    shares = shares_of(4, 4)
    loss: Loss = lambda output, *_: (output * torch.linspace(0, 1, 8)).square().mean()  # noqa: E731
    same(train(program, Norm(), shares, loss), whole(Norm(), shares, loss))
    _, models = call_all(
        program, Norm(), shares, lambda runner, channel: runner(*shares[channel.me]) is None, microbatches=2
    )
    model = Norm()
    for half in (0, 2):
        model(torch.cat([share[0][half : half + 2] for share in shares]))
    assert near(models[1].norm.running_mean, model.norm.running_mean)


def test_under_autocast_values_travel_as_they_are():
    shares = shares_of(2, 2)

    def use(runner: Runner, channel: MailboxChannel) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = runner(*shares[channel.me])
        output.float().square().mean().backward()
        return output

    found, models = call_all(three(2, at(0), at(1), BATCH), Three(), shares, use)
    model = Three()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(torch.cat([share[0] for share in shares]))
    expected.float().square().mean().backward()
    assert found[0].dtype is torch.bfloat16 and torch.equal(torch.cat(found), expected)
    assert near(mean_gradients(models, [1.0, 1.0])["a.weight"], model.a.weight.grad, 1e-2)


def test_frozen_layers_send_no_gradient():
    model = Three()
    model.a.requires_grad_(False)
    mailboxes = GroupMailboxes(2)
    shares = shares_of(4, 4)
    runner_of = {}

    def work(channel: MailboxChannel) -> None:
        runner_of[channel.me] = make_runner(three(2, at(0), at(1), at(1)), copy.deepcopy(model), channel, lambda: 4.0)
        runner_of[channel.me](*shares[channel.me]).square().mean().backward()

    together(2, work, mailboxes)
    assert {key.edge for _, _, key, _ in mailboxes.sent if key.backward} == {2}  # the output's, not a's result
    assert runner_of[1].model.b.weight.grad is not None


# --- dropout ----------------------------------------------------------------------------------------------------------


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.drop, self.alpha, self.c = nn.Linear(4, 8), nn.Dropout(0.5), nn.AlphaDropout(0.2), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.alpha(self.drop(F.dropout(self.a(x), 0.25))))


def drops(places: tuple[Any, Any, Any]) -> Program:
    cut = Cut(2)
    x = cut.module("a", BATCH, rows(8), cut.input("x", rows(4)))
    x = cut.call(F.dropout, places[0], rows(8), cut.move(x, places[0]), 0.25, random=True)
    for name, place in zip(("drop", "alpha"), places[1:], strict=True):
        x = cut.module(name, place, rows(8), cut.move(x, place), random=True)
    return cut.program(cut.module("c", BATCH, rows(2), cut.move(x, BATCH)))


@pytest.mark.parametrize("places", [(BATCH,) * 3, (at(0), feature(1), at(1)), (feature(1), BATCH, feature(1))])
@pytest.mark.parametrize("micros", [1, 2])
def test_masks_are_those_of_the_unsplit_model(places, micros):
    shares = shares_of(4, 3)

    def use(runner: Runner, channel: MailboxChannel) -> torch.Tensor:
        runner._generator = torch.Generator().manual_seed(5)
        return runner(*shares[channel.me])

    found, _ = call_all(drops(places), Drops(), shares, use, microbatches=micros)
    model = Drops()
    torch.manual_seed(5)
    assert near(torch.cat(found), model(torch.cat([share[0] for share in shares])))


def test_in_evaluation_modules_drop_nothing():
    module = nn.Dropout(0.5).eval()
    cut = Cut(1)
    program = cut.program(cut.module("0", BATCH, rows(4), cut.input("input", rows(4)), random=True))
    (x,) = shares_of(3)[0]
    found, _ = call_all(program, nn.Sequential(module), [(x,)], lambda runner, channel: runner(x))
    assert torch.equal(found[0], x)


# --- scripts that do not fit together ---------------------------------------------------------------------------------


def disagree(use: Callable[[Runner, MailboxChannel], Any], message: str, program: Program | None = None) -> None:
    with pytest.raises(ConfigError, match=message):
        call_all(program or three(2, at(0), at(1), BATCH), Three(), shares_of(2, 2), use)


def test_another_mode_is_told():
    def use(runner: Runner, channel: MailboxChannel) -> Any:
        runner.model.train(channel.me == 0)
        return runner(*shares_of(2, 2)[channel.me])

    disagree(use, "worker 1 of the group calls the model in another mode")


def test_gradients_on_one_worker_alone_are_told():
    def use(runner: Runner, channel: MailboxChannel) -> Any:
        with torch.set_grad_enabled(channel.me == 0):
            return runner(*shares_of(2, 2)[channel.me])

    disagree(use, "switched on or off")


def test_another_state_of_chance_is_told():
    def use(runner: Runner, channel: MailboxChannel) -> Any:
        runner._generator = torch.Generator().manual_seed(channel.me)
        return runner(*shares_of(2, 2)[channel.me])

    with pytest.raises(ConfigError, match="the same number on all workers"):
        call_all(drops((BATCH,) * 3), Drops(), shares_of(2, 2), use)


@pytest.mark.parametrize("more", [0, 1])
def test_one_call_more_on_one_worker_is_told(more):
    def use(runner: Runner, channel: MailboxChannel) -> Any:
        for _ in range(2 if channel.me == more else 1):
            runner(*shares_of(2, 2)[channel.me])
        if channel.me != more:
            runner.sync.stepped()
        return None

    disagree(
        use, f"worker {1 - more} of the group called the split model 1 times .* worker {more} has called it 2 times"
    )


def test_a_worker_that_leaves_out_its_backward_is_told():
    def use(runner: Runner, channel: MailboxChannel) -> Any:
        output = runner(*shares_of(2, 2)[channel.me])
        if channel.me == 0:
            output.mean().backward()
        runner.sync.stepped()

    disagree(use, "worker 1 of the group goes on to optimizer.step.. after 0 backwards")


def test_a_worker_that_calls_again_before_its_backward_is_told():
    def use(runner: Runner, channel: MailboxChannel) -> Any:
        output = runner(*shares_of(2, 2)[channel.me])
        if channel.me == 0:
            output.mean().backward()
        runner(*shares_of(2, 2)[channel.me])

    disagree(use, "worker 1 of the group calls the split model again after 0 backwards, worker 0")


def test_steps_and_calls_without_gradient_in_between_are_no_disagreement():
    shares = shares_of(2, 2)

    def use(runner: Runner, channel: MailboxChannel) -> None:
        for _ in range(3):
            runner(*shares[channel.me]).mean().backward()
            runner.sync.stepped()
            with torch.no_grad():
                runner(*shares[channel.me])

    models = [Three(), Three()]
    mailboxes = GroupMailboxes(2)
    together(
        2,
        lambda channel: use(
            make_runner(three(2, at(0), at(1), BATCH), models[channel.me], channel, lambda: 2.0), channel
        ),
        mailboxes,
    )
    left = [key for store in mailboxes.stores for _, key in store._came]
    assert all(key.edge == ControlEdge.STEPPED for key in left) and len(left) <= 2  # no later forward has read them


def test_an_error_in_a_step_names_the_line_and_ends_all():
    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken")

    model = Three()
    model.b = Breaks()
    with pytest.raises(RuntimeError, match="broken") as caught:
        call_all(three(2, at(0), at(1), BATCH), model, shares_of(2, 2), lambda r, t: r(*shares_of(2, 2)[t.me]))
    assert "net.py:4" in caught.value.__notes__[0] and "on worker 1" in caught.value.__notes__[0]


def test_arguments_that_do_not_fit_are_told():
    disagree(lambda runner, channel: runner(torch.ones(2, 5)), r"x = \(2, 5\): the split model takes .* \(samples, 4\)")
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        call_all(three(2, at(0), at(1), BATCH), Three(), shares_of(2, 2), lambda runner, channel: runner())


def test_the_number_of_a_dtype_is_its_own() -> None:
    dtypes = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
    assert len({hash_of(each) for each in dtypes}) == len(set(dtypes))
