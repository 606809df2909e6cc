"""The seconds for which a mean step takes each resource.

Resources are links of hosts, processes, and the cores of hosts.
"""

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from functools import cached_property

import numpy as np
import numpy.typing as npt

from topotrain.config.topology import Role
from topotrain.tools.prediction.flow.flow_costs import Costs
from topotrain.tools.prediction.flow.flow_frames import BucketShapes
from topotrain.tools.prediction.flow.flow_loads import Amounts, Loads, Places

_ROUNDS = 300
"""Of the iteration for waits at servers, which converges in a few dozen."""


class Meeting(Enum):
    """What the groups of a job wait for, beside their own work."""

    IN_STEP = auto()
    """Each other."""
    AT_SERVERS = auto()
    """Links and servers that others use, too."""
    NEVER = auto()
    """Nothing: exchanges are under way while they train."""


class Demands:
    """The demands of a job.

    Args:
        costs: of messages and kernels.
        places: the processes.
        loads: what they send and get in a mean step.
        shapes: of the model's buckets.
    """

    def __init__(self, costs: Costs, places: Places, loads: Loads, shapes: BucketShapes) -> None:
        self._costs, self._places, self._loads, self._shapes = costs, places, loads, shapes

    # --- resources ---------------------------------------------------------------------------------------------------

    @cached_property
    def links_out(self) -> Amounts:
        """Seconds of each host's link out."""
        return self._loads.of_hosts(self._loads.sent_far) / self._costs.rate

    @cached_property
    def links_in(self) -> Amounts:
        """Seconds of each host's link in."""
        return self._loads.of_hosts(self._loads.received_far) / self._costs.rate

    @cached_property
    def work(self) -> Amounts:
        """Seconds of a core of each worker and server, without a worker's own computing."""
        loads, transports = self._loads, self._costs.probe.transports
        found = np.zeros(self._places.count)
        for sent, received, way in (
            (loads.sent_far, loads.received_far, transports["tcp"]),
            (loads.sent_near, loads.received_near, transports["shm"]),
        ):
            found += sent.messages * way.send_message_s + sent.nbytes * way.send_byte_s
            found += received.messages * way.receive_message_s + received.nbytes * way.receive_byte_s
        servers = slice(self._places.workers, None)
        found[servers] += loads.received.messages[servers] * self._costs.probe.server_message_s
        found[servers] += np.tile(self._kernels(), self._costs.topology.server_groups)
        return found

    def _kernels(self) -> Amounts:
        """Seconds of kernels in a mean step on each server of a server group."""
        topology, cluster, costs = self._costs.topology, self._costs.job.cluster, self._costs
        size, groups = topology.workers_per_group, len(topology.worker_groups_of(0))
        found = np.zeros(topology.shards)
        for shard in range(topology.shards):
            for shape in self._shapes.of_shard(shard):
                if not shape.trained:
                    continue
                if cluster.outer is not None:
                    # One update for each round, of the mean of all groups.
                    seconds = (costs.sum_s(shape.nbytes, groups) + costs.update_s(shape.elements)) / cluster.sync_freq
                    found[shard] += seconds
                    continue
                parts = 1 if topology.collective else size
                seconds = costs.sum_s(shape.nbytes, parts) + costs.update_s(shape.elements)
                if groups > 1 or topology.synced:
                    # Each group is shown a copy, because others change the values meanwhile.
                    seconds += costs.probe.kernels.operation_s + shape.nbytes * costs.probe.kernels.copy_byte_s
                found[shard] += seconds * groups / cluster.n_push
        return found

    @cached_property
    def cores(self) -> Amounts:
        """Seconds of the cores of each host, with the computing of workers."""
        topology, places, costs = self._costs.topology, self._places, self._costs
        size = topology.workers_per_group
        # What a straggler takes longer takes no cores.
        usual = [costs.usual_computing(index).total + costs.probe.worker_step_s for index in range(size)]
        whole = self.work.copy()
        whole[: places.workers] += np.tile(usual, topology.worker_groups)
        hosts = np.bincount(places.host, weights=whole, minlength=places.hosts)
        if costs.machines.emulated:
            return np.array([hosts.sum() / costs.cores])
        return hosts / costs.cores

    # --- the pace ----------------------------------------------------------------------------------------------------

    def paces(self, alone: Sequence[float], kinds: Sequence[Sequence[int]], meeting: Meeting) -> list[float]:
        """Return the seconds of a mean step of each kind of groups.

        All groups share the resources. Groups that do not wait for each other meet at the servers by chance. Their
        waits there are those of a closed network of queues (mean value analysis: Reiser and Lavenberg, 1980, as
        Schweitzer has approximated it).

        Args:
            alone: of a step of a group that has all for itself.
            kinds: the numbers of the groups of each kind.
            meeting: what groups wait for.
        """
        if meeting is Meeting.IN_STEP:
            return [max(each, self.most_needed) for each in alone]
        waits = meeting is Meeting.AT_SERVERS
        least = [max(each, self._needed(place, alone, kinds, waits)) for place, each in enumerate(alone)]
        # Each server group serves its part of the groups.
        parts = self._costs.topology.server_groups
        counts = [len(groups) for groups in kinds]
        sharing = sum(counts) / parts
        if not waits or sharing <= 1:
            return least
        demands = np.array(self._shared()) / sharing
        rest = np.maximum(0.0, np.array(alone) - demands.sum())
        number = np.array(counts, dtype=np.float64) / parts
        queues = np.outer(number, np.full(len(demands), 1 / len(demands)))
        stay = np.tile(demands, (len(counts), 1))
        for _ in range(_ROUNDS):
            # A group finds all others there, and not itself.
            stay = demands * (1 + queues.sum(axis=0) - queues / number[:, None])
            queues = (number / np.maximum(1e-12, rest + stay.sum(axis=1)))[:, None] * stay
        return [max(float(step), needed) for step, needed in zip(rest + stay.sum(axis=1), least, strict=True)]

    def _needed(self, kind: int, alone: Sequence[float], kinds: Sequence[Sequence[int]], waits: bool) -> float:
        """Seconds of the busiest resource of groups of a kind, in one step.

        Others that use it, too, make their steps in their own time, and rarely if they are slow. waits: the groups
        wait for links and servers.
        """
        places, topology = self._places, self._costs.topology
        size, chosen = topology.workers_per_group, np.asarray(kinds[kind], dtype=np.int64)
        counts = np.array([len(groups) for groups in kinds], dtype=np.float64)
        # How many steps the others make in one of these groups.
        often = float((counts * np.minimum(1.0, alone[kind] / np.array(alone))).sum() / counts.sum())
        members = (chosen[:, None] * size + np.arange(size)).ravel()
        used = np.zeros(places.hosts, dtype=bool)
        used[places.host[members]] = True
        found = [float(self.work[members].max(initial=0.0))]
        if waits:
            homes = np.unique([topology.server_group_of(group) for group in kinds[kind]])
            mine = (places.workers + homes[:, None] * topology.shards + np.arange(topology.shards)).ravel()
            used[places.host[mine]] = True
            factor = often if len(topology.worker_groups_of(0)) > 1 else 1.0
            found.append(float(self.work[mine].max(initial=0.0)) * factor)
        shares = np.where(self._several, often, 1.0)
        if waits:
            found += [float((each * shares)[used].max(initial=0.0)) for each in (self.links_in, self.links_out)]
        cores = self.cores * (often if self._costs.machines.emulated else shares)
        found.append(float((cores if self._costs.machines.emulated else cores[used]).max(initial=0.0)))
        return max(found)

    @cached_property
    def _several(self) -> npt.NDArray[np.bool_]:
        """Of each host, whether it works for more than one worker group."""
        places, topology = self._places, self._costs.topology
        least, most = np.full(places.hosts, topology.worker_groups), np.full(places.hosts, -1)
        groups = np.arange(places.workers) // topology.workers_per_group
        served = [topology.worker_groups_of(sg) for sg in range(topology.server_groups)]
        first = np.concatenate((groups, np.repeat([min(each) for each in served], topology.shards)))
        last = np.concatenate((groups, np.repeat([max(each) for each in served], topology.shards)))
        np.minimum.at(least, places.host, first)
        np.maximum.at(most, places.host, last)
        several: npt.NDArray[np.bool_] = least != most
        return several

    def _shared(self) -> Sequence[float]:
        """Seconds of the busiest resource of each sort at the servers.

        They are for a step of every group.
        """
        hosts = np.unique(self._places.host[self._places.workers :])
        servers = self.work[self._places.workers :]
        sorts = (self.links_in[hosts], self.links_out[hosts], servers)
        return [float(amounts.max(initial=0.0)) for amounts in sorts]

    @cached_property
    def most_needed(self) -> float:
        """Seconds of the busiest resource for a step of every group."""
        servers = self.work[self._places.workers :]
        own = self.work[: self._places.workers]
        return float(
            max(
                self.links_out.max(initial=0.0),
                self.links_in.max(initial=0.0),
                servers.max(initial=0.0),
                own.max(initial=0.0),
                self.cores.max(initial=0.0),
            )
        )

    def largest(self, count: int) -> Iterator[tuple[str, float]]:
        """The busiest resources, and their seconds in a mean step of all groups."""
        found: list[tuple[float, str]] = []
        for kind, amounts in (("link out", self.links_out), ("link in", self.links_in)):
            for host in np.argsort(-amounts, kind="stable")[:count].tolist():
                found.append((float(amounts[host]), f"{self._resident(host)}'s {kind}"))
        for number in np.argsort(-self.work, kind="stable")[:count].tolist():
            address = self._places.addresses[number]
            if address.role is Role.SERVER:
                found.append((float(self.work[number]), f"{address}'s process"))
        for host in np.argsort(-self.cores, kind="stable")[:count].tolist():
            found.append((float(self.cores[host]), f"cores of host {host}"))
        found.sort(key=lambda each: (-each[0], each[1]))
        return ((name, seconds) for seconds, name in found[:count] if seconds > 0)

    def _resident(self, host: int) -> str:
        """The process by which a host's link is named: a server, if there is one."""
        numbers = np.flatnonzero(self._places.host == host).tolist()
        return str(self._places.addresses[numbers[-1]])
