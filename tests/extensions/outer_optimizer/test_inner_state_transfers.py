"""The state of an inner optimizer goes from a living worker group to one that comes back, part by part."""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reports import FunctionSender
from test_round_windows import HandTimer
from torch import nn
from torch.nn import functional as F

from topotrain.config.job import Cluster
from topotrain.config.topology import Address, Role, Topology, layout
from topotrain.core.client.client_context import ServerChannel
from topotrain.core.events import Notice, StateTaken
from topotrain.core.protocol import Message, ProtocolError
from topotrain.extensions.inner_state import inner_state_client
from topotrain.extensions.inner_state.inner_state import InnerState, StateOfOthers
from topotrain.extensions.inner_state.inner_state_client import InnerStateClient, part_memory
from topotrain.extensions.inner_state.inner_state_messages import DonorSilent, InnerStatePart, InnerStateRequest
from topotrain.extensions.inner_state.inner_state_transfers import PATIENCE_S, InnerStateTransfers

PART = 8
COORDINATOR = Address(Role.SERVER, 0, 0)


def state_of(group: int, nbytes: int = 3 * PART + 1) -> torch.Tensor:
    return torch.arange(nbytes, dtype=torch.uint8) + 100 * group


class Source:
    """The state of one group, and how often it was copied."""

    def __init__(self, state: torch.Tensor | None) -> None:
        self.state, self.copies = state, 0

    def copy(self) -> torch.Tensor | None:
        self.copies += 1
        return None if self.state is None else self.state.clone()


class Wire:
    """A coordinator and the clients of all workers. `deliver` handles one message, in the order of sending."""

    def __init__(self, groups: int = 3, workers: int = 1) -> None:
        self.topology: Topology = layout(
            Cluster(nworker_groups=groups, nworkers_per_group=workers, server_worker_separate=True)
        )
        self.sent: deque[tuple[Address, Address, Message]] = deque()
        self.timer, self.live, self.ended = HandTimer(), list(range(groups)), set[int]()
        self.server = SimpleNamespace(
            timer=self.timer,
            queue=SimpleNamespace(send=lambda to, message: self.sent.append((COORDINATOR, to, message))),
            worker_groups=SimpleNamespace(
                workers={group: self.topology.workers(group) for group in range(groups)},
                clocks=SimpleNamespace(live=lambda: self.live),
                runs=lambda group: group not in self.ended,
            ),
        )
        self.home = InnerStateTransfers(self.server)  # type: ignore[arg-type]
        self.sources = {group: Source(state_of(group)) for group in range(groups)}
        self.clients = {who: self.client(who) for group in range(groups) for who in self.topology.workers(group)}

    def client(self, who: Address) -> InnerStateClient:
        sender = FunctionSender(lambda to, message: self.sent.append((who, to, message)))
        waiter: Any = SimpleNamespace(update=nullcontext, wait=self.until, look=lambda: None)
        made = InnerStateClient()
        made.bind(ServerChannel(who, self.topology, sender, waiter), None, None)  # type: ignore[arg-type]
        made.offer(self.sources[who.group])
        return made

    def until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self.deliver()

    def deliver(self, times: int = 1) -> Message:
        sender, to, message = self.sent.popleft()
        for _ in range(times):
            if to == COORDINATOR:
                self.sent.extend((COORDINATOR, *each) for each in self.home.handle(sender, message))
            else:
                self.clients[to].handle(sender, message)
        return message

    def drain(self) -> None:
        while self.sent:
            self.deliver()

    def ask(self, group: int) -> list[InnerStateClient]:
        asking = [self.clients[who] for who in self.topology.workers(group)]
        for each in asking:
            each.ask()
        return asking

    def go_on_with_a_copy(self) -> None:
        """The coordinator's process dies, and its second copy speaks."""
        copy = InnerStateTransfers(self.server)  # type: ignore[arg-type]
        copy.load_state_dict(self.home.state_dict())
        self.home = copy
        self.timer.asked.clear()
        copy.on_timer()

    def die(self, group: int) -> None:
        """The only worker of a group dies. What it had sent may still come, or not."""
        if group in self.live:
            who = Address(Role.WORKER, group, 0)
            self.live.remove(group)
            self.home.reset_group(group, False)
            self.home.on_lost(who)
            self.sent = deque(each for each in self.sent if each[1] != who)

    def assert_has(self, asking: InnerStateClient, group: int) -> None:
        """A client has got the state of this group."""
        found = asking.answer()
        assert found is not None and torch.equal(found, state_of(group))

    def ring(self, number: int = 0) -> None:
        """One of the messages comes that the coordinator has asked for."""
        _, message = self.timer.asked.pop(number)
        self.sent.extend((COORDINATOR, *each) for each in self.home.handle(COORDINATOR, message))


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_state_client, "PART", PART)


