"""Scopes on a worker of a job, what tells calls of a split model apart, and how it comes together in between."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from split_workers import GroupMailboxes, MailboxChannel, together
from torch import nn

import topotrain as tt
from topotrain.config.job import Cluster, ConfigError, Job, Partition
from topotrain.config.topology import Address, Role, layout
from topotrain.parallel.api.prepare_split import SplitExtension, captured_if_placed, tagged
from topotrain.parallel.api.split_forward import kind_of, samples_of
from topotrain.parallel.placement.parameter_owners import OwnedPart, WholeTensor
from topotrain.parallel.runtime import gather as gathering
from topotrain.parallel.runtime.gather import AHEAD, entries, gather, give
from topotrain.parallel.runtime.worker_sync import ForwardHello, WorkerSync
from topotrain.training import context as process
from topotrain.training.final_parameters import in_one_file, save_tensors
from topotrain.training.trainer.parameter_files import load_checkpoints


@dataclass
class Here:
    """As much of a `Context` as a scope asks for."""

    place: Any
    me: Address
    worker: Any = None
    split: Any = None
    extensions: Any = (SplitExtension(),)


@pytest.fixture
def as_worker() -> Iterator[Any]:
    def enter(index: int, job: Job | None = None, workers: int = 2) -> None:
        job = job or Job(cluster=Cluster(nworkers_per_group=workers))
        place = SimpleNamespace(job=job, topology=layout(job.cluster))
        process.enter(Here(place, Address(Role.WORKER, 0, index)))  # type: ignore[arg-type]

    yield enter
    process.enter(None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with tt.device("/job:worker/task:0"):
            self.first = nn.Linear(3, 4)
        with tt.device("/job:worker/task:1"):
            self.rest = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 3))


def absent(model: nn.Module) -> list[bool]:
    return [parameter.is_meta for parameter in model.parameters()]


def test_in_an_ordinary_process_a_scope_only_notes() -> None:
    torch.manual_seed(3)
    model = Net()
    assert absent(model) == [False] * 8
    assert tagged(model)
    with tt.device("/job:worker"):  # any of them
        assert not tagged(nn.Linear(2, 2))
    assert tt.place(model.first, "/job:worker/task:1") is model.first
    with pytest.raises(ConfigError, match="device"):
        tt.device("/job:worker/tusk:1").__enter__()
    assert isinstance(tt.device(), torch.device)


@pytest.mark.parametrize("me", [0, 1])
def test_on_a_worker_what_others_hold_is_given_back(as_worker: Any, me: int) -> None:
    torch.manual_seed(3)
    whole = Net()
    after = torch.rand(1)
    as_worker(me)
    torch.manual_seed(3)
    model = Net()
    assert torch.equal(torch.rand(1), after)  # all was drawn
    assert absent(model) == [me == 1] * 2 + [me == 0] * 6
    for mine, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.is_meta or torch.equal(mine, expected)


def test_no_more_than_one_layer_of_others_is_there(as_worker: Any) -> None:
    as_worker(0)
    there = []

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            made.append(self)
            there.append(sum(not p.is_meta for layer in made for p in layer.parameters()))

    made: list[nn.Module] = []
    with tt.device("/job:worker/task:1"):
        nn.Sequential(*[Layer() for _ in range(5)])
    assert there == [2] * 5
    assert all(p.is_meta for layer in made for p in layer.parameters())


def test_a_tied_weight_stays_tied(as_worker: Any) -> None:
    as_worker(0)
    embed = nn.Embedding(5, 4)
    with tt.device("/job:worker/task:1"):
        out = nn.Linear(4, 5, bias=False)
        out.weight = embed.weight
        nn.Linear(2, 2)
    assert out.weight is embed.weight
    assert not embed.weight.is_meta


def test_nothing_is_given_back_where_the_conf_decides(as_worker: Any) -> None:
    as_worker(0, Job(cluster=Cluster(nworkers_per_group=2), partition=(Partition(match="rest"),)))
    assert absent(Net()) == [False] * 8
    as_worker(0, workers=1)
    assert absent(Net()) == [False] * 8


class Said(nn.Linear):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        with tt.device("/job:worker/task:1"):
            return torch.relu(super().forward(given))


def on_second(given: torch.Tensor) -> torch.Tensor:
    with tt.device("/job:worker/task:1"):
        return torch.relu(given)


class Between(nn.Linear):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.end(super().forward(given))

    def end(self, given: torch.Tensor) -> torch.Tensor:
        return given if given is None else on_second(given)


def with_closure() -> type[nn.Linear]:
    named = tt.device

    class Closed(nn.Linear):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            with named("/job:worker/task:1"):
                return torch.relu(super().forward(given))

    return Closed


class Plain(Between):
    def end(self, given: torch.Tensor) -> torch.Tensor:
        return held_by(0) if given is None else torch.relu(given)


class Asks(nn.Linear):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return super().forward(given.to(tt.device()) if given.sum() > 0 else given)


def test_a_forward_that_names_a_worker_is_noticed() -> None:
    """In a scope of its own, in one of a method or of a function that it calls, or by another name."""
    for kind in (Said, Between, with_closure()):
        assert captured_if_placed(nn.Sequential(kind(3, 3)))
    for kind in (Plain, nn.Linear):
        assert not captured_if_placed(nn.Sequential(kind(3, 3)))
    assert not captured_if_placed(Asks(3, 3))  # nor is what cannot be captured a reason to fail


def test_a_scope_that_comes_too_late(as_worker: Any) -> None:
    as_worker(0)
    process.current().worker = object()  # type: ignore[union-attr, assignment]
    with pytest.raises(ConfigError, match="too late"):
        tt.device("/job:worker/task:1").__enter__()
    with tt.device("/job:worker"):
        pass


def test_calls_of_one_kind() -> None:
    def kind(*args: Any, **kwargs: Any) -> object:
        return kind_of(args, kwargs, samples_of(args, kwargs))

    rows = torch.zeros
    assert kind(rows(4, 3)) == kind(rows(7, 3))
    assert kind(rows(3, 3)) == kind(rows(7, 3))
    assert kind(rows(4, 3)) != kind(rows(4, 5))
    assert kind(rows(4, 3)) != kind(rows(4, 3).double())
    assert kind(rows(4, 3), mask=rows(4)) == kind(rows(5, 3), mask=rows(5))
    assert kind(rows(4, 3), mask=rows(4)) != kind(rows(4, 3))
    assert kind(rows(4, 3), 2) != kind(rows(4, 3), 3)
    with pytest.raises(ConfigError, match="the samples in its first dimension"):
        kind(2)


# --- together in between ------------------------------------------------------------------------------------------

WHOLES = {
    "rows": (torch.arange(60.0).view(20, 3), [OwnedPart((w,), 0, 7 * w, min(7 * w + 7, 20)) for w in range(3)]),
    "columns": (torch.arange(30).view(5, 6), [OwnedPart((w,), 1, 2 * w, 2 * w + 2) for w in range(3)]),
    "all": (torch.rand(4), [OwnedPart()]),
    "other's": (torch.rand(3, 4).t(), [OwnedPart((2,))]),
    "two": (torch.tensor([True, False]), [OwnedPart((1, 2))]),
    "number": (torch.tensor(7), [OwnedPart((1,))]),
    "nothing": (torch.empty(0, 3), [OwnedPart((1,))]),
}


def held_by(me: int) -> list[gathering.GatheredTensor]:
    wholes = [
        WholeTensor(tensor, (name,), (), tuple(shares), tuple(tensor.shape), tensor.stride())
        for name, (tensor, shares) in WHOLES.items()
    ]
    tensors = [
        share.of(whole.tensor).clone() if share.here(me) else whole.part(share)
        for whole in wholes
        for share in whole.shares
    ]
    return entries(wholes, tensors)


def test_what_several_hold_comes_to_the_first_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "PIECE_BYTES", 16)
    most, mailboxes = 0, GroupMailboxes(3)

    def work(channel: MailboxChannel) -> dict[str, torch.Tensor]:
        nonlocal most
        made = {name: torch.zeros_like(tensor) for name, (tensor, _) in WHOLES.items()}
        meeting = WorkerSync(channel)

        class Targets(dict[str, torch.Tensor]):
            def __getitem__(self, name: str) -> torch.Tensor:
                nonlocal most
                most = max(most, len(mailboxes.stores[0]))
                return super().__getitem__(name)

        for _ in range(2):  # the second time the same
            if channel.me:
                give(meeting, held_by(channel.me), "a test")
            else:
                gather(meeting, held_by(0), Targets(made), "a test")
        return made

    found = together(3, work, mailboxes)[0]
    for name, (tensor, _) in WHOLES.items():
        assert torch.equal(found[name], tensor), name
    assert not any(len(store) for store in mailboxes.stores)
    assert most <= 2 * AHEAD  # of the other two
    assert sum(to == 0 for _, to, _, _ in mailboxes.sent) > 20


@pytest.mark.parametrize(("absent", "does"), [(0, "steps"), (2, "steps"), (2, "draws")])
def test_a_worker_that_goes_on_without_the_others_is_named(absent: int, does: str) -> None:
    def work(channel: MailboxChannel) -> None:
        meeting = WorkerSync(channel)
        meeting.draw(0, 0)
        if channel.me == absent:
            meeting.stepped() if does == "steps" else meeting.draw(1, 0)
        elif channel.me:
            give(meeting, held_by(channel.me), "tt.state_dict")
        else:
            room = {name: torch.zeros_like(tensor) for name, (tensor, _) in WHOLES.items()}
            gather(meeting, held_by(0), room, "tt.state_dict")

    words = rf"worker {absent} of the group goes on with the training, worker \d is in tt\.state_dict"
    with pytest.raises(ConfigError, match=words):
        together(3, work)


def test_a_worker_that_waits_for_batches_is_not_waited_for_in_a_forward() -> None:
    def work(channel: MailboxChannel) -> None:
        meeting = WorkerSync(channel)
        meeting.draw(0, 0)
        meeting.exchange(ForwardHello(*[0] * 10))
        if channel.me:
            meeting.draw(0, 1)
        else:
            meeting.exchange(ForwardHello(*[0] * 10))

    with pytest.raises(ConfigError, match="worker 1 of the group goes on to other batches, worker 0 calls"):
        together(2, work)


def test_memory_in_one_file_is_what_a_file_is_written_from(tmp_path: Path) -> None:
    given = {name: tensor for name, (tensor, _) in WHOLES.items()}
    likes = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in given.values()]
    made = dict(zip(given, in_one_file(likes, tmp_path), strict=True))
    assert not any(tmp_path.iterdir())
    for name, tensor in made.items():
        assert tensor.is_contiguous() and not tensor.any()
        tensor.copy_(given[name])
    save_tensors(made, tmp_path / "file.safetensors", {})
    found = load_file(tmp_path / "file.safetensors")
    assert found.keys() == given.keys() and all(torch.equal(found[name], given[name]) for name in given)


def test_a_file_is_for_values_that_are_here_or_elsewhere(as_worker: Any, tmp_path: Path) -> None:
    """What another worker has is taken there; what has no values yet could take none."""
    path = tmp_path / "file.safetensors"
    save_tensors({name: p.detach().clone() + 1 for name, p in Net().named_parameters()}, path, {})
    as_worker(0)
    model = Net()
    load_checkpoints(model, [str(path)])
    assert torch.equal(model.first.weight, load_file(path)["first.weight"])
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ConfigError, match=r"first\.\w+ is on the meta device"):
        load_checkpoints(model, [str(path)])
