"""Rounds with a quorum stay open for more workers, and no worker is held up for it."""

from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from island_jobs import OUTER
from reports import FunctionSender
from simulated_islands import STEP_S, IslandTrial, islands
from simulation import job

from topotrain.config.job import Cluster, Pace
from topotrain.config.topology import Address, Role, layout
from topotrain.core.model.schema import PrivateMemory
from topotrain.core.server.server import Server, ServerFactory
from topotrain.core.server.server_context import TimerHost
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.outer_optimizer.grace.grace_window import GraceWindow, has_windows
from topotrain.extensions.outer_optimizer.grace.round_windows import RoundWindows
from topotrain.extensions.outer_optimizer.grace.window_messages import ExchangeTime, WindowOver
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
    """Windows on a server of a test, at 20 s. Groups 0 and 1 push every 10 s, and group 2 every 4 s."""

    def __init__(self, at: float = 20.0) -> None:
        self.timer, self.decided = HandTimer(), 0
        server = SimpleNamespace(timer=self.timer, decisions=SimpleNamespace(decide=self.decide))
        cluster = Cluster(nworker_groups=4, server_worker_separate=True, outer=OUTER["mean"][0], quorum=2, slack=0.5)
        self.windows = RoundWindows(server, cluster)  # type: ignore[arg-type]
        for step, times in enumerate(((0.0, 0.0, 6.0), (10.0, 10.0, 10.0))):
            for group, pushed in enumerate(times):
                self.timer.time = pushed
                self.over((group, step), all_here=True)
        self.timer.asked.clear()
        self.timer.time = at

    def decide(self) -> None:
        self.decided += 1

    def over(self, *steps: tuple[int, int], all_here: bool = False) -> bool:
        """Whether the round of fragment 0 is over, of these pushes."""
        return 0 in self.of({0: list(steps)}, all_here)

    def of(self, rounds: dict[int, list[tuple[int, int]]], all_here: bool = False) -> list[int]:
        """The fragments of the rounds that are over, of these."""
        pushed = [step for steps in rounds.values() for step in steps]
        return list(self.windows.over(pushed, {f: s for f, s in rounds.items() if len(s) > 1 or all_here}, all_here))

    def ring(self, message: Any) -> bool:
        """A message comes that the coordinator has asked for; return whether it looks at the rounds then."""
        before = self.decided
        self.windows.handle(WORKER, message)
        return self.decided > before


FIRST, SECOND, THIRD = (0, 2), (1, 2), (2, 2)


def test_a_round_with_its_quorum_is_over_when_its_window_is() -> None:
    found = Coordinator()
    assert not found.over(FIRST) and not found.timer.asked, "there is no quorum yet"
    found.timer.time = 21.0
    assert not found.over(FIRST, SECOND)
    ((at, message),) = found.timer.asked
    assert at == pytest.approx(21.0 + 0.5 * 9.0)  # group 0 pushes again at 30
    assert not found.ring(WindowOver(0, message.number + 1)) and not found.over(FIRST, SECOND), "of another window"
    assert found.ring(message) and found.over(FIRST, SECOND)
    assert not found.ring(message), "told twice"


def test_a_round_of_all_is_over_at_once() -> None:
    found = Coordinator()
    assert not found.over(FIRST, SECOND)
    assert found.over(FIRST, SECOND, THIRD, (3, 0), all_here=True)
    assert not found.ring(found.timer.asked[0][1]), "its window is closed"


def test_a_group_that_needs_values_earlier_ends_the_window_earlier() -> None:
    found = Coordinator()
    assert not found.over(FIRST, SECOND) and not found.over(FIRST, SECOND, THIRD)
    (first, one), (second, other) = found.timer.asked
    assert one == other and second < first
    assert not found.over(FIRST, SECOND, THIRD) and len(found.timer.asked) == 2, "asked for once"


def test_a_death_in_the_window_takes_the_quorum_away() -> None:
    found = Coordinator()
    found.over(FIRST, SECOND)
    (_, message) = found.timer.asked[0]
    found.windows.reset_group(1, False)
    assert not found.over(FIRST) and not found.ring(message) and not found.over(FIRST, THIRD)
    assert found.timer.asked[1][1].number != message.number, "the round has another window"


def test_fragments_have_windows_of_their_own() -> None:
    found, rounds = Coordinator(), {0: [FIRST, SECOND], 1: [THIRD, (3, 0)]}
    assert found.of(rounds) == []
    found.ring({message.fragment: message for _, message in found.timer.asked}[1])
    assert found.of(rounds) == [1]


def test_a_second_copy_ends_the_windows_of_a_dead_process() -> None:
    found, copy = Coordinator(), Coordinator(100.0)
    found.over(FIRST, SECOND)
    (_, message) = found.timer.asked[0]
    copy.windows.load_state_dict(found.windows.state_dict())
    copy.windows.on_timer()
    assert copy.timer.asked == [(100.0, message)]
    assert copy.ring(message) and copy.over(FIRST, SECOND)


