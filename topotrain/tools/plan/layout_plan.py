"""Plan a job: the layout, the share of each server, the memory of each process.

The plan is pure. The layout follows from the cluster block alone, and needs no torch. A `PlannedSchema`, which comes
from the user's script, adds slices and memory. Sizes are bytes; a printed MB is 10^6 bytes.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from topotrain.comm.store import StoreError
from topotrain.comm.store.store_url import parse
from topotrain.config import async_momentum
from topotrain.config.job import Agreement, ConfigError, Job, OnFailure
from topotrain.config.sharding import Parameter, SliceMap, cut
from topotrain.config.slice_size import sizes_in_words
from topotrain.config.topology import Address, Topology, layout
from topotrain.extensions.group_averaging.averaging_rules import moving_rate
from topotrain.extensions.host_sums.host_units import link_advice
from topotrain.extensions.outer_optimizer.rounds import check_fragments
from topotrain.launch.runtime.round_traffic import RoundTraffic, StepTraffic, mb, round_traffic, step_traffic

if TYPE_CHECKING:
    from topotrain.parallel.estimate.process_memory import ProcessNeed

SURVIVES = "redis://HOST or file:///SHARED/FOLDER"
"""The URLs with which another unit takes over for unit 0."""


MB = 1_000_000
_WIDTH = 120
_SIZES = {"values": "values", "gradients": "gradients", "exchange": "staging", "state": "state"}
"""Fields of an estimate, and how they are shown."""
_SAID_IN_DATA = ("warning", "link", "agreement")


@dataclass(frozen=True, slots=True)
class PlannedSchema:
    """The planner's view of a model: its unique parameters, and optimizer facts."""

    parameters: tuple[Parameter, ...]
    state_factor: float = 0.0  # optimizer state elements per element: plain SGD 0, momentum 1, Adam 2
    momentum: float = 0.0  # of the optimizer
    optimizers: tuple[str, ...] = ()  # class names
    trained: int | None = None  # how many parameters the optimizer has; None: all


@dataclass(frozen=True, slots=True)
class ServerShare:
    """The share of one server: slices, elements without padding, bytes of values."""

    server: Address
    unit: int
    slices: int
    elements: int
    value_bytes: int


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """A planned job; build it with `plan`.

    said: sentences by subject; "": there is nothing to say. Without a program `slices` is None, and `shares` and
    `memory` are empty. traffic: of a round of an outer optimizer. step: of a step without.
    """

    topology: Topology
    said: Mapping[str, str]
    slices: SliceMap | None = None
    shares: tuple[ServerShare, ...] = ()
    memory: tuple["ProcessNeed", ...] = ()
    traffic: RoundTraffic | None = None
    step: StepTraffic | None = None

    def as_data(self) -> dict[str, Any]:
        """Return plain data for `plan --json`; without a program only the layout."""
        data = self.topology.as_data() | {each: self.said[each] for each in _SAID_IN_DATA if self.said[each]}
        if self.slices is None:
            return data
        return {
            **data,
            "tensors": len(self.slices.parameters),
            "homes": {p.name: p.home for p in self.slices.parameters if p.home >= 0},
            "imbalance": self.slices.imbalance,
            "slices": [asdict(share) | {"server": list(share.server[1:])} for share in self.shares],
            "memory": list(map(_memory_data, self.memory)),
            **({} if self.traffic is None else {"round": asdict(self.traffic)}),
            **({} if self.step is None else {"step": asdict(self.step)}),
        }

    def explain(self) -> str:
        """Return the plan as text: the layout, then slices and memory where known."""
        said = {"slices": sizes_in_words(self.topology), **self.said}
        parts = [
            self.topology.explain().rstrip("\n"),
            *(_filled(f"{name}: {said[name]}") for name in said if said[name]),
        ]
        if self.slices is not None:
            traffic = [] if self.traffic is None else [self.traffic.explain(), self.traffic.explain_link()]
            traffic += [] if self.step is None else [self.step.explain()]
            tables = [self._slices(self.slices), *([self._memory()] if self.memory else [])]
            parts += [*("\n".join(table) for table in tables), *map(_filled, traffic)]
        return "\n\n".join(parts)

    def _slices(self, slices: SliceMap) -> list[str]:
        rows = [
            (str(share.server), str(share.unit), str(share.slices), f"{share.elements:,}", mb(share.value_bytes))
            for share in self.shares
        ]
        homes = sum(parameter.home >= 0 for parameter in slices.parameters)
        how = f"kept whole, {homes} placed by the script" if homes else "cut over the servers of each group"
        return [
            f"{len(slices.parameters)} tensors, {how} (imbalance {slices.imbalance:.1%}):",
            *columns(("server", "unit", "slices", "elements", "values MB"), rows),
        ]

    def _memory(self) -> list[str]:
        names = {
            **_SIZES,
            **({"second": "second"} if any(need.second for need in self.memory) else {}),
            "total": "total",
        }
        rows = [(need.who, str(need.unit), *(mb(getattr(need, name)) for name in names)) for need in self.memory]
        header = ("process", "unit", *(f"{shown} MB" for shown in names.values()))
        return ["training state in memory, an estimate without activations:", *columns(header, rows)]


