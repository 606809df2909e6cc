"""The two-phase commit over the shards: a step is applied everywhere or nowhere, in one order, whatever goes wrong."""

import pytest
from simulation import STORM, Seat, Town, books, job, same, total

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Commit, Push, StepDecision, StepVote
from topotrain.tools.simulator.sim_network import Deadlock, NetworkFaults

pytestmark = pytest.mark.simulated

TWICE = NetworkFaults(delay=(0.0005, 0.004), late=0.03, duplicate=1.0, reorder=0.3)
COORDINATOR = Address(Role.SERVER, 0, 0)


def steps(town: Town, count: int, start: float = 3.0) -> list:
    """A script of some steps, and what it pushed."""
    pushed: list = []

    def script(seat: Seat) -> None:
        seat.open(start)
        for _ in range(count):
            gradient = seat.numbers()
            pushed.append((seat.me, seat.steps, gradient))
            seat.sleep(0.0, 0.01)
            seat.step(gradient)
        seat.finish()

    pushed.append(script)
    return pushed


def test_all_shards_apply_the_same_steps_in_the_same_order():
    orders = set()
    for seed in range(60):
        town = Town(job(3, 1 + seed % 2, 3), seed, STORM)
        written = books(town)
        town.play(steps(town, 3)[0])
        assert written[0].applied == written[1].applied == written[2].applied, f"seed {seed}"
        assert sorted(written[0].applied) == [(group, step) for group in range(3) for step in range(3)]
        orders.add(tuple(written[0].applied))
    assert len(orders) > 10, "the network must mix the groups, or this test shows nothing"


def test_every_message_twice_is_every_message_once():
    for seed in range(60):
        groups = 1 + seed % 3
        town = Town(job(groups, 1 + seed % 2, 1 + seed % 3, max_staleness=(None, 0, 2)[seed % 3]), seed, TWICE)
        written = books(town)
        script, *pushed = (record := steps(town, 3))
        town.play(script)
        pushed = [gradient for _, _, gradient in record[1:]]
        assert same(town.values(), [3.0 - part for part in total(pushed)]), f"seed {seed}"
        assert all(len(book.applied) == 3 * groups for book in written)


