"""One step of a worker group in time.

Buckets go over links and through servers, one after the other.

Equal hosts are one: what each of them sends goes through the link of one of them. A bucket that some host of a class
gets takes that host's link for its own time, and the link of the class for its share. So buckets for different servers
overlap, and all of them together take as long as the links need.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush

from topotrain.config.job import Algorithm, Apply, Grads, Job, Pull
from topotrain.config.topology import Topology
from topotrain.extensions.host_sums.host_units import used_units
from topotrain.tools.prediction.flow import flow_frames as frames
from topotrain.tools.prediction.flow.flow_collectives import depth
from topotrain.tools.prediction.flow.flow_costs import Computing, Costs
from topotrain.tools.prediction.flow.flow_frames import BucketShapes, Parcel
from topotrain.tools.prediction.flow.flow_votes import commit_to


class Stage(Enum):
    """The events of a bucket in a step."""

    PUSHED = auto()
    """It leaves the workers of a class of hosts."""
    ARRIVED = auto()
    """All its parts are at the server."""
    ADDED = auto()
    """The server adds the parts up."""
    UPDATES = auto()
    """The server updates its values."""
    MEAN_SPREADS = auto()
    """The server sends its mean."""
    MEAN_LEAVES = auto()
    """Its mean leaves the link of the server."""
    MEAN_SEEN = auto()
    """All workers have its mean."""
    VALUES_SPREAD = auto()
    """The server sends its new values."""
    VALUES_LEAVE = auto()
    """Its new values leave the link of the server."""
    VALUES_SHOWN = auto()
    """All workers have its new values."""


@dataclass
class HostClass:
    """Hosts that do the same in a step of a worker group.

    Attributes:
        count: their number.
        workers: of the group, on each of them.
        servers: that the group uses, on each of them.
        computing: of the slowest of their workers.
        copies: how often each bucket goes over the link of a host: once for each worker, or once for all of them.
        out, into, core: until when the links and the cores of the servers are taken.
    """

    count: int
    workers: int
    servers: int
    computing: Computing
    copies: int
    out: float = 0.0
    into: float = 0.0
    core: float = 0.0

    def send(self, now: float, seconds: float) -> float:
        """Take the outgoing link for so long; return until when it is taken."""
        self.out = max(self.out, now) + seconds
        return self.out

    def receive(self, now: float, seconds: float) -> float:
        """Take the incoming link for so long; return until when it is taken."""
        self.into = max(self.into, now) + seconds
        return self.into

    def work(self, now: float, seconds: float) -> float:
        """Take the cores of the servers for so long; return until when they are taken."""
        self.core = max(self.core, now) + seconds
        return self.core

    def serve(self, now: float, seconds: float) -> float:
        """Let one of the servers work for so long; return until when the cores are taken."""
        return self.work(now, seconds / max(1, self.servers * self.count))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Moments of a step, from its begin.

    Attributes:
        computed: the mean over the workers.
        slowest: the slowest worker has computed.
        pushed: the last gradient has left.
        committed: the slowest worker has called `optimizer.step()`, and has its means if it sees them.
        applied: all servers have updated.
        end: the new values are there.
    """

    computed: float
    slowest: float
    pushed: float
    committed: float
    applied: float
    end: float