def test_one_part_at_a_time_is_on_its_way() -> None:
    wire = Wire()
    wire.ask(2)
    parts = 0
    while wire.sent:
        bodies = [message for _, _, message in wire.sent if isinstance(message, InnerStatePart)]
        assert len(bodies) <= 1
        delivered = wire.deliver()
        if isinstance(delivered, InnerStatePart):
            assert delivered.body is not None and delivered.body.numel() <= PART
            parts += 1
    assert parts == 2 * 4, "to the coordinator, and on"


def test_all_workers_of_a_group_get_one_state() -> None:
    wire = Wire(groups=2, workers=3)
    first, *others = (wire.clients[who] for who in wire.topology.workers(1))
    first.ask()
    wire.drain()
    assert not wire.sources[0].copies, "two workers have not asked"
    for each in others:
        each.ask()
    wire.drain()
    for each in (first, *others):
        wire.assert_has(each, 0)
    assert wire.sources[0].copies == 1


@given(st.lists(st.sampled_from(["deliver", "deliver", "twice", "copy", "die"]), max_size=24))
def test_whatever_happens_in_between_a_group_gets_the_whole_state_of_a_donor(events: list[str]) -> None:
    """Messages come twice, a second copy of the coordinator goes on, or the donor dies, whose parts are void then."""
    wire = Wire()
    (asking,) = wire.ask(2)
    for event in events:
        if event == "copy":
            wire.go_on_with_a_copy()
        elif event == "die":
            wire.die(0)
        elif wire.sent:
            wire.deliver(times=1 + (event == "twice"))
    wire.drain()
    while wire.timer.asked:
        wire.ring()
        wire.drain()
    found = asking.answer()
    assert found is not None
    assert torch.equal(found, state_of(0)) or (0 not in wire.live and torch.equal(found, state_of(1)))


def test_a_donor_that_stands_still_is_left_out() -> None:
    wire = Wire()
    (asking,) = wire.ask(2)
    wire.deliver()
    wire.sent.clear()
    ((at, message),) = wire.timer.asked
    assert at == PATIENCE_S and isinstance(message, DonorSilent)
    wire.ring()
    wire.drain()
    wire.assert_has(asking, 1)


def test_a_donor_that_sends_is_waited_for() -> None:
    wire = Wire()
    (asking,) = wire.ask(2)
    for _ in range(5):
        wire.deliver()
    wire.ring()
    assert len(wire.timer.asked) == 1, "looked at again later"
    wire.drain()
    wire.assert_has(asking, 0)


def test_without_a_living_donor_there_is_no_state() -> None:
    wire = Wire()
    wire.live, wire.ended = [1, 2], {2}
    wire.sources[1].state = None
    (asking,) = wire.ask(0)
    assert asking.answer() is None
    assert not wire.sources[2].copies, "its script has ended"


def test_of_groups_that_ask_at_once_none_waits_for_ever() -> None:
    """The state of a group that asks is old. With its answer it goes on with that, and may give it."""
    wire = Wire()
    first, *others = (client for group in (0, 1, 2) for client in wire.ask(group))
    wire.drain()
    assert [each.answer() for each in others] == [None] * 2
    wire.assert_has(first, 2)


def test_a_group_that_dies_while_it_asks_leaves_no_copy() -> None:
    wire = Wire()
    wire.ask(2)
    for _ in range(4):
        wire.deliver()
    wire.home.reset_group(2, False)
    again = Address(Role.WORKER, 2, 0)
    wire.clients[again] = wire.client(again)
    for void in [each for each in wire.sent if again in each[:2]]:
        wire.sent.remove(void)
    wire.drain()
    donor = wire.clients[Address(Role.WORKER, 0, 0)]
    assert donor._held is None
    (asking,) = wire.ask(2)
    wire.assert_has(asking, 0)
    assert wire.sources[0].copies == 2 and donor._held is None


