"""Snapshots under the simulated network: what shards freeze together, and what a job goes on from."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from faulty_network import NetworkFaults
from simulation import STORM, VIEWS, ScriptedCluster, ScriptedWorker, job, parameters, same
from snapshot_archive import Archive

from topotrain.config.job import Apply, Grads, Job
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.optim.state_table import StateError, from_rows, merge, to_rows
from topotrain.core.server.consistency import STATIC
from topotrain.extensions.checkpointing.checkpoint_extension import CheckpointExtension, snapshots_of
from topotrain.extensions.checkpointing.data_position import DataPosition
from topotrain.extensions.checkpointing.snapshot_coordinator import END, TIME, PublishSnapshot, WriteSnapshot
from topotrain.extensions.checkpointing.snapshot_messages import CUT, Remainder, SnapshotPart, SnapshotRequest

pytestmark = pytest.mark.simulated

DOUBLE = parameters(150, 256, 90, dtype="float64")


class Played:
    """A job whose workers make some steps, and whose first worker asks for snapshots before some of them."""

    def __init__(
        self,
        made: Job,
        seed: int = 1,
        weather: NetworkFaults = VIEWS,
        steps: int = 4,
        before: Callable[[int, Archive], object] = lambda step, archive: None,
        pause: float = 0.1,
        archive: Callable[[ScriptedCluster], Archive] = Archive,
    ) -> None:
        self.cluster = ScriptedCluster(made, seed, weather)
        self.archive = archive(self.cluster)
        self._steps, self._before, self._pause = steps, before, pause
        self.cluster.play(self._script)

    def _script(self, worker: ScriptedWorker) -> None:
        first = worker.me == self.cluster.workers[0]
        if first:
            self._before(-1, self.archive)
        worker.open()
        for step in range(self._steps):
            worker.sleep(0.0, self._pause)
            if first:
                self._before(step, self.archive)
            worker.step(worker.numbers())
            worker.sleep(self._pause, self._pause)
        worker.finish()

    @property
    def published(self) -> list[PublishSnapshot]:
        return self.archive.published

    @property
    def taken(self) -> list[tuple[str, int]]:
        return [(each.why, dict(each.facts["steps"])[0]) for each in self.published]


def ask(step: int, archive: Archive) -> None:
    if step >= 0:
        archive.ask()


def test_none_is_taken_before_the_first_step():
    found = Played(job(shards=2), steps=0, before=lambda step, archive: archive.ask())
    assert not found.archive.values and not found.published


def test_a_shard_that_cannot_write_costs_this_snapshot_only():
    def before(step, archive):
        archive.fails = 1 if step < 4 else -1
        ask(step, archive)

    archive = Played(job(shards=3), steps=8, before=before).archive
    assert archive.dropped and all("the disk is full" in drop.why for drop in archive.dropped)
    assert archive.published and archive.published[0].number > archive.dropped[-1].number


class Noted(Archive):
    """Keeps the orders to write."""

    def __init__(self, cluster: ScriptedCluster) -> None:
        super().__init__(cluster)
        self.orders: list[WriteSnapshot] = []
        self.places: list[list[int]] = []

    def work(self, me: Address, what: object) -> None:
        if isinstance(what, WriteSnapshot):
            self.orders.append(what)
            self.places.append([slab.body.data_ptr() for slab in (*what.frozen.values, *what.frozen.state)])
        super().work(me, what)  # type: ignore[arg-type]


def test_the_memory_of_a_snapshot_is_that_of_the_one_before():
    places = Played(job(), before=ask, archive=Noted).archive.places
    assert len(places) > 1 and all(each == places[0] for each in places)


def test_jobs_without_a_common_moment_take_none():
    fields = {"groups": 2, "apply": Apply.kOnArrival, "grads": Grads.kHidden, "share_memory": False}
    assert "kOnArrival" in snapshots_of(ScriptedCluster(job(**fields)).server(0, 0)).refusal


# --- positions ---------------------------------------------------------------------------------------------------


def stream(epoch, lease):
    return epoch << 32 | lease


def test_positions_of_leases_are_batches_of_the_epoch():
    position = DataPosition(2, 1, {})
    position.add_lease(0, 0, 0)
    position.add_lease(0, 1, 8)
    position.add_lease(1, 0, 0)
    counts = {stream(0, 0): 8, stream(0, 1): 3, stream(1, 0): 2}
    assert position.applied(counts) == {0: ((0, 11),), 1: ((0, 2),)}
    position.close(1)
    assert position.applied(counts) == {1: ((0, 2),)}


def test_positions_of_static_shares_are_batches_of_the_epoch():
    """Of groups that take turns; and of units of several batches, where an earlier start has left 5 6 8 9 10 …"""
    turns, left = DataPosition(3, 1, {}), DataPosition(1, 2, {3: ((0, 5), (7, 8))})
    counts = {stream(4, STATIC | 0): 3, stream(4, STATIC | 1): 2, stream(4, STATIC | 2): 4}
    assert turns.applied(counts) == {4: ((0, 7), (8, 9), (11, 12))}
    assert left.applied({stream(3, STATIC): 2}) == {3: ((0, 10),)}
    assert left.applied({}) == {3: ((0, 5), (7, 8))}


# --- the table of state ------------------------------------------------------------------------------------------


def test_shards_that_hold_different_state_are_refused():
    known = parameters(64, 64)
    one = from_rows([[[[0, 1]], {"step": ["number", "float32", [], 3.0]}]], known)
    two = from_rows([[[[0, 2]], {"step": ["number", "float32", [], 4.0]}]], known)
    with pytest.raises(StateError, match="p0"):
        merge([one, two], known)
    assert from_rows(to_rows(two), known) == two


@pytest.mark.parametrize(
    "rows",
    [
        None,
        [[]],
        [[[[0, 3]], {}]],
        [[[[1, 0]], {}]],
        [[[[0, 1]], {"a/b": ["number", "float32", [], 3.0]}]],
        [[[[0, 1]], {"a": ["elements", "object", [], 0]}]],
        [[[[0, 1]], {"a": ["whole", "float32", [-1], 0]}]],
        [[[[0, 1]], {}], [[[0, 2]], {}]],
    ],
)
def test_rows_that_no_server_wrote_are_refused(rows):
    with pytest.raises(StateError):
        from_rows(rows, parameters(64, 64))


# --- what workers leave ------------------------------------------------------------------------------------------


def under_way(server) -> int:
    return snapshots_of(server).coordinator.number


class Boxes:
    """Stands for the book of what workers left: who left something when an epoch began, and at which snapshot."""

    def __init__(self, *workers: Address) -> None:
        self.workers, self.left, self.forgotten = workers, {}, 0

    def epoch_states(self):
        return {worker: torch.zeros(3, dtype=torch.uint8) for worker in self.workers}

    def snapshot_states(self, number):
        return self.left.get(number, {})

    def forget_snapshots(self, number):
        self.forgotten = number


def waiting(groups: int, workers: int) -> tuple[ScriptedCluster, Archive, Boxes]:
    """A snapshot that is on disk but for what the workers have to leave, and the next is due."""
    cluster = ScriptedCluster(job(groups=groups, workers=workers, shards=2), 1, VIEWS)
    archive = Archive(cluster)
    server = cluster.server(0, 0)
    boxes = Boxes(*cluster.workers)
    server.extension(CheckpointExtension)._keepers = [boxes]

    def script(worker: ScriptedWorker) -> None:
        worker.open()
        if worker.me == cluster.workers[0]:
            archive.ask()
        for _ in range(2):
            worker.step(worker.numbers())
            worker.sleep(0.1, 0.1)

    cluster.play(script)
    assert archive.values and not archive.published and not archive.dropped and under_way(server) == 1
    return cluster, archive, boxes


def test_a_snapshot_counts_when_the_last_worker_has_left_its_state():
    cluster, archive, boxes = waiting(groups=2, workers=2)
    server = cluster.server(0, 0)
    for done, worker in enumerate(cluster.workers, 1):
        boxes.left.setdefault(1, {})[worker] = torch.full((2,), done, dtype=torch.uint8)
        server.extension(CheckpointExtension)._proceed()
        assert len(archive.published) == (done == 4)
    assert archive.published[0].states == boxes.left[1]
    cluster.sim.run()
    server.extension(CheckpointExtension)._proceed()
    assert boxes.forgotten == 1 and under_way(server) == 0


def test_a_group_that_stands_still_gives_the_state_that_it_left_before():
    cluster, archive, boxes = waiting(groups=2, workers=1)
    boxes.left[1] = {cluster.workers[0]: torch.ones(2, dtype=torch.uint8)}
    archive.ask()
    (published,) = archive.published
    assert published.states[cluster.workers[0]].tolist() == [1, 1]
    assert published.states[cluster.workers[1]].tolist() == [0, 0, 0]


def test_in_one_group_an_older_state_does_not_do():
    cluster, archive, boxes = waiting(groups=1, workers=2)
    boxes.left[1] = {cluster.workers[0]: torch.ones(2, dtype=torch.uint8)}
    archive.ask()
    assert not archive.published and "worker 0/1" in archive.dropped[0].why
    assert under_way(cluster.server(0, 0)) == 2


@pytest.mark.parametrize(("why", "again"), [(TIME, 0), (END, 2)])
def test_one_that_waits_for_a_worker_that_had_to_start_again_is_dropped_and_the_last_one_taken_anew(why, again):
    cluster, archive, boxes = waiting(groups=1, workers=2)
    server = cluster.server(0, 0)
    snapshots_of(server).coordinator._now.reason = why
    boxes.left[1] = {cluster.workers[0]: torch.ones(2, dtype=torch.uint8)}
    server.reset_group(0, ended=False)
    assert "worker 0/1 had to start again" in archive.dropped[0].why
    server.extension(CheckpointExtension).before_decision(0)  # the next step is about to be decided
    assert under_way(server) == again


def test_one_that_has_every_state_does_not_depend_on_which_group_starts_again():
    cluster, archive, boxes = waiting(groups=1, workers=2)
    boxes.left[1] = {worker: torch.ones(2, dtype=torch.uint8) for worker in cluster.workers}
    cluster.server(0, 0).reset_group(0, ended=False)
    assert not archive.dropped


def test_a_worker_whose_script_has_ended_is_waited_for_no_more():
    cluster, archive, _ = waiting(groups=2, workers=1)
    for worker in (cluster.scripted_worker(0), cluster.scripted_worker(1)):
        worker.steps = 2
        cluster.sim.actor(str(worker.me), worker.finish)
    cluster.sim.run()
    assert len(archive.published) == 1


# --- when the user says so ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("freq", "after", "steps"), [(3, 0, [3, 6, 9]), (4, 1, [1, 5, 9]), (5, 7, [7])])
def test_one_behind_each_step_that_is_asked_for(groups, freq, after, steps):
    made = job(groups=groups, workers=2, shards=2, checkpoint_freq=freq, checkpoint_after=after)
    assert Played(made, 3, STORM, 10, pause=1.0).taken == [("step", step) for step in steps]


class Slow(Archive):
    """A disk that has written nothing when the job ends."""

    def __init__(self, cluster: ScriptedCluster) -> None:
        super().__init__(cluster)
        self.kept: list[tuple[Address, list[SnapshotPart]]] = []

    def say(self, me: Address, said: list[SnapshotPart]) -> None:
        self.kept.append((me, said))


def test_who_asks_faster_than_a_disk_writes_has_fewer_and_training_goes_on():
    archive = Played(job(shards=2, checkpoint_freq=1), archive=Slow).archive
    assert not archive.published and len(archive.values) == 1
    for me, said in archive.kept:
        Archive.say(archive, me, said)
    assert len(archive.values) == 1


def test_asked_for_by_time_and_by_step_each_is_taken_once_the_other_is_over():
    def before(step, archive):
        if step in (2, 3):
            archive.ask()

    found = Played(job(shards=2, checkpoint_freq=4), steps=8, before=before)
    assert found.taken == [("time", 3), ("time", 4), ("step", 5), ("step", 8)]


def test_one_that_waits_for_workers_is_not_given_up_for_another_that_comes_soon_after():
    cluster, archive, _ = waiting(groups=1, workers=2)
    server = cluster.server(0, 0)
    server.extension(CheckpointExtension)._schedule._timed = 0  # it was asked for by step
    archive.ask()
    assert under_way(server) == 1 and not archive.dropped
    archive.ask()
    assert archive.dropped


def last(archive: Archive) -> None:
    me = Address(Role.SERVER, 0, 0)
    archive.cluster.sim_servers[me].handle(me, SnapshotRequest(last=True))


def test_the_last_one_is_behind_the_very_next_step():
    def before(step, archive):
        if step == 0 or step == 2:  # nothing is there yet, and then two steps are
            last(archive)

    found = Played(job(groups=2, workers=1, shards=2), before=before)
    assert [drop.number for drop in found.archive.dropped] == [0]
    ((why, _),) = found.taken
    assert why == "end" and found.published[0].facts["version"] in (4, 5, 6)
    last(found.archive)  # the job ends by itself
    assert len(found.archive.dropped) == 1


# --- several server groups ---------------------------------------------------------------------------------------


def test_early_changes_of_a_group_are_held_once():
    cluster = ScriptedCluster(job(2, 1, 1, nserver_groups=2), 1, VIEWS)
    refused = []

    def script(worker: ScriptedWorker) -> None:
        worker.open()
        worker.step(worker.numbers())
        if worker.me.group == 0:
            master, other = cluster.server(0, 0), Address(Role.SERVER, 1, 0)
            bucket = next(b for b in master.state.known.buckets if b.master == 0)
            delta = m.Delta(bucket.id, 99, cut=7, body=master.state.known.flats.view("values", bucket).clone())
            # A new connection repeats what the other side has not acknowledged.
            for _ in range(20_000):
                master.handle(other, delta)
            with pytest.raises(m.ProtocolError, match="far ahead"):
                master.handle(other, replace(delta, sync=100))
            # What a group that averages has frozen has no exchange: the snapshot tells one from the next.
            cut = master.extension(CheckpointExtension).cut
            assert cut is not None
            remainder = Remainder(8, bucket.id, 0, body=delta.body)
            assert cut.handle(other, remainder) == cut.handle(other, remainder) == ()
            with pytest.raises(m.ProtocolError, match="far ahead"):
                cut.handle(other, replace(remainder, number=9))
            refused.append(bucket)
        worker.finish()

    cluster.play(script)
    assert refused


def test_a_snapshot_at_the_end_has_a_masters_final_values_once():
    cluster = ScriptedCluster(job(2, 1, 2, nserver_groups=2), 1, VIEWS, DOUBLE)
    archive = Archive(cluster)

    def script(worker: ScriptedWorker) -> None:
        worker.open()
        for _ in range(3):
            worker.step(worker.numbers())
        worker.finish()
        if worker.me.group == 0:
            worker.client.values.fetch_final()
            worker.sleep(1.0, 1.0)
            archive.ask()

    cluster.play(script)
    (published,) = archive.published
    assert same([archive.values[published.number][p.name] for p in cluster.map.parameters], cluster.values())


def test_an_announcement_that_is_sent_again_freezes_no_server_again():
    heard: list[int] = []
    frozen: list[tuple[Address, int]] = []

    def watch(cluster: ScriptedCluster) -> None:
        def repeat(sender: Address, to: Address, message: m.Message) -> None:
            if isinstance(message, SnapshotPart) and message.stage == CUT and not heard:
                heard.append(message.number)
                cluster.sim.at(cluster.sim.now + 0.5, lambda: cluster.sim_servers[to].handle(sender, message))

        cluster.transport.observers.append(repeat)
        for me, sim_server in cluster.sim_servers.items():
            snapshots = snapshots_of(sim_server.server)

            def noted(*args, me=me, snapshots=snapshots, freeze=snapshots.freeze) -> None:
                if snapshots._due:
                    frozen.append((me, snapshots._due))
                freeze(*args)

            snapshots.freeze = noted

    def before(step, archive):
        if step == -1:
            watch(archive.cluster)
        if step == 0:
            archive.ask()

    found = Played(job(2, 1, 2, nserver_groups=2), before=before, pause=0.3)
    assert heard == [1] and sorted(frozen) == sorted((me, 1) for me in found.cluster.sim_servers)


@pytest.mark.parametrize("broken", [0, 1], ids=["group 0", "group 1"])
def test_what_one_of_several_groups_cannot_freeze_ends_that_snapshot_and_nothing_else(broken):
    def before(step, archive):
        if step == 3:
            snapshots = snapshots_of(archive.cluster.server(broken, 0))
            snapshots._freezer = Broken(snapshots._freezer)
        if step in (0, 4):
            archive.ask()

    archive = Played(job(2, 1, 1, nserver_groups=2), steps=6, before=before).archive
    assert len(archive.published) + len(archive.dropped) == 2
    assert [drop.why for drop in archive.dropped] == ["state of no known form"]


class Broken:
    """Freezes nothing, the first time."""

    def __init__(self, freezer) -> None:
        self.freezer, self.turns = freezer, 0

    def freeze(self):
        self.turns += 1
        if self.turns == 1:
            raise StateError("state of no known form")
        return self.freezer.freeze()
