"""Rounds with a quorum stay open for more workers, and no worker is held up for it."""

from types import SimpleNamespace
from typing import Any

import pytest
from faulty_network import SimClock
from reports import FunctionSender
from simulation import ScriptedCluster, ScriptedWorker, job
from test_same_bits import OUTER

from topotrain.config.job import Cluster
from topotrain.config.topology import Address, Role, layout
from topotrain.core.client.client_context import StepEnd
from topotrain.core.model.schema import PrivateMemory
from topotrain.core.server.server import Server, ServerFactory
from topotrain.core.server.server_context import TimerHost
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.outer_optimizer.grace.exchange_times import ExchangeTimes
from topotrain.extensions.outer_optimizer.grace.round_windows import RoundWindows
from topotrain.extensions.outer_optimizer.grace.window_messages import ExchangeTime, WindowOver
from topotrain.extensions.outer_optimizer.outer_rounds import OuterRounds
from topotrain.extensions.replication.replica_host import StandbyFactory
from topotrain.launch.runtime.server_composition import make_server

WORKER = Address(Role.WORKER, 0, 0)


class HandTimer(TimerHost):
    """A clock that a test sets, and the messages that were asked for."""

    def __init__(self) -> None:
        self.time = 0.0
        self.asked: list[tuple[float, Any]] = []

    def now(self) -> float:
        return self.time

    def wake(self, seconds: float, message: Any) -> None:
        self.asked.append((round(self.time + seconds, 6), message))


class Coordinator:
    """Windows on a server of a test. Groups 0 and 1 push every 10 s, and group 2 every 4 s."""

    def __init__(self, timer: HandTimer | None = None) -> None:
        self.timer, self.decided = timer or HandTimer(), 0
        server = SimpleNamespace(timer=self.timer, decisions=SimpleNamespace(decide=self.decide))
        cluster = Cluster(nworker_groups=4, server_worker_separate=True, outer=OUTER["mean"][0], quorum=2, slack=0.5)
        self.windows = RoundWindows(server, cluster)  # type: ignore[arg-type]
        for step, times in enumerate(((0.0, 0.0, 6.0), (10.0, 10.0, 10.0))):
            for group, at in enumerate(times):
                self.timer.time = at
                self.over({0: [(group, step)]}, all_here=True)
        self.timer.asked.clear()

    def decide(self) -> None:
        self.decided += 1

    def over(self, rounds: dict[int, list[tuple[int, int]]], all_here: bool = False) -> list[int]:
        """The fragments of the rounds that are over, of these."""
        pushed = [step for steps in rounds.values() for step in steps]
        return list(self.windows.over(pushed, {f: s for f, s in rounds.items() if len(s) > 1 or all_here}, all_here))


def test_a_round_with_its_quorum_is_over_when_its_window_is() -> None:
    found = Coordinator()
    found.timer.time = 20.0
    assert found.over({0: [(0, 2)]}) == [] and not found.timer.asked, "there is no quorum yet"
    found.timer.time = 21.0
    assert found.over({0: [(0, 2), (1, 2)]}) == []
    ((at, message),) = found.timer.asked
    assert at == pytest.approx(21.0 + 0.5 * 9.0)  # group 0 pushes again at 30
    found.windows.handle(WORKER, WindowOver(0, message.number + 1))
    assert not found.decided and found.over({0: [(0, 2), (1, 2)]}) == [], "of another window"
    found.windows.handle(WORKER, message)
    assert found.decided == 1
    assert found.over({0: [(0, 2), (1, 2)]}) == [0]
    found.windows.handle(WORKER, message)
    assert found.decided == 1, "told twice"


def test_a_round_of_all_is_over_at_once() -> None:
    found = Coordinator()
    found.timer.time = 20.0
    assert found.over({0: [(0, 2), (1, 2)]}) == []
    assert found.over({0: [(0, 2), (1, 2), (2, 2), (3, 0)]}, all_here=True) == [0]
    (_, message) = found.timer.asked[0]
    found.windows.handle(WORKER, message)
    assert not found.decided, "its window is closed"