def test_an_exchange_that_takes_long_leaves_a_shorter_window() -> None:
    for seconds, window in ((0.0, 5.0), (4.0, 3.0), (40.0, 0.0)):
        found = Coordinator(10.0)
        found.windows.step_over(SimpleNamespace(group=0, step=1))  # type: ignore[arg-type]
        found.windows.handle(WORKER, ExchangeTime(1, seconds))
        found.timer.time = 20.0
        found.over(FIRST, SECOND)
        assert found.timer.asked[0][0] - 20.0 == pytest.approx(window)


# --- a whole job in virtual time -------------------------------------------------------------------------------------


@pytest.mark.simulated
@pytest.mark.parametrize("slowest", [1.0, 0.3, 0.15])
def test_slack_brings_more_workers_into_a_round_and_holds_up_none(slowest: float) -> None:
    made, speeds = islands(4, 4, quorum=2, slack=0.0, pace=Pace.kSteps), (1.0, 1.0, 1.0, slowest)
    with_slack = replace(made, cluster=replace(made.cluster, slack=0.9))
    without, found = (IslandTrial(job, 400, speeds=speeds).run() for job in (made, with_slack))
    sizes = [fmean(len(each.groups) for each in trial.rounds) for trial in (without, found)]
    assert sizes[1] > sizes[0] + 0.1
    for group in range(4):
        had, has = (max(each.time for each in trial.told if each.group == group) for trial in (without, found))
        assert has < had + made.cluster.sync_freq * STEP_S, "less than one push behind"
    exchange_s = found.server(0, 0).extension(RoundWindows).exchange_s
    assert exchange_s and all(0.001 < seconds < 0.02 for seconds in exchange_s.values())


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


# --- how long a round with its quorum stays open: only for time that no worker of it needs ---------------------------


def measured(slack: float, steps: int, intervals: dict[int, float], exchange: float = 0.0) -> GraceWindow:
    """Groups that have pushed at 0 and at their interval, with exchanges of this time."""
    grace = GraceWindow(slack, steps)
    for group, interval in intervals.items():
        grace.pushed(group, 0, 0.0)
        grace.answered(group, 0, 0.5)
        grace.exchanged(group, 0, 0.5 + exchange)
        grace.pushed(group, 1, interval)
    return grace


def test_a_window_is_at_most_a_step() -> None:
    assert measured(0.9, 24, {0: 24.0}).seconds([0], 24.0) == pytest.approx(1.0)
    assert measured(0.9, 1, {0: 24.0}).seconds([0], 24.0) == pytest.approx(0.9 * 24)


def test_no_window_before_all_groups_were_measured() -> None:
    grace = measured(0.9, 1, {0: 10.0})
    grace.pushed(1, 0, 10.0)
    assert grace.seconds([0], 10.0) > 0
    assert grace.seconds([0, 1], 10.0) == 0.0
    grace.forget(0)
    assert grace.seconds([0], 10.0) == 0.0, "a new process has another pace"


def test_a_pause_of_a_worker_makes_no_long_window() -> None:
    grace = measured(1.0, 1, {0: 1.0})
    grace.pushed(0, 2, 1000.0)
    assert grace.seconds([0], 1000.0) <= 1.25
    for number in range(3, 30):
        grace.pushed(0, number, 1000.0 + 5.0 * (number - 2))
    assert grace.seconds([0], 1135.0) == pytest.approx(5.0, rel=0.01), "it stays slower, which is learned"


def test_the_wait_for_a_round_is_no_part_of_the_exchange() -> None:
    grace = GraceWindow(1.0, 1)
    grace.pushed(0, 0, 0.0)
    grace.answered(0, 0, 4.0)
    grace.exchanged(0, 7, 100.0)  # of a push that is not known here
    grace.exchanged(0, 0, 5.0)
    grace.pushed(0, 1, 10.0)
    assert grace.seconds([0], 10.0) == pytest.approx(10.0 - 1.0)


@given(
    slack=st.floats(0, 1),
    compute=st.floats(0.1, 10),
    exchange=st.floats(0, 20),
    reached=st.lists(st.floats(0, 5), min_size=1, max_size=30),
)
def test_a_window_never_delays_a_push(slack: float, compute: float, exchange: float, reached: list[float]) -> None:
    """A worker that computes for `compute` between two pushes, and a quorum that is there `reached` after its own."""
    grace, at = GraceWindow(slack, 1), 0.0
    for number, wait in enumerate(reached):
        grace.pushed(0, number, at)
        quorum = at + wait
        over = quorum + grace.seconds([0], quorum)
        grace.answered(0, number, over)
        grace.exchanged(0, number, over - at + exchange)
        without = max(compute, wait + exchange)
        following = max(at + compute, over + exchange)
        # What was late without a window is a measured interval, which a later window may use.
        assert following - at <= max(without, *(max(compute, w + exchange) for w in reached)) + 1e-6
        at = following


def test_which_jobs_have_windows() -> None:
    def windows(**cluster: object) -> bool:
        return has_windows(Cluster(nworker_groups=3, server_worker_separate=True, **cluster))  # type: ignore[arg-type]

    outer = OUTER["mean"][0]
    assert windows(outer=outer, quorum=1) and windows(outer=outer, quorum=2, slack=0.1)
    assert not windows(outer=outer, quorum=2, slack=0.0)
    assert not windows(outer=outer, quorum=3), "such a round has all workers"
    assert not windows(outer=outer) and not windows()
