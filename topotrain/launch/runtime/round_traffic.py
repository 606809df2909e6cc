"""Bytes of a step, or of an outer optimizer's round, and a link's time for them.

All is arithmetic, and needs no torch. Headers of messages, and the first and the last values, are not counted.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from topotrain.config.job import Cluster, Compression, ConfigError, Grads, Job, TransportChoice
from topotrain.config.sharding import Bucket, SliceMap
from topotrain.config.topology import Topology
from topotrain.extensions.compression.encoded_sizes import encoded_bytes, has_codec, of_replies
from topotrain.extensions.host_sums.host_units import refusal


def link_seconds(nbytes: float, mbit: float) -> float:
    """Return the seconds that a link of so many Mbit/s needs for these bytes."""
    return nbytes * 8 / 1e6 / mbit


def link_mbit(nbytes: float, seconds: float) -> float:
    """Return the Mbit/s of a link that carries these bytes in so many seconds."""
    return nbytes * 8 / 1e6 / seconds


@dataclass(frozen=True, slots=True)
class HostLink:
    """The rounds on the link of the busiest host with servers.

    Attributes:
        hosts: the number of hosts with servers. Each unit counts as one.
        received: the bytes that come in in a round.
        sent: the bytes that go out, which a link carries at the same time.
        apart: no worker is on these hosts, so that each of k hosts carries a k-th.
        mbit: the speed of the link in each direction. None: not known.
        exchange_s: the seconds of a round on this link.
        shortest_step_s: with shorter steps of the workers the link is full.
        hosts_for_half: so many hosts with servers halve both. None: workers are on the hosts of servers, too.
    """

    hosts: int
    received: int
    sent: int
    apart: bool
    mbit: float | None = None
    exchange_s: float | None = None
    shortest_step_s: float | None = None
    hosts_for_half: int | None = None

    def at(self, mbit: float, steps: int) -> "HostLink":
        """Return the times of rounds of so many local steps on a link of this speed."""
        exchange_s = link_seconds(max(self.received, self.sent), mbit)
        half = 2 * self.hosts if self.apart else None
        return replace(self, mbit=mbit, exchange_s=exchange_s, shortest_step_s=exchange_s / steps, hosts_for_half=half)


@dataclass(frozen=True, slots=True)
class RoundTraffic:
    """Encoded bytes of a round, in which all fragments are exchanged once.

    Attributes:
        steps: local steps in a round.
        worker_bytes: that each worker sends to the servers.
        worker_received: that each worker receives from the servers.
        server_bytes: that the busiest unit with servers receives.
        server_sent: that it sends.
        group_bytes: that each worker sends to the others of its group in each step, and receives from them.
        encoding: in words.
        link: what hosts with servers carry.
    """

    steps: int
    worker_bytes: int
    worker_received: int
    server_bytes: int
    server_sent: int
    group_bytes: int
    encoding: str
    link: HostLink

    def explain(self) -> str:
        """Return the bytes of a worker in words."""
        sent, received = mb(self.worker_bytes), mb(self.worker_received)
        both = "as much" if self.worker_bytes == self.worker_received else f"{received} MB"
        text = f"in {self.steps} steps each worker sends {sent} MB to the servers and receives {both} ({self.encoding})"
        if not self.group_bytes:
            return text
        return (
            f"{text}. In each step a worker sends {mb(self.group_bytes)} MB to the others of its group and receives as "
            "much"
        )

    def explain_link(self) -> str:
        """Return what a host with servers carries, and how long that takes."""
        link = self.link
        which = "the host with servers" if link.hosts == 1 else f"the busiest of {link.hosts} hosts with servers"
        text = f"a round moves {mb(link.received)} MB into {which} and {mb(link.sent)} MB out of it"
        if link.mbit is None or link.exchange_s is None or link.shortest_step_s is None:
            average = link_mbit(max(link.received, link.sent), self.steps)
            more = "; with k servers on k hosts each carries a k-th" if link.apart else ""
            return (
                f"{text}. With steps of 1 s that is {average:.3g} Mbit/s, with steps of 0.1 s ten times as much{more}"
            )
        share = f"; with k servers on k hosts {link.exchange_s * link.hosts:.3g} s / k" if link.apart else ""
        half = (
            "" if link.hosts_for_half is None else f"; steps half as long need {link.hosts_for_half} hosts with servers"
        )
        return (
            f"{text}. At {link.mbit:g} Mbit/s that takes {link.exchange_s:.3g} s{share}. The link is full with steps "
            f"shorter than {link.shortest_step_s:.3g} s{half}"
        )


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Bytes on the link of the busiest host in a step, with a host for each unit.

    Attributes:
        nbytes: in its fuller direction.
        means: more, where the script reads gradients.
        saving: the least with another compression.
        by: that compression. Empty: there is none, or it is this one.
    """

    nbytes: int
    means: int
    saving: int = 0
    by: str = ""

    def explain(self) -> str:
        """Return the bytes in words."""
        text = f"a step moves {mb(self.nbytes)} MB over the link of the busiest unit in each direction"
        text += f", and {mb(self.means)} MB more where the script reads gradients" if self.means else ""
        return text + (f". With compression: {self.by} it would be {mb(self.saving)} MB" if self.by else "")