def test_a_group_that_needs_values_earlier_ends_the_window_earlier() -> None:
    found = Coordinator()
    found.timer.time = 20.0
    found.over({0: [(0, 2), (1, 2)]})
    assert found.over({0: [(0, 2), (1, 2), (2, 2)]}) == []
    (first, one), (second, other) = found.timer.asked
    assert one == other and second < first
    assert found.over({0: [(0, 2), (1, 2), (2, 2)]}) == [] and len(found.timer.asked) == 2, "asked for once"


def test_a_death_in_the_window_takes_the_quorum_away() -> None:
    found = Coordinator()
    found.timer.time = 20.0
    found.over({0: [(0, 2), (1, 2)]})
    (_, message) = found.timer.asked[0]
    found.windows.reset_group(1, False)
    assert found.over({0: [(0, 2)]}) == []
    found.windows.handle(WORKER, message)
    assert not found.decided
    assert found.over({0: [(0, 2), (2, 2)]}) == []
    assert found.timer.asked[1][1].number != message.number, "the round has another window"


def test_fragments_have_windows_of_their_own() -> None:
    found = Coordinator()
    found.timer.time = 20.0
    assert found.over({0: [(0, 2), (1, 2)], 1: [(2, 2), (3, 0)]}) == []
    messages = {message.fragment: message for _, message in found.timer.asked}
    found.windows.handle(WORKER, messages[1])
    assert found.over({0: [(0, 2), (1, 2)], 1: [(2, 2), (3, 0)]}) == [1]


def test_a_second_copy_ends_the_windows_of_a_dead_process() -> None:
    found = Coordinator()
    found.timer.time = 20.0
    found.over({0: [(0, 2), (1, 2)]})
    (_, message) = found.timer.asked[0]
    copy = Coordinator()
    copy.windows.load_state_dict(found.windows.state_dict())
    copy.timer.time = 100.0
    copy.windows.on_timer()
    assert copy.timer.asked == [(100.0, message)]
    copy.windows.handle(WORKER, message)
    assert copy.decided == 1 and copy.over({0: [(0, 2), (1, 2)]}) == [0]


def test_an_exchange_that_takes_long_leaves_a_shorter_window() -> None:
    def window(seconds: float) -> float:
        found = Coordinator()
        found.windows.step_over(SimpleNamespace(group=0, step=1))  # type: ignore[arg-type]
        found.windows.handle(WORKER, ExchangeTime(1, seconds))
        found.timer.time = 20.0
        found.over({0: [(0, 2), (1, 2)]})
        return found.timer.asked[0][0] - 20.0

    assert window(0.0) == pytest.approx(5.0)
    assert window(4.0) == pytest.approx(3.0)
    assert window(40.0) == 0.0


# --- a whole job in virtual time -------------------------------------------------------------------------------------

STEPS = 4
"""Of a worker between two pushes."""


class Decoupled:
    """Workers that never wait for a round, with these seconds for a step. Each begins `apart` after the one before."""

    def __init__(self, slack: float, step_s: tuple[float, ...], apart: float, frozen: int = -1) -> None:
        self.cluster = ScriptedCluster(
            job(len(step_s), shards=2, outer=OUTER["mean"][0], sync_freq=STEPS, quorum=2, slack=slack)
        )
        self.step_s, self.apart, self.frozen = step_s, apart, frozen
        self.pushes = [0] * len(step_s)
        self.cluster.play(self._train)

    def _train(self, worker: ScriptedWorker) -> None:
        worker.open()
        client, sim, group = worker.client, self.cluster.sim, worker.me.group
        client.channel.measure_waits(SimClock(self.cluster.sim))
        sim.sleep(0.05 + self.apart * group - sim.now)
        made = pushed_at = 0
        pushing = False
        while sim.now < 4.0:
            sim.sleep(self.step_s[group])
            made += 1
            if group == self.frozen and sim.now > 1.0:
                sim.sleep(3.0)
            if pushing and client.steps.is_over():
                client.values.settle()
                pushing = False
            if not pushing and made - pushed_at >= STEPS:
                self._push(worker)
                pushing, pushed_at = True, made
        client.values.settle()
        worker.finish()

    def _push(self, worker: ScriptedWorker) -> None:
        client = worker.client
        if ExchangeTimes in client.gradients.hooks.by_class:
            client.extension(ExchangeTimes).begin()
        worker.push(worker.numbers())
        buckets = len(self.cluster.map.buckets)
        end = StepEnd(backwards=1, weight=1.0, fetch=True, hyper=b"", marks=(), revisions=(0,) * buckets)
        client.steps.begin(worker.steps, end)
        client.steps.finish_later(worker.steps, end, lambda outcome: None)
        worker.steps = worker.steps + 1
        self.pushes[worker.me.group] += 1

    @property
    def members(self) -> dict[int, int]:
        return self.cluster.server(0, 0).extension(OuterRounds).history.members

    @property
    def mean(self) -> float:
        return sum(count * rounds for count, rounds in self.members.items()) / sum(self.members.values())