@pytest.mark.parametrize("sent", [0, 1, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_dies_between_its_commits_leaves_no_half_step(sent, workers):
    """Its COMMIT of step 1 reaches `sent` of three shards: step 0 counts on all, step 1 on none."""
    for seed in range(6):
        town = Town(job(1, workers, 3), seed, STORM)
        written = books(town)
        town.transport.crash(Address(Role.WORKER, 0, 0), after=3 + sent, kind=Commit)
        script, *_ = (record := steps(town, 3))
        with pytest.raises(Deadlock, match="worker 0/0"):
            town.play(script)
        assert [book.applied for book in written] == [[(0, 0)]] * 3
        first = [gradient for _, step, gradient in record[1:] if step == 0]
        assert same(town.values(), [3.0 - part for part in total(first)])


def test_the_other_groups_go_on_when_a_worker_dies_between_its_commits():
    for seed in range(12):
        town = Town(job(2, 1, 3), seed, STORM)
        written = books(town)
        dead = Address(Role.WORKER, 1, 0)
        town.transport.crash(dead, after=1, kind=Commit)
        script, *_ = (record := steps(town, 4))
        with pytest.raises(Deadlock, match=r"wait: worker 1/0$"):
            town.play(script)
        assert [book.applied for book in written] == [[(0, step) for step in range(4)]] * 3
        theirs = [gradient for me, _, gradient in record[1:] if me.group == 0]
        assert same(town.values(), [3.0 - part for part in total(theirs)])
        for house in town.sim_servers.values():  # what the dead one staged is given up, whatever may still turn up
            house.send(house.server.lost(dead))
        town.transport.revive(dead)
        for sender, to, message in [row for row in town.transport.lost if row[0] == dead]:
            town.transport.send(sender, to, message)
        town.sim.run()
        assert [len(book.applied) for book in written] == [4, 4, 4]


def reconnect(town: Town, who: Address) -> None:
    """The connections of a process are made anew: workers say again what got lost, shards ask what was decided.

    Messages between servers stay lost: `ask` alone has to make up for them.
    """
    lost, town.transport.lost = town.transport.lost, []
    town.transport.revive(who)
    for sender, to, message in lost:
        if Role.WORKER in (sender.role, to.role):
            town.transport.send(sender, to, message)
    for house in town.sim_servers.values():
        house.send(house.server.reconnected())


@pytest.mark.parametrize("sent", [0, 1])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_coordinator_cut_between_its_apply_messages_has_decided(sent, groups):
    """Of three shards it told itself and `sent` others. Revived, and asked, all have applied it, in one order."""
    for seed in range(15):
        town = Town(job(groups, 2, 3), seed, STORM)
        written = books(town)
        town.transport.crash(COORDINATOR, after=2 + sent, kind=StepDecision)  # in the middle of its second decision
        cut = []

        def revive(town=town, written=written, cut=cut) -> None:
            cut.append([len(book.applied) for book in written])
            reconnect(town, COORDINATOR)

        town.sim.at(5.0, revive)
        script, *_ = (record := steps(town, 3))
        town.play(script)
        assert cut[0][0] == 2 and sorted(cut[0][1:]) == [1] * (2 - sent) + [2] * sent, "cut where this test wants it"
        assert written[0].applied == written[1].applied == written[2].applied
        assert len(written[0].applied) == 3 * groups
        assert same(town.values(), [3.0 - part for part in total([g for _, _, g in record[1:]])]), f"seed {seed}"


def test_a_shard_cut_after_staging_asks_and_never_guesses():
    for seed in range(15):
        town = Town(job(2, 1, 3), seed, STORM)
        written, shard = books(town), Address(Role.SERVER, 0, 2)
        town.transport.crash(shard, after=1, kind=StepVote)
        at_cut = []

        def revive(town=town, written=written, shard=shard, at_cut=at_cut) -> None:
            at_cut.append([len(book.applied) for book in written])
            reconnect(town, shard)

        town.sim.at(5.0, revive)
        script, *_ = (record := steps(town, 3))
        town.play(script)
        assert max(at_cut[0]) <= 2 and at_cut[0][2] <= min(at_cut[0][:2]), "nobody went on without the lost shard"
        assert written[0].applied == written[1].applied == written[2].applied
        assert same(town.values(), [3.0 - part for part in total([g for _, _, g in record[1:]])]), f"seed {seed}"


def test_a_step_that_is_never_committed_is_never_applied():
    for seed in range(20):
        town, kept = Town(job(1, 1, 2), seed, STORM), []

        def script(seat: Seat, kept=kept) -> None:
            seat.open(3.0)
            seat.push(seat.numbers())
            kept.append(seat.numbers(1, 50))
            seat.push(kept[0], ordinal=1)  # replaces the first
            seat.commit(revision=1)
            seat.push(seat.numbers())
            seat.finish()

        town.play(script)
        assert same(town.values(), [3.0 - part for part in kept[0]]), f"seed {seed}"


def test_the_same_batches_pushed_twice_count_once():
    """A lease that was read again after its batch had counted: known on every shard, applied on none."""
    town = Town(job(2, 1, 2), 0, STORM)
    seen = []

    def script(seat: Seat) -> None:
        seat.open()
        seat.cluster.sim.sleep(float(seat.me.group))
        gradient = [part * 0 + 1 for part in seat.numbers()]
        seat.step(gradient, marks=(77, 0, 1))
        seen.append(seat.step(gradient, marks=(78 + seat.me.group, 0, 0)).version)
        seat.finish()

    town.play(script)
    assert town.server(0, 0).state.version == town.server(0, 1).state.version == 3
    assert all((part == -3).all() for part in town.values())


def test_pushes_of_a_dead_step_do_not_reach_the_next_one():
    """A message of step 0, kept by the network until step 1 is under way, changes nothing."""
    for seed in range(10):
        town = Town(job(1, 2, 2), seed, STORM)
        old = []

        def keep(sender, to, message, old=old, town=town):
            if isinstance(message, Push) and message.step == 0:
                old.append((sender, to, message))
                town.sim.at(town.sim.now + 0.08, lambda: town.transport.send(sender, to, message))

        town.transport.observers.append(keep)
        script, *_ = (record := steps(town, 5))
        town.sim.at(0.5, town.transport.observers.clear)
        town.play(script)
        assert old and same(town.values(), [3.0 - part for part in total([g for _, _, g in record[1:]])])