def step_traffic(job: Job, topology: Topology, slices: SliceMap) -> StepTraffic | None:
    """Return the traffic of a step. None: no link is used, or not in each step."""
    cluster = job.cluster
    local = cluster.outer is not None or cluster.n_push > 1 or cluster.n_fetch > 1 or topology.server_groups > 1
    if local or len(topology.units) < 2 or topology.collective or cluster.transport is TransportChoice.kShm:
        return None
    units = [topology.unit_of(server) for server in topology.servers(0)]
    # The workers of a host are summed before the link where they can be.
    workers = _workers_by_unit(topology, summed=not refusal(job, topology))
    together = workers.total() < topology.worker_groups * topology.workers_per_group
    visible = job.grads is Grads.kVisible and topology.workers_per_group > 1

    def busiest(cluster: Cluster, means: bool) -> int:
        kinds = cluster.compression, of_replies(cluster)
        pushes, pulls = (_by_shard(slices, _sizes(cluster, kind, slices)) for kind in kinds)
        came, went = _over_links(units, workers, pushes, [pull * (1 + means) for pull in pulls])
        return max(*came.values(), *went.values())

    # Workers that are summed get the means also where no script reads them.
    nbytes = busiest(cluster, visible and together)
    means = busiest(cluster, visible) - nbytes
    if cluster.compression is not Compression.kNone:
        return StepTraffic(nbytes, means)
    try:
        saving = busiest(replace(cluster, compression=Compression.kFp16), False)
    except ConfigError:  # not in this layout
        saving = nbytes
    return StepTraffic(nbytes, means, saving, Compression.kFp16.value if saving < nbytes else "")


def round_traffic(cluster: Cluster, topology: Topology, slices: SliceMap) -> RoundTraffic | None:
    """Return the traffic of a round. None: there is no outer optimizer."""
    if cluster.outer is None:
        return None
    groups, workers = topology.worker_groups, topology.workers_per_group
    pushes = _by_shard(slices, _sizes(cluster, cluster.compression, slices))
    pulls = _by_shard(slices, _sizes(cluster, of_replies(cluster), slices))
    plain = sum(slices.shard_bytes)
    # Each worker of a group pushes its part of the group's difference, and each receives all new values.
    units = [topology.unit_of(server) for server in topology.servers(0)]
    received, sent = Counter[int](), Counter[int]()
    for unit, push, pull in zip(units, pushes, pulls, strict=True):
        received[unit] += push * groups
        sent[unit] += pull * groups * workers
    # Of each bucket a worker sends its gradient to the one that adds it up, or the mean to all others.
    in_group = 2 * (workers - 1) * plain // workers
    busiest = max(received, key=lambda unit: max(received[unit], sent[unit]))
    link_in, link_out = _over_links(units, _workers_by_unit(topology), pushes, pulls, workers)
    hardest = max(units, key=lambda unit: max(link_in[unit], link_out[unit]))
    link = HostLink(len({*units}), link_in[hardest], link_out[hardest], cluster.server_worker_separate)
    if cluster.link is not None and cluster.link.bandwidth is not None:
        link = link.at(cluster.link.bandwidth, cluster.sync_freq)
    return RoundTraffic(
        steps=cluster.sync_freq,
        worker_bytes=sum(pushes) // workers,
        worker_received=sum(pulls),
        server_bytes=received[busiest],
        server_sent=sent[busiest],
        group_bytes=in_group,
        encoding=_encoding(cluster),
        link=link,
    )


def _workers_by_unit(topology: Topology, summed: bool = False) -> Counter[int]:
    """Count the workers of each unit; summed: those of a group in a unit are one."""
    found = Counter[int]()
    for group in range(topology.worker_groups):
        units = [topology.unit_of(worker) for worker in topology.workers(group)]
        found.update(set(units) if summed else units)
    return found


def _over_links(
    units: Sequence[int], workers: Mapping[int, int], pushes: Sequence[int], pulls: Sequence[int], parts: int = 1
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the bytes that come into each unit, and that go out of it.

    units: of the servers. workers: of each unit. parts: a worker pushes one of so many parts of all. A worker and a
    server of the same unit need no link.
    """
    every = sum(workers.values())
    came, went = {}, {}
    for unit in {*units, *workers}:
        inside = workers.get(unit, 0)
        here = [shard for shard, its in enumerate(units) if its == unit]
        away = [shard for shard, its in enumerate(units) if its != unit]
        came[unit] = sum(pushes[s] for s in here) * (every - inside) // parts + sum(pulls[s] for s in away) * inside
        went[unit] = sum(pulls[s] for s in here) * (every - inside) + sum(pushes[s] for s in away) * inside // parts
    return came, went


def _sizes(cluster: Cluster, kind: Compression, slices: SliceMap) -> Callable[[Bucket], int]:
    """Return the bytes of a bucket with this compression."""

    def size(bucket: Bucket) -> int:
        space = slices.spaces[bucket.space]
        if has_codec(kind, space.dtype):
            return encoded_bytes(kind, bucket.hi - bucket.lo, cluster.compression_ratio)
        return sum(piece.hi - piece.lo for piece in bucket.pieces) * space.itemsize

    return size


def _by_shard(slices: SliceMap, size: Callable[[Bucket], int]) -> list[int]:
    return [sum(map(size, slices.buckets_of(shard))) for shard in range(slices.shards)]


def _encoding(cluster: Cluster) -> str:
    kind, replies = cluster.compression, of_replies(cluster)
    if kind is Compression.kNone:
        return "uncompressed"
    down = "whole values" if replies is Compression.kNone else f"changes of the values as {replies.value}"
    return f"{kind.value} up, {down} down"


def mb(size: int) -> str:
    """Return bytes as text, in MB."""
    return f"{size / 1e6:,.2f}"
