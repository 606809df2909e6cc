"""Cores and links of a simulated host, against arithmetic."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topotrain.config.job import Link
from topotrain.tools.prediction.host_resources import HostCores, LinkQueue, LinkTime, slowdown
from topotrain.tools.simulator.sim_network import Simulation


def ends(cores: int, tasks: list[tuple[float, float]], sharing: dict[int, float] | None = None) -> list[float]:
    """Run tasks (begin, seconds); return when each is over."""
    sim = Simulation(0)
    host, over = HostCores(sim, cores, sharing or {}), dict[int, float]()
    for number, (begin, seconds) in enumerate(tasks):

        def start(number: int = number, seconds: float = seconds) -> None:
            host.run(seconds, lambda: over.setdefault(number, sim.now))

        sim.at(begin, start)
    sim.run()
    assert host.busy() == pytest.approx(sum(seconds for _, seconds in tasks)) or sharing
    return [over[number] for number in range(len(tasks))]


def test_tasks_share_a_core_alike():
    assert ends(1, [(0.0, 1.0), (0.0, 1.0)]) == pytest.approx([2.0, 2.0])
    assert ends(2, [(0.0, 1.0), (0.0, 1.0)]) == pytest.approx([1.0, 1.0])
    # The short one is over after two seconds, of which it had half.
    assert ends(1, [(0.0, 1.0), (0.0, 3.0)]) == pytest.approx([2.0, 4.0])
    assert ends(1, [(0.0, 2.0), (1.0, 0.5)]) == pytest.approx([2.5, 2.0])


def test_measured_sharing_replaces_the_ideal_one():
    assert slowdown(2, 2, {2: 1.3}) == 1.3
    assert slowdown(2, 2, {}) == 1.0
    assert slowdown(4, 2, {2: 1.3}) == pytest.approx(2.6)
    assert slowdown(3, 4, {2: 1.0, 4: 2.0}) == pytest.approx(1.5)
    assert ends(2, [(0.0, 1.0), (0.0, 1.0)], {2: 1.5}) == pytest.approx([1.5, 1.5])


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 2)), min_size=1, max_size=6),
)
def test_no_task_is_faster_than_alone_and_cores_are_never_idle_with_work(cores, tasks):
    over = ends(cores, tasks)
    for (begin, seconds), end in zip(tasks, over, strict=True):
        assert end >= begin + seconds - 1e-9
    work, first = sum(seconds for _, seconds in tasks), min(begin for begin, _ in tasks)
    longest = max(begin + seconds for begin, seconds in tasks)
    # Never longer than all tasks one after another from the last begin on.
    assert max(over) <= max(begin for begin, _ in tasks) + work + 1e-9
    assert max(over) >= max(first + work / cores, longest) - 1e-9


def arrivals(sends: list[tuple[int, int]], mbit: float, delay_ms: float, receivers: int = 1) -> list[float]:
    """Send messages (sender, bytes) at time 0, to one receiver or to one each; return their arrivals."""
    sim, link = Simulation(0), Link(bandwidth=mbit, delay=delay_ms)
    rate = mbit * 1e6 / 8
    up: dict[int, LinkTime] = {}
    down = [LinkTime(rate) for _ in range(receivers)]
    queues: dict[int, LinkQueue] = {}
    there = dict[int, float]()
    for number, (sender, nbytes) in enumerate(sends):
        queue = queues.setdefault(
            sender,
            LinkQueue(sim, link, up.setdefault(sender, LinkTime(rate)), down[sender % receivers], random.Random(0)),
        )
        queue.send(nbytes, lambda number=number: there.setdefault(number, sim.now))
    sim.run()
    return [there[number] for number in range(len(sends))]


def test_a_message_takes_bandwidth_and_delay():
    assert arrivals([(0, 1_250_000)], 100.0, 20.0) == pytest.approx([0.12], rel=1e-6)
    # Messages of one connection come in their order, one behind the other.
    assert arrivals([(0, 1_250_000), (0, 1_250_000)], 100.0, 0.0) == pytest.approx([0.1, 0.2], rel=0.01)


def test_two_senders_to_one_host_share_its_link():
    both = arrivals([(0, 1_250_000), (1, 1_250_000)], 100.0, 0.0)
    assert max(both) == pytest.approx(0.2, rel=0.01)
    assert min(both) > 0.15  # they share it, and neither waits for the end of the other
    assert arrivals([(0, 1_250_000), (1, 1_250_000)], 100.0, 0.0, receivers=2) == pytest.approx([0.1, 0.1], rel=0.01)