class StepPipeline:
    """The step of a worker group that has its servers, links and hosts for itself.

    Args:
        costs: of the job.
        shapes: of its model.
        ready: by bucket, the share of the backward after which its gradient is there.
        groups: the worker group, or those that make each exchange together.
        buckets: those that are exchanged in this step (numbers).
    """

    def __init__(
        self,
        costs: Costs,
        shapes: BucketShapes,
        ready: Sequence[float],
        groups: Sequence[int],
        buckets: Sequence[int],
    ) -> None:
        self._costs, self._shapes, self._ready = costs, shapes, ready
        self._job, self._topology = costs.job, costs.topology
        self._size, self._groups = costs.topology.workers_per_group * len(groups), len(groups)
        self._visible = _sees_means(costs.job, costs.topology)
        self._on_arrival = costs.job.apply is Apply.kOnArrival
        self._buckets = [number for number in buckets if shapes.all[number].trained]
        self._all = list(buckets)
        self._classes, self._home = host_classes(costs, groups)
        self._senders = [each for each in self._classes if each.workers]
        self._tree = costs.topology.server_collective and costs.job.cluster.algorithm is not Algorithm.kNaive
        self._hops = depth(costs.job.cluster.algorithm, costs.topology.shards) if self._tree else 0
        self._events: list[tuple[float, int, Stage, int, int]] = []
        self._number = 0
        self._missing = {number: len(self._senders) for number in self._buckets}
        self._arrived = dict.fromkeys(self._buckets, 0.0)
        self._summed: dict[int, float] = {}
        self._seen = self._left = self._shown = 0.0
        self._values: dict[int, float] = {}

    # --- the step ----------------------------------------------------------------------------------------------------

    def run(self) -> StepTimes:
        """Return the moments of the step."""
        backward = self._begin()
        self._go_on()
        slowest = max(each.computing.total for each in self._senders)
        computed = sum(c.computing.total * c.workers * c.count for c in self._senders) / self._size
        committed = max(backward, self._seen) + self._costs.probe.worker_step_s
        sent = committed + self._commits_s()
        decided = self._decide(sent)
        applied = self._apply(decided)
        self._go_on()
        # The reply to the commit comes with the values.
        end = max(applied + (0.0 if self._near else self._costs.delay_s), self._shown)
        end += self._topology.shards * self._costs.receive_s(frames.APPLIED, self._near)
        if self._job.pull is Pull.kLazy:
            end = self._lazy_end(sent)
        return StepTimes(computed, slowest, max(self._left, slowest), committed, applied, end)

    @property
    def _near(self) -> bool:
        return len(self._classes) == 1 and self._classes[0].count == 1

    def _begin(self) -> float:
        """Let all workers push; return when the last backward is over."""
        over = 0.0
        for place, each in enumerate(self._senders):
            busy = 0.0
            for number in sorted(self._buckets, key=self._ready.__getitem__):
                then = each.computing.before + each.computing.backward * self._ready[number]
                # A worker sends in the thread of its backward.
                busy += self._costs.send_s(frames.push(self._shapes.all[number]), self._near)
                self._at(then + busy, Stage.PUSHED, number, place)
            over = max(over, each.computing.total + busy)
        return over

    def _at(self, time: float, stage: Stage, number: int, place: int = 0) -> None:
        """Let a bucket come to a stage. place: of the class of hosts that pushes it."""
        self._number += 1
        heappush(self._events, (time, self._number, stage, number, place))

    def _go_on(self) -> None:
        while self._events:
            now, _, stage, number, place = heappop(self._events)
            self._happen(now, stage, number, place)

    def _happen(self, now: float, stage: Stage, number: int, place: int) -> None:
        shape = self._shapes.all[number]
        match stage:
            case Stage.PUSHED:
                self._push(now, self._senders[place], number)
            case Stage.ARRIVED:
                self._arrive(now, number)
            case Stage.ADDED:
                self._sum(now, number)
            case Stage.UPDATES:
                self._update(now, number)
            case Stage.MEAN_SPREADS:
                self._spread(now, number, frames.mean(shape), Stage.MEAN_LEAVES, Stage.MEAN_SEEN)
            case Stage.MEAN_LEAVES:
                self._leave(now, number, frames.mean(shape), Stage.MEAN_SEEN)
            case Stage.MEAN_SEEN:
                self._seen = max(self._seen, now)
            case Stage.VALUES_SPREAD:
                self._spread(now, number, frames.values(shape), Stage.VALUES_LEAVE, Stage.VALUES_SHOWN)
            case Stage.VALUES_LEAVE:
                self._leave(now, number, frames.values(shape), Stage.VALUES_SHOWN)
            case Stage.VALUES_SHOWN:
                self._values[number] = self._shown = max(self._shown, now)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def _center(self, number: int) -> HostClass:
        """The hosts of which one adds up a bucket."""
        shard = self._shapes.map.buckets[number].shard
        if self._topology.server_collective and self._job.cluster.algorithm is Algorithm.kNaive:
            shard = 0
        return self._classes[self._home[shard]]

    def _push(self, now: float, each: HostClass, number: int) -> None:
        """A bucket leaves the workers of a class."""
        center, shape = self._center(number), self._shapes.all[number]
        if self._tree:
            self._arrived[number] = max(self._arrived[number], now)
        else:
            left, here = self._over_link(now, each, center, shape.pushed * each.copies, each.count)
            self._left = max(self._left, left)
            self._arrived[number] = max(self._arrived[number], here)
        self._missing[number] -= 1
        if not self._missing[number]:
            self._at(self._arrived[number], Stage.ARRIVED, number)

    def _over_link(
        self, now: float, sender: HostClass, receiver: HostClass, nbytes: float, senders: int
    ) -> tuple[float, float]:
        """Send so many bytes from each of the sending hosts to one host.

        Return when they have left, and when they are there.
        """
        costs = self._costs
        # A host that is of both classes keeps its own part.
        far = (sender.count - 1) / sender.count if sender is receiver else 1.0
        away = costs.seconds(nbytes * far)
        left = sender.send(now, away)
        whole = away * senders
        there = receiver.receive(now, whole / receiver.count)
        # Connections share a link alike, so a bucket does not wait until those before it are through.
        return left, max(left, there, now + whole) + (costs.delay_s if far else 0.0)

    def _arrive(self, now: float, number: int) -> None:
        """All parts of a bucket are at the server."""
        center, shape, costs = self._center(number), self._shapes.all[number], self._costs
        if self._tree:
            self._along_tree(now, number, shape.nbytes, Stage.ADDED)
            return
        parts = sum(each.copies * each.count for each in self._senders)
        each = costs.handle_s(frames.push(shape), self._near)
        # The first parts are handled while the last ones are under way.
        self._work(center, now, parts * each)
        self._at(max(now + each, center.core), Stage.ADDED, number)

    def _work(self, where: HostClass, now: float, seconds: float) -> float:
        """A server of a class works; return when all that was to do there is done."""
        return max(where.serve(now, seconds), now + seconds)

    def _sum(self, now: float, number: int) -> None:
        """A bucket is added up."""
        center, shape = self._center(number), self._shapes.all[number]
        done = now if self._tree else self._work(center, now, self._costs.sum_s(shape.nbytes, self._size))
        self._summed[number] = done
        if self._on_arrival:
            self._at(done, Stage.UPDATES, number)
        elif self._visible:
            self._at(done, Stage.MEAN_SPREADS, number)

    def _update(self, now: float, number: int) -> None:
        """A bucket is updated while the backward still works."""
        done = self._work(self._center(number), now, self._costs.update_s(self._shapes.all[number].elements))
        self._at(done, Stage.VALUES_SPREAD, number)

    def _spread(self, now: float, number: int, parcel: Parcel, leaves: Stage, there: Stage) -> None:
        """A server sends a bucket to all workers, over its link or along the tree."""
        if self._tree:
            self._along_tree(now, number, parcel.payload, there)
            return
        copies = sum(each.copies * each.count for each in self._senders)
        sent = self._work(self._home_of(number), now, copies * self._costs.send_s(parcel, self._near))
        self._at(sent, leaves, number)

    def _leave(self, now: float, number: int, parcel: Parcel, there: Stage) -> None:
        """A bucket leaves the link of its server."""
        costs, home, here = self._costs, self._home_of(number), now
        for each in self._senders:
            far = (each.count - 1) / each.count if each is home else 1.0
            whole = costs.seconds(parcel.nbytes * each.copies * each.count * far)
            left = home.send(now, whole / home.count)
            arrived = each.receive(now, costs.seconds(parcel.nbytes * each.copies * far))
            here = max(here, left, arrived, now + whole)
        here += 0.0 if self._near else costs.delay_s
        self._at(here + costs.receive_s(parcel, self._near), there, number)

    def _home_of(self, number: int) -> HostClass:
        """The hosts of which one has the server of a bucket."""
        return self._classes[self._home[self._shapes.map.buckets[number].shard]]

    def _along_tree(self, now: float, number: int, nbytes: float, there: Stage) -> None:
        """A bucket goes from server to server."""
        costs, ranks = self._costs, self._topology.shards
        hop = Parcel(1.0, nbytes, nbytes)
        work = costs.handle_s(hop, self._near) + costs.send_s(hop, self._near)
        here = now + self._hops * (costs.seconds(nbytes) + costs.delay_s + work)
        for each in self._classes:
            taken = costs.seconds(nbytes) * (ranks - 1) / ranks * each.servers
            busy = each.work(now, work * (ranks - 1) / ranks)
            here = max(here, each.send(now, taken), each.receive(now, taken), busy)
        self._left = max(self._left, here)
        self._at(here, there, number)

    # --- the decision ------------------------------------------------------------------------------------------------

    def _commits_s(self) -> float:
        """A worker sends its commit to each server."""
        held = (self._shapes.of_shard(shard) for shard in range(self._topology.shards))
        return sum(self._costs.send_s(commit_to(each), self._near) for each in held)

    def _decide(self, sent: float) -> float:
        """Return when all servers know that they are to apply the step."""
        costs, shards = self._costs, self._topology.shards
        delay = 0.0 if self._near else costs.delay_s
        frame = commit_to(self._shapes.of_shard(0))
        staged = sent + delay + self._size * costs.handle_s(frame, self._near)
        staged = max(staged, *self._summed.values()) if self._summed else staged
        if shards == 1:
            return staged
        votes = (
            self._groups
            * (shards - 1)
            * (costs.handle_s(frames.VOTE, self._near) + costs.send_s(frames.DECISION, self._near))
        )
        return staged + 2 * delay + votes + costs.handle_s(frames.DECISION, self._near)

    def _apply(self, now: float) -> float:
        """Update all buckets, and send the new values.

        Return when the last bucket is updated.
        """
        if self._on_arrival:
            return now
        last = now
        for number in self._all:
            shape, home = self._shapes.all[number], self._home_of(number)
            done = home.serve(now, self._costs.update_s(shape.elements))
            last = max(last, done)
            self._at(done, Stage.VALUES_SPREAD, number)
        return last

    def _lazy_end(self, sent: float) -> float:
        """Return when the next step could begin so that no layer of its forward waits."""
        # The layers of the forward come in the order that is the reverse of that of the backward.
        computing = max(self._senders, key=lambda each: each.computing.total).computing
        wanted = (here - computing.before * (1 - self._ready[number]) for number, here in self._values.items())
        return max(sent, *wanted) if self._values else sent


