"""A model split over workers that are threads: what is sent, what is drawn, and scripts that do not fit together."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from split_workers import Block, Group, learns_the_same, squares, together
from torch import nn
from torch.nn import functional as F

from topotrain.config.field_checks import ConfigError
from topotrain.config.job import Schedule
from topotrain.parallel.runtime.channel import ControlEdge
from topotrain.parallel.runtime.program_runner import Runner, hash_of

FEATURES = partial(Block, partition_dim=1)


def at(worker: int, match: str) -> Block:
    return Block(f"^({match})$", location=worker)


class Net(nn.Module):
    """Layers a, b and c of which `forward(net, *arguments)` makes a model."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.act = nn.ReLU(inplace=True)
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.told = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.told(self, x)


class Loss(Net):
    """Returns its own loss."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.told(self, x), y)


def straight(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.c(net.act(net.b(net.act(net.a(x)))))


def shares_of(*counts: int, columns: int = 1) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=generator), torch.randn(n, 2, generator=generator))[:columns] for n in counts]


def three(**settings: Any) -> Group:
    """Two workers with a and b on one each, and c by samples."""
    return Group(Net(straight), [at(0, "a|act"), at(1, "b")], shares_of(4, 4), **settings)


# --- it learns the same --------------------------------------------------------------------------------------------

PIPE = [at(0, "a"), at(1, "b"), at(0, "c")]


@pytest.mark.parametrize(
    ("blocks", "counts", "settings"),
    [
        (PIPE, (4, 4), {"exactly": True}),  # a layer on one worker has the whole model's bits
        (PIPE, (3, 5), {"microbatches": 2}),
        ([at(1, "b")], (7, 1), {}),
        ([at(1, "a"), at(0, "c")], (5, 3), {"microbatches": 8}),
        ([at(0, "a|b|c")], (4, 4), {"microbatches": 3}),
        (PIPE, (5, 0), {}),  # a worker without samples takes part
        ([at(0, "a"), at(2, "b"), at(0, "c")], (0, 0, 6), {}),
        ([at(0, "a"), at(2, "b"), at(0, "c")], (1, 0, 2), {}),
        ([FEATURES("^[ab]$")], (4, 4), {}),
        ([FEATURES("^a$"), at(1, "b")], (2, 5, 1), {"microbatches": 2}),
    ],
)
def test_layers_anywhere_learn_what_the_whole_model_learns(blocks, counts, settings):
    learns_the_same(Net(straight), blocks, shares_of(*counts), **settings)


def pieces(net: Net, x: torch.Tensor) -> torch.Tensor:
    """A value is used here and there, and its pieces are views."""
    one, other = net.a(x).chunk(2, 1)
    return net.b(one) * other + one


def written_over(net: Net, x: torch.Tensor) -> torch.Tensor:
    """What is written over after it has left arrives as it was."""
    made = net.a(x)
    there = net.b(made * 1.0)
    return net.act(made) + there


def by_number(net: Net, x: torch.Tensor) -> torch.Tensor:
    """A mean written with x.size(0): by the whole batch on one worker."""
    return net.b(net.a(x)).sum() / x.size(0)


@pytest.mark.parametrize(
    ("model", "blocks", "loss"),
    [
        (Net(pieces, b=nn.Linear(4, 4)), [at(1, "b")], squares),
        (Net(written_over), [at(1, "b")], squares),
        (Net(by_number), [at(1, "a|b")], lambda out, *_: out),
        (
            Net(lambda net, x: net.b(net.a(x)), b=nn.BatchNorm1d(8)),  # on one worker it sees the whole batch
            [at(1, "b")],
            lambda out, *_: (out * torch.linspace(0, 1, 8)).square().mean(),
        ),
    ],
)
def test_values_that_are_used_in_any_way(model, blocks, loss):
    learns_the_same(model, blocks, shares_of(3, 5), loss)


@pytest.mark.parametrize(
    ("blocks", "counts"),
    [
        ([at(0, "a|act"), at(1, "b"), at(2, "c")], (8, 8, 8)),
        ([at(1, "b"), at(0, "c|a")], (4, 7)),
        ([at(1, "b|c")], (5, 6)),
        ([at(1, "b")], (5, 5)),
    ],
)
@pytest.mark.parametrize("micros", [1, 4])
def test_the_schedule_1f1b_learns_the_same(blocks, counts, micros):
    settings = {"schedule": Schedule.k1F1B, "microbatches": micros}
    learns_the_same(Loss(straight), blocks, shares_of(*counts, columns=2), lambda out, *_: 0.5 * out, **settings)


DROPS = {"act": nn.Dropout(0.5), "b": nn.AlphaDropout(0.2)}


@pytest.mark.parametrize(
    ("blocks", "micros"),
    [([], 2), ([at(0, "act"), at(1, "b|c")], 1), ([FEATURES("^a$")], 2), ([at(1, "b")], 2)],
)
def test_masks_are_those_of_the_unsplit_model(blocks, micros):
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.c(net.b(net.act(F.dropout(net.a(x), 0.25))))

    learns_the_same(Net(forward, **DROPS), blocks, shares_of(4, 3), seed=5, microbatches=micros)


# --- both ways through one graph --------------------------------------------------------------------------------------


def test_without_gradients_nothing_is_kept_and_modules_drop_nothing():
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.c(net.act(net.b(net.a(x))))

    for schedule in Schedule:
        model = Net(forward, act=nn.Dropout(0.5))
        expected = model.eval()(torch.cat([share[0] for share in shares_of(3, 2)]))
        model.train()
        group = Group(model, [at(0, "a"), at(1, "b")], shares_of(3, 2))

        def use(runner: Runner, share: tuple[torch.Tensor, ...]) -> torch.Tensor:
            runner.model.eval()
            with torch.no_grad():
                return runner(*share)

        found = group.each(use)
        assert not any(output.requires_grad for output in found) and schedule
        torch.testing.assert_close(torch.cat(found), expected)


def test_a_graph_is_gone_through_twice_and_what_it_returns_may_be_written_to():
    def use(runner: Runner, share: tuple[torch.Tensor, ...]) -> None:
        output = runner(*share)
        output.square().mean().backward(retain_graph=True)
        output.abs().mean().backward()
        output = runner(*share)
        output += 1.0
        output[:, 0] = 0.0
        output.mean().backward()

    group, model = three(), Net(straight)
    group.each(use)
    group.move()
    whole = torch.cat([share[0] for share in group.shares])
    output = model(whole)
    more = model(whole) + 1.0
    (output.square().mean() + output.abs().mean() + more[:, 1].sum() / more.numel()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(group.parameters()[name], parameter.detach() - 0.1 * parameter.grad)


def test_a_loss_that_needs_only_one_output_lets_all_moves_go_back():
    """Worker 1 looks at the left half alone, so on it nothing depends on what came from b."""

    def forward(net: Net, x: torch.Tensor) -> Any:
        return {"left": net.a(x), "right": (net.b(net.a(x)), 3)}

    group, model = Group(Net(forward), [at(0, "a"), at(1, "b")], shares_of(4, 4)), Net(forward)

    def use(runner: Runner, share: tuple[torch.Tensor, ...]) -> None:
        output = runner(*share)
        assert output["right"][1] == 3
        (output["left"].mean() + (output["right"][0].mean() if runner.channel.me == 0 else 0.0)).backward()

    group.each(use)
    group.move()
    outputs = [model(share[0]) for share in group.shares]
    (sum(output["left"].mean() for output in outputs) / 2 + outputs[0]["right"][0].mean() / 2).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(group.parameters()[name], parameter.detach() - 0.1 * parameter.grad)


def test_under_autocast_values_travel_as_they_are_and_frozen_layers_send_no_gradient():
    model = Net(straight)
    model.a.requires_grad_(False)
    group = Group(model, [at(0, "a"), at(1, "b|c")], shares_of(2, 2))

    def use(runner: Runner, share: tuple[torch.Tensor, ...]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = runner(*share)
        output.float().square().mean().backward()
        return output

    found = group.each(use)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(torch.cat([share[0] for share in group.shares]))
    assert found[0].dtype is torch.bfloat16 and torch.equal(torch.cat(found), expected)
    # Only the output's gradient travels, and not that of what the frozen layer made.
    assert len({key.edge for _, _, key, _ in group.mailboxes.sent if key.backward}) == 1
    assert group.models[1].b.weight.grad is not None


# --- schedules -----------------------------------------------------------------------------------------------------


def test_1f1b_needs_a_model_that_returns_its_loss():
    with pytest.raises(ConfigError, match="schedule = 'k1F1B': needs a forward that returns the loss"):
        three(schedule=Schedule.k1F1B)


# --- scripts that do not fit together ---------------------------------------------------------------------------------


def another_mode(runner: Runner, share: Any) -> None:
    runner.model.train(runner.channel.me == 0)
    runner(*share)


def gradients_of_one(runner: Runner, share: Any) -> None:
    with torch.set_grad_enabled(runner.channel.me == 0):
        runner(*share)


def another_chance(runner: Runner, share: Any) -> None:
    runner._generator = torch.Generator().manual_seed(runner.channel.me)
    runner(*share)


def one_call_more(more: int, runner: Runner, share: Any) -> None:
    for _ in range(2 if runner.channel.me == more else 1):
        runner(*share)
    if runner.channel.me != more:
        runner.sync.stepped()


def no_backward(runner: Runner, share: Any) -> None:
    output = runner(*share)
    if runner.channel.me == 0:
        output.mean().backward()
    runner.sync.stepped()


def called_again(runner: Runner, share: Any) -> None:
    output = runner(*share)
    if runner.channel.me == 0:
        output.mean().backward()
    runner(*share)


CALLED = "worker {} of the group called the split model 1 times .* worker {} has called it 2 times"


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (another_mode, "worker 1 of the group calls the model in another mode"),
        (gradients_of_one, "switched on or off"),
        (another_chance, "the same number on all workers"),
        (partial(one_call_more, 0), CALLED.format(1, 0)),
        (partial(one_call_more, 1), CALLED.format(0, 1)),
        (no_backward, "worker 1 of the group goes on to optimizer.step.. after 0 backwards"),
        (called_again, "worker 1 of the group calls the split model again after 0 backwards, worker 0"),
        (lambda runner, share: runner(torch.ones(2, 5)), r"x = \(2, 5\): the split model takes .* \(samples, 4\)"),
    ],
)
def test_scripts_that_do_not_fit_together_are_told(use, words):
    layers = {"act": nn.Dropout(0.5)} if use is another_chance else {}
    group = Group(Net(straight, **layers), [at(0, "a"), at(1, "b")], shares_of(2, 2))
    with pytest.raises(ConfigError, match=words):
        group.each(use)


def test_a_missing_argument_and_an_error_in_a_step_name_what_was_wrong():
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        three().each(lambda runner, share: runner())
    group = three()
    group.models[1].b.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        group.step(squares)
    assert f"{__file__}:" in caught.value.__notes__[0] and "on worker 1" in caught.value.__notes__[0]


def test_steps_and_calls_without_gradient_in_between_are_no_disagreement():
    group = three()

    def use(runner: Runner, share: Any) -> None:
        for _ in range(3):
            runner(*share).mean().backward()
            runner.sync.stepped()
            with torch.no_grad():
                runner(*share)

    together(2, lambda on: use(group.runners[on.me], group.shares[on.me]), group.mailboxes)
    left = [key for store in group.mailboxes.stores for _, key in store._came]
    assert all(key.edge == ControlEdge.STEPPED for key in left) and len(left) <= 2  # no later forward has read them


def test_the_number_of_a_dtype_is_its_own() -> None:
    dtypes = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
    assert len({hash_of(each) for each in dtypes}) == len(set(dtypes))