EQUAL = (0.01,) * 4


def test_slack_brings_more_workers_into_a_round_and_holds_up_none() -> None:
    """The workers push 2 ms apart, every 40 ms. A window is at most a step of 10 ms."""
    without, found = Decoupled(0.0, EQUAL, 0.002), Decoupled(0.9, EQUAL, 0.002)
    assert without.mean < 2.3 and found.mean > 3.5, (without.members, found.members)
    assert sum(found.members.values()) < 0.7 * sum(without.members.values())
    assert all(have >= had - 1 for had, have in zip(without.pushes, found.pushes, strict=True)), found.pushes


def test_a_slow_worker_is_in_fewer_rounds_and_holds_up_none() -> None:
    speeds = (0.01, 0.01, 0.01, 0.033)
    without, found = Decoupled(0.0, speeds, 0.002), Decoupled(0.9, speeds, 0.002)
    assert all(have >= had - 1 for had, have in zip(without.pushes, found.pushes, strict=True)), found.pushes
    assert found.members[3] > found.members.get(4, 0) > 0, found.members


def test_a_worker_that_is_stopped_holds_no_round_for_longer_than_a_window() -> None:
    without, found = Decoupled(0.0, EQUAL, 0.002, frozen=3), Decoupled(0.9, EQUAL, 0.002, frozen=3)
    assert all(have >= had - 1 for had, have in zip(without.pushes[:3], found.pushes[:3], strict=True)), found.pushes
    assert found.members[3] > 60, found.members


def test_the_times_of_exchanges_come_to_the_coordinator() -> None:
    found = Decoupled(0.9, EQUAL, 0.002)
    windows = found.cluster.server(0, 0).extension(RoundWindows)
    assert windows.exchange_s and all(0.001 < seconds < 0.02 for seconds in windows.exchange_s.values())


# --- the timer of a real server --------------------------------------------------------------------------------------


def coordinator() -> Server:
    made = job(3, outer=OUTER["mean"][0], quorum=2)
    return make_server(Address(Role.SERVER, 0, 0), made, layout(made.cluster), PrivateMemory())


def test_a_host_that_takes_a_server_over_is_asked_to_end_its_windows() -> None:
    server, host = coordinator(), HandTimer()
    server.timer.attach(host)
    assert not host.asked
    server.extension(RoundWindows).load_state_dict({"_open": {0: 7}, "_over": set(), "_windows": 7})
    server.timer.attach(host)
    assert host.asked == [(0.0, WindowOver(0, 7))]


def test_a_server_without_a_host_is_told_at_once() -> None:
    server = coordinator()
    server.timer.wake(60.0, WindowOver(0, 1))
    assert server.queue.pending == [(server.me, WindowOver(0, 1))]


def test_the_server_of_a_second_copy_is_told_by_the_first_one_alone() -> None:
    class Factory(ServerFactory):
        def make(self, me: Address, sender: MessageSender) -> Server:
            return coordinator()

    server = StandbyFactory(Factory()).make(Address(Role.SERVER, 0, 0), FunctionSender(lambda to, message: None))
    server.timer.wake(0.0, WindowOver(0, 1))
    assert not server.queue.pending and server.timer.now() > 0