def _sees_means(job: Job, topology: Topology) -> bool:
    return job.grads is Grads.kVisible and topology.workers_per_group > 1 and job.cluster.outer is None


def host_classes(costs: Costs, groups: Sequence[int]) -> tuple[list[HostClass], Sequence[int]]:
    """Return the classes of the hosts that worker groups use.

    The second result is the number of the class of each of their servers.
    """
    topology = costs.topology
    sg = topology.server_group_of(groups[0])
    workers: dict[int, list[Computing]] = {}
    for worker in (each for group in groups for each in topology.workers(group)):
        workers.setdefault(topology.host_of(worker), []).append(costs.computing(worker))
    homes = [topology.host_of(each) for each in topology.servers(sg)]
    servers: dict[int, int] = {}
    for home in homes:
        servers[home] = servers.get(home, 0) + 1
    summed = topology.cluster.nworkers_per_procs > 1 and bool(used_units(costs.job, topology, groups[0]))
    naive = topology.server_collective and costs.job.cluster.algorithm is Algorithm.kNaive
    slowest: dict[int, Computing] = {}
    alike: dict[tuple[object, ...], list[int]] = {}
    for host in dict.fromkeys((*workers, *servers)):
        here = workers.get(host, [])
        slowest[host] = max(here, key=lambda each: each.total, default=Computing(0.0, 0.0, 0.0))
        # In a star the center does more than the others.
        key = (len(here), round(slowest[host].total, 9), servers.get(host, 0), naive and host == homes[0])
        alike.setdefault(key, []).append(host)
    found: list[HostClass] = []
    for first, *others in alike.values():
        held = len(workers.get(first, ()))
        copies = 1 if summed and held else held
        found.append(HostClass(1 + len(others), held, servers.get(first, 0), slowest[first], copies))
    of_host = {host: number for number, hosts in enumerate(alike.values()) for host in hosts}
    return found, [of_host[home] for home in homes]


def ready_shares(shapes: BucketShapes, shares: Sequence[float]) -> Iterator[float]:
    """Return of each bucket the share of the backward after which it is complete.

    shares: of each parameter.
    """
    slice_map = shapes.map
    for bucket in slice_map.buckets:
        parameters = (slice_map.segments[piece.segment].parameter for piece in bucket.pieces)
        yield max((shares[each] for each in parameters if slice_map.parameters[each].trainable), default=0.0)