def plan(job: Job, schema: PlannedSchema | None = None) -> LayoutPlan:
    """Plan `job`. Raises ConfigError where counts do not fit together, or the model."""
    topology = layout(job.cluster)
    if schema is not None:
        momentum, names = schema.momentum, schema.optimizers
        check_fragments(job.cluster.fragments, len(schema.parameters) if schema.trained is None else schema.trained)
    else:
        # Without a program only the job's updater block can name an optimizer.
        momentum, names = (0.0, ()) if job.updater is None else (job.updater.momentum, (job.updater.type.name,))
    said = {
        "agreement": agreement_in_words(job, topology),
        "warning": async_momentum.warning(job, topology, momentum, names),
        "link": link_advice(job),
        "note": store_advice(job, topology),
    }
    if schema is None:
        return LayoutPlan(topology, said)
    slices = cut(schema.parameters, topology.shards, groups=topology.server_groups, slicing=job.cluster.slicing)
    shares = tuple(
        _share(slices, topology, server) for sg in range(topology.server_groups) for server in topology.servers(sg)
    )
    from topotrain.parallel.estimate.process_memory import whole_model_needs  # it needs torch

    memory = whole_model_needs(job, topology, slices, schema.state_factor)
    traffic = round_traffic(job.cluster, topology, slices)
    return LayoutPlan(topology, said, slices, shares, memory, traffic, step_traffic(job, topology, slices))


def _share(slices: SliceMap, topology: Topology, server: Address) -> ServerShare:
    owned = slices.segments_of(server.index)
    elements = sum(segment.hi - segment.lo for segment in owned)
    return ServerShare(server, topology.unit_of(server), len(owned), elements, slices.shard_bytes[server.index])


def _memory_data(need: "ProcessNeed") -> dict[str, Any]:
    role, *address = need.residents[0]
    sizes = {shown: getattr(need, name) for name, shown in _SIZES.items()}
    data = {"role": role.name.lower(), "address": address, "unit": need.unit}
    return {**data, **sizes, "second": need.second, "total": need.total}


def agreement_in_words(job: Job, topology: Topology) -> str:
    """Return a sentence about server groups that average; "" where none do."""
    cluster, mean = job.cluster, "the mean of all groups is the result"
    if not topology.synced or cluster.agreement is Agreement.kMaster:
        return ""
    every = "every update" if cluster.sync_freq == 1 else f"every {cluster.sync_freq} updates"
    match cluster.agreement:
        case Agreement.kElastic:
            share = f"{moving_rate(cluster):.3g} of the distance; the center is the result"
            how = f"a group and the center move towards each other by {share}"
        case Agreement.kGossip:
            how = f"a group averages with another one by chance (seed {job.seed}); {mean}"
        case _:
            how = f"a group averages with the next one; {mean}"
    return f"{cluster.agreement.value}: after {every} {how}"


def store_advice(job: Job, topology: Topology) -> str:
    """Return advice about the store of a job; "" where another one changes nothing.

    Raises ConfigError for an invalid `rendezvous`.
    """
    # With one unit there is no other host, and with kStop the loss of any unit ends the job.
    if len(topology.units) < 2 or job.on_failure is not OnFailure.kContinue:
        return ""
    if not job.rendezvous:
        return (
            f"on several hosts the job survives the loss of any of them with --rendezvous {SURVIVES}; "
            "with a tcp:// store that unit 0 serves it ends with unit 0"
        )
    try:
        address = parse(job.rendezvous)
    except StoreError as error:
        raise ConfigError("rendezvous", None, str(error)) from None
    if address.scheme not in ("tcp", "env"):
        return ""
    return (
        f"rendezvous {address.text}: if unit 0 serves this store, the job ends when the host of unit 0 is lost; "
        f"with {SURVIVES} another unit takes over"
    )


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False)  # which links have


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return text columns two spaces apart, numbers aligned to the right."""
    table = [tuple(header), *map(tuple, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]) for row in table]
