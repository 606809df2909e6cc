"""The flow model: what a layout of thousands of processes does.

Sets of equal processes are one, and messages are flows over shared links. The messages are those of `flow_traffic`,
with the product's own sizes. The time of a step is the longest of these:

* that of a group that has its servers and links for itself (`flow_pipeline`);
* the time for which the busiest resource works, for all groups that share it.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from topotrain.config.job import Job
from topotrain.config.topology import Address
from topotrain.core.model.schema import slice_map_for
from topotrain.tools.prediction.failures import HostFailures
from topotrain.tools.prediction.flow.flow_chances import PacedGroups, Rhythm, StepLengths, all_steps, paced
from topotrain.tools.prediction.flow.flow_costs import Costs
from topotrain.tools.prediction.flow.flow_demands import Demands, Meeting
from topotrain.tools.prediction.flow.flow_frames import NOTHING, BucketShapes, Parcel
from topotrain.tools.prediction.flow.flow_islands import in_fragments
from topotrain.tools.prediction.flow.flow_loads import Loads, Places
from topotrain.tools.prediction.flow.flow_pipeline import StepPipeline, StepTimes, ready_shares
from topotrain.tools.prediction.flow.flow_routes import Flow, Route
from topotrain.tools.prediction.flow.flow_traffic import refuse_unknown, step_routes
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.planned_memory import planned_memory
from topotrain.tools.prediction.prediction import (
    BusyResource,
    LinkLoad,
    Method,
    Prediction,
    Staleness,
    StepParts,
    Wait,
)
from topotrain.tools.prediction.rehearsable import processes_of, same_as_one_process
from topotrain.tools.probe.probe_file import Probe

MOST_PAIRS = 64
"""Processes up to which each pair that exchanges messages is named."""
_NAMED = 10
"""Resources, and processes that are waited for, that are named."""


def predict_flow(job: Job, probe: Probe, machines: Machines) -> Prediction:
    """Predict a job by flows.

    Raises:
        ConfigError: the counts of the cluster do not fit together, or the model does not know a field of the job.
        SchemaError: the model cannot be cut.
    """
    return FlowModel(job, probe, machines).prediction()


@dataclass(frozen=True, slots=True)
class GroupSteps:
    """The steps of worker groups that do the same.

    Attributes:
        groups: their numbers.
        times: of a step of mean computing that nothing else disturbs.
        lengths: of steps beside all others.
        step_s: their mean.
    """

    groups: Sequence[int]
    times: StepTimes
    lengths: StepLengths
    step_s: float


class FlowModel:
    """A job on certain machines, by flows.

    Args:
        job, probe, machines: as for `predict_flow`.
    """

    def __init__(self, job: Job, probe: Probe, machines: Machines) -> None:
        self.job, self.probe, self.machines = job, probe, machines.with_job(job)
        self.topology = self.machines.topology(job, probe.transports["tcp"].mbit)
        refuse_unknown(job, self.topology)
        self.places = Places(self.topology)

    @cached_property
    def shapes(self) -> BucketShapes:
        """The buckets of the model."""
        schema = in_fragments(self.job, self.probe.schema())
        return BucketShapes(slice_map_for(schema, self.topology), self.job.cluster)

    @cached_property
    def routes(self) -> Sequence[Route]:
        """All that is sent in a mean step."""
        return step_routes(self.job, self.topology, self.shapes, self.costs.samples)

    @cached_property
    def loads(self) -> Loads:
        """The same, by worker and server."""
        return Loads(self.places).take(self.routes)

    @cached_property
    def costs(self) -> Costs:
        """The costs of messages and computing."""
        hosts = self.places.host[: self.places.workers]
        # Hosts that are emulated share the cores of one machine.
        most = self.places.workers if self.machines.emulated else int(np.bincount(hosts).max())
        return Costs(self.job, self.topology, self.probe, self.machines, most)

    @cached_property
    def demands(self) -> Demands:
        """For how long a mean step takes each resource."""
        loads = self.loads
        if self.topology.synced:
            # Exchanges of server groups wait for the links, and no step waits for them.
            loads = Loads(self.places).take(
                step_routes(self.job, self.topology, self.shapes, self.costs.samples, exchanges=False)
            )
        return Demands(self.costs, self.places, loads, self.shapes)

    # --- steps -------------------------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> Sequence[GroupSteps]:
        """The steps of all worker groups, by kinds of groups."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for group in range(self.topology.worker_groups):
            # Groups that make each round together are one.
            kinds.setdefault(() if self._has_rounds else self._kind(group), []).append(group)
        numbers = list(kinds.values())
        times = [self._times(each if self._has_rounds else each[:1]) for each in numbers]
        if self._in_step:
            lengths = self._together(numbers, times)
        else:
            lengths = [self._together([each[:1]], [its])[0] for each, its in zip(numbers, times, strict=True)]
        alone = [each.mean for each in lengths]
        paces = self.demands.paces(alone, numbers, self._meeting)
        return [
            GroupSteps(groups, its, each.later(pace - mean), pace)
            for groups, its, each, mean, pace in zip(numbers, times, lengths, alone, paces, strict=True)
        ]

    @property
    def _meeting(self) -> Meeting:
        """What worker groups wait for."""
        if self._in_step or self.topology.worker_groups == 1:
            return Meeting.IN_STEP
        return Meeting.NEVER if self.job.cluster.quorum else Meeting.AT_SERVERS

    @property
    def _in_step(self) -> bool:
        """Whether several worker groups wait for each other."""
        waits = self._has_rounds or self.job.cluster.max_staleness is not None
        return self.topology.worker_groups > 1 and waits

    @property
    def _has_rounds(self) -> bool:
        """Whether all worker groups exchange together."""
        return self.job.cluster.outer is not None and not self.job.cluster.quorum

    def _kind(self, group: int) -> tuple[object, ...]:
        """The facts that determine the time of a group's step."""
        first = group * self.topology.workers_per_group
        slow = self.machines.stragglers
        factors = (
            tuple(slow.get(first + index, 1.0) for index in range(self.topology.workers_per_group)) if slow else ()
        )
        homes = self._homes[self.topology.server_group_of(group)]
        size = self.topology.workers_per_group
        beside = tuple(host in homes for host in self.places.host[first : first + size].tolist())
        return factors, beside

    @cached_property
    def _homes(self) -> Sequence[Collection[int]]:
        """The hosts of the servers of each server group."""
        places, shards = self.places, self.topology.shards
        hosts = places.host[places.workers :].reshape(-1, shards).tolist()
        return [set(each) for each in hosts]

    def _times(self, groups: Sequence[int]) -> StepTimes:
        shares = [parameter.ready for parameter in self.probe.model]
        ready = list(ready_shares(self.shapes, shares))
        if self.job.cluster.outer is not None:
            # A pushed bucket is there at once: it is the difference to earlier values.
            ready = [1.0] * len(ready)
        return StepPipeline(self.costs, self.shapes, ready, groups, self._exchanged()).run()

    def _exchanged(self) -> Sequence[int]:
        """The buckets of one exchange."""
        if self.job.cluster.outer is None or self.job.cluster.fragments == 1:
            return range(len(self.shapes.all))
        return [number for number, shape in enumerate(self.shapes.all) if shape.fragment == 0]

    def _together(self, kinds: Sequence[Sequence[int]], times: Sequence[StepTimes]) -> Sequence[StepLengths]:
        """The steps of kinds of groups that wait for each other.

        They have their servers and links for themselves.
        """
        cluster, script_s = self.job.cluster, self.probe.worker_step_s
        exchange = max(0.0, times[0].end - times[0].slowest - script_s)
        if cluster.outer is not None and not cluster.quorum:
            (groups,), push = kinds, self._push_s(times[0])
            rhythm = Rhythm(cluster.local_steps, cluster.overlap, exchange, script_s=script_s)
            alike = Counter(self.costs.computing(self.topology.workers(group)[0]) for group in groups)
            paces = [PacedGroups(count, {each: 1}, min(push, exchange)) for each, count in alike.items()]
            found = paced(paces, self.probe.spread, rhythm)
            return [all_steps([(each, pace.count) for each, pace in zip(found, paces, strict=True)])]
        rhythm = Rhythm(cluster.local_steps, lead=cluster.max_staleness or 0, script_s=script_s)
        paces = []
        for groups, its in zip(kinds, times, strict=True):
            alike = Counter(map(self.costs.computing, self.topology.workers(groups[0])))
            busy = self._push_s(its) if cluster.quorum else max(0.0, its.end - its.slowest - script_s)
            paces.append(PacedGroups(len(groups), alike, busy))
        return paced(paces, self.probe.spread, rhythm)

    def _push_s(self, times: StepTimes) -> float:
        """Seconds of a worker for an exchange for which it does not wait."""
        return max(0.0, times.committed - times.slowest - self.probe.worker_step_s)

    # --- the result --------------------------------------------------------------------------------------------------

    @cached_property
    def samples_per_s(self) -> float:
        """Samples per second of the whole job."""
        return sum(len(kind.groups) * sum(self.costs.samples) / kind.step_s for kind in self.steps)

    def prediction(self) -> Prediction:
        """Return all that is predicted."""
        # Of all steps that workers make: slow ones make fewer.
        steps = all_steps([(kind.lengths, len(kind.groups) / kind.step_s) for kind in self.steps])
        step_s = steps.quantile(0.5)
        return Prediction(
            framework=self.topology.framework,
            processes=processes_of(self.topology),
            step_s=step_s,
            step_p95_s=steps.quantile(0.95),
            samples_per_s=self.samples_per_s,
            parts=self._parts(),
            waits=tuple(self._waits()),
            busiest=tuple(self._busiest()),
            links=tuple(self.links()),
            memory=tuple(planned_memory(self.job, self.probe, self.machines, self.topology)),
            staleness=self._staleness(),
            start_s=self.probe.start_s,
            goodput=HostFailures(self.job, self.topology, self.machines, self.probe, step_s).goodput(),
            method=Method.FLOW,
            error=None,
            same_as_one_process=same_as_one_process(self.job),
        )

    def _parts(self) -> StepParts:
        found, whole = np.zeros(5), 0.0
        for kind in self.steps:
            times, often = kind.times, 1 / self.job.cluster.local_steps
            waiting = times.slowest - times.computed
            push = max(0.0, times.committed - times.slowest) * often
            apply = max(0.0, times.applied - times.committed) * often
            pull = max(0.0, times.end - times.applied) * often
            known = times.computed + push + apply + pull + waiting
            if known > kind.step_s:
                # A part of the exchange is hidden behind computing.
                hidden = (kind.step_s - times.computed - waiting) / (push + apply + pull or 1.0)
                push, apply, pull = (max(0.0, each * hidden) for each in (push, apply, pull))
            rest = max(0.0, kind.step_s - times.computed - push - apply - pull)
            steps = len(kind.groups) / kind.step_s
            found, whole = found + np.array([times.computed, push, apply, pull, rest]) * steps, whole + steps
        return StepParts(*(found / whole).tolist())

    def _waits(self) -> Iterator[Wait]:
        """The slow workers that others of their group, or all, wait for."""
        topology, slow = self.topology, self.machines.stragglers
        found = []
        for number, factor in slow.items():
            group, index = divmod(number, topology.workers_per_group)
            others = topology.workers_per_group > 1 or self._in_step
            if factor > 1 and others:
                longer = self.costs.usual_computing(index).drawn * (factor - 1)
                found.append(Wait(str(topology.workers(group)[index]), longer))
        yield from sorted(found, key=lambda wait: -wait.seconds)[:_NAMED]

    def _busiest(self) -> Iterator[BusyResource]:
        # The work of all groups in a mean step, in the time of one.
        mean = self.topology.worker_groups / sum(len(kind.groups) / kind.step_s for kind in self.steps)
        for name, seconds in self.demands.largest(_NAMED):
            yield BusyResource(name, min(1.0, seconds / mean))

    def links(self) -> Iterator[LinkLoad]:
        """The messages of a step between each two processes.

        In large layouts they are between sets of processes.
        """
        if self.places.count <= MOST_PAIRS:
            for (sender, receiver), parcel in sorted(self.pairs().items()):
                far = self.places.far(sender, receiver)
                yield LinkLoad(f"{sender} > {receiver}", parcel.nbytes, parcel.messages, far)
            return
        found: dict[str, tuple[Parcel, int]] = {}
        for route in self.routes:
            name, count = _name_of(route), 1
            parcel = route.parcel if isinstance(route, Flow) else _mean(route.parcels)
            before, known = found.get(name, (NOTHING, 0))
            found[name] = before + parcel, known + count
        for name, (parcel, count) in sorted(found.items(), key=lambda each: -each[1][0].nbytes):
            yield LinkLoad(name, parcel.nbytes / count, parcel.messages / count, self.places.hosts > 1)

    def pairs(self) -> Mapping[tuple[Address, Address], Parcel]:
        """The parcel that each process sends to each other one in a mean step.

        It is for small layouts.
        """
        found: dict[tuple[Address, Address], Parcel] = {}
        for route in self.routes:
            for sender, receiver, parcel in route.expanded():
                if parcel.nbytes and not self.places.together(sender, receiver):
                    found[sender, receiver] = found.get((sender, receiver), NOTHING) + parcel
        return found

    def _staleness(self) -> Staleness:
        topology, cluster = self.topology, self.job.cluster
        sharing = len(topology.worker_groups_of(0))
        if sharing == 1 or (cluster.outer is not None and not cluster.quorum):
            return Staleness(0.0, 0.0, 0.0)
        if cluster.outer is not None:
            # Rounds of others between two of a worker's own.
            late = max(0.0, topology.worker_groups / cluster.quorum - 1)
            return Staleness(late, math.ceil(late), math.ceil(late))
        rate = sum(len(kind.groups) / kind.step_s for kind in self.steps) / topology.server_groups
        found = [(max(0.0, kind.step_s * rate - 1), len(kind.groups) / kind.step_s) for kind in self.steps]
        if cluster.max_staleness is not None:
            most = cluster.max_staleness * (sharing - 1)
            found = [(min(late, float(most)), weight) for late, weight in found]
        mean = sum(late * weight for late, weight in found) / sum(weight for _, weight in found)
        return Staleness(mean, math.ceil(_quantile(found, 0.95)), math.ceil(max(late for late, _ in found)))


def _name_of(route: Route) -> str:
    if isinstance(route, Flow):
        return f"{_kind_of(route, True)} > {_kind_of(route, False)}"
    return "a server > its neighbor in a tree"


def _kind_of(route: Flow, sends: bool) -> str:
    these = route.senders if sends else route.receivers
    return these.name() if len(these) > 1 else f"a {these.role.name.lower()}"


def _mean(parcels: Sequence[Parcel]) -> Parcel:
    whole = sum(parcels, NOTHING)
    return whole.times(1 / max(1, len(parcels)))


def _quantile(values: Sequence[tuple[float, float]], share: float) -> float:
    """Return the value below which this share of the weight is."""
    whole, passed = sum(weight for _, weight in values), 0.0
    for value, weight in sorted(values):
        passed += weight
        if passed >= share * whole * (1 - 1e-12):
            return value
    return max(value for value, _ in values)