def test_parts_of_impossible_sizes_are_refused() -> None:
    who = Address(Role.WORKER, 1, 0)
    assert part_memory(who, InnerStatePart(0, 1, 0, 0, 0)) is None
    last = part_memory(who, InnerStatePart(0, 1, 3, 4, 3 * PART + 1))
    assert last is not None and last.numel() == 1
    for part, parts, nbytes in ((0, 1, 0), (0, 2, PART), (4, 4, 4 * PART), (0, 1 << 50, PART << 50)):
        with pytest.raises(ProtocolError):
            part_memory(who, InnerStatePart(0, 1, part, parts, nbytes))
    assert not InnerStateRequest(0, 0, -2).is_valid() and InnerStateRequest(0, 1, -1).is_valid()


# --- the state as bytes, and what a worker that comes back does with it ----------------------------------------------


def trained(
    make: Any = torch.optim.AdamW, steps: int = 3, width: int = 5, seed: int = 0
) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(width, 2)
    optimizer: torch.optim.Optimizer = make(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(torch.ones(4, model.in_features)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()


MAKERS = (
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adafactor,
    lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
)


def copy_of(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    copied = InnerState(optimizer).copy()
    assert copied is not None
    return copied


@pytest.mark.parametrize("make", MAKERS)
def test_an_optimizer_with_the_state_of_another_makes_the_same_steps(make: Any) -> None:
    model, optimizer = trained(make)
    other, fresh = trained(make, steps=0, seed=1)
    other.load_state_dict(model.state_dict())
    assert InnerState(fresh).take(copy_of(optimizer)) == ""
    for _ in range(3):
        step(model, optimizer)
        step(other, fresh)
    assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)


def test_a_copy_is_of_its_moment_and_without_the_rate_of_the_other_worker() -> None:
    model, optimizer = trained(steps=1)
    copied, before = copy_of(optimizer), optimizer.state[model.weight]["exp_avg"].clone()
    step(model, optimizer)
    other, fresh = trained(steps=0)
    fresh.param_groups[0]["lr"] = 0.25
    assert InnerState(fresh).take(copied) == "" and fresh.param_groups[0]["lr"] == 0.25
    assert torch.equal(fresh.state[other.weight]["exp_avg"], before)
    assert float(fresh.state[other.weight]["step"]) == 1


def test_what_is_no_state_of_this_optimizer_is_left() -> None:
    _, own = trained(steps=0)
    copied = copy_of(trained()[1])
    assert "other parameters" in InnerState(own).take(copy_of(trained(width=6)[1])) and not own.state
    for cut in (0, 7, 100, -1):
        assert "cannot be read" in InnerState(own).take(copied[:cut]) and not own.state


def test_a_state_that_is_no_plain_data_is_not_given() -> None:
    model, optimizer = trained()
    optimizer.state[model.weight]["object"] = object()
    assert InnerState(optimizer).copy() is None


class Asked:
    """A client with this answer."""

    def __init__(self, state: torch.Tensor | None) -> None:
        self.state, self.asked, self.answered = state, 0, 0

    def ask(self) -> None:
        self.asked += 1

    def answer(self) -> torch.Tensor | None:
        self.answered += 1
        return self.state


@pytest.mark.parametrize("living", [True, False])
def test_a_worker_that_comes_back_takes_the_state_before_its_first_step(living: bool) -> None:
    events: list[Any] = []
    superseded: list[str] = []
    here = SimpleNamespace(me="worker 1/0", emit=events.append, supersede=superseded.append)
    client = Asked(copy_of(trained()[1]) if living else None)
    _, own = trained(steps=0)
    taking = StateOfOthers(here, "inner", InnerState(own), client)  # type: ignore[arg-type]
    assert client.asked == 1 and not client.answered, "it asks when it starts, and waits before its first step"
    for _ in range(3):
        taking.before_step()
    assert client.answered == 1
    if living:
        assert superseded == ["inner"] and len(own.state) == 2
        assert events == [StateTaken("worker 1/0", True)]
    else:
        assert not superseded and not own.state
        told, notice = events
        assert told == StateTaken("worker 1/0", False)
        assert isinstance(notice, Notice) and "no other worker group could give its own" in notice.text
