"""Sets of equal processes, and the messages between them.

Each member of one set sends the same to each member of another.

A set of ten thousand workers is one object. `expanded` names all pairs, which is for small layouts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from topotrain.config.topology import Address, Role
from topotrain.tools.prediction.flow.flow_frames import Parcel

Ranks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ProcessSet:
    """The workers, or servers, with these indices in each of these groups."""

    role: Role
    groups: Sequence[int]
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.groups) * len(self.indices)

    def members(self) -> Iterator[Address]:
        """All addresses, group after group."""
        return (Address(self.role, group, index) for group in self.groups for index in self.indices)

    def name(self) -> str:
        """Such as "worker 0/3", or "each of 128 workers"."""
        if len(self) == 1:
            return str(next(self.members()))
        return f"each of {len(self)} {self.role.name.lower()}s"


def workers(groups: Sequence[int], indices: Sequence[int]) -> ProcessSet:
    """Workers of these groups."""
    return ProcessSet(Role.WORKER, groups, indices)


def server(group: int, index: int) -> ProcessSet:
    """One server."""
    return ProcessSet(Role.SERVER, (group,), (index,))


def servers(groups: Sequence[int], index: int) -> ProcessSet:
    """The servers of one shard in these server groups."""
    return ProcessSet(Role.SERVER, groups, (index,))


@dataclass(frozen=True, slots=True)
class Flow:
    """A parcel from each of the senders to each of the receivers, in a step.

    No process sends the parcel to itself.
    """

    senders: ProcessSet
    receivers: ProcessSet
    parcel: Parcel

    def expanded(self) -> Iterator[tuple[Address, Address, Parcel]]:
        """All pairs."""
        for sender in self.senders.members():
            for receiver in self.receivers.members():
                if sender != receiver:
                    yield sender, receiver, self.parcel


@dataclass(frozen=True, slots=True)
class CollectiveTrees:
    """The trees of a collective between the servers of group 0, one for each home.

    All trees of a ring, and all binary ones, are that of home 0 with other ranks. To make each anew would take minutes
    for 10,000 ranks.

    Attributes:
        first: the parent of each rank in the tree of home 0.
        turned: the trees of other homes have other ranks. Otherwise all homes have the same tree.
    """

    first: Ranks
    turned: bool

    def parents(self, home: int) -> Ranks:
        """Return the neighbor of each rank on its way to the center, which is its own."""
        return (np.roll(self.first, home) + home) % len(self.first) if self.turned else self.first


@dataclass(frozen=True, slots=True)
class TreeFlow:
    """Parcels of a collective between the servers of group 0.

    They go along the edges of one tree for each home.

    Attributes:
        trees: of all homes.
        parcels: by home, what travels along each edge of its tree.
        upward: to the center. Otherwise the parcels go away from it.
        size: ranks.
    """

    trees: CollectiveTrees
    parcels: Sequence[Parcel]
    upward: bool
    size: int

    def edges(self) -> Iterator[tuple[Ranks, Ranks, Parcel]]:
        """The senders and the receivers of each home, and what each of them sends."""
        ranks = np.arange(self.size, dtype=np.int64)
        for home, parcel in enumerate(self.parcels):
            if not parcel.messages:
                continue
            parents = self.trees.parents(home)
            inner = parents != ranks
            near, far = ranks[inner], parents[inner]
            yield (near, far, parcel) if self.upward else (far, near, parcel)

    def expanded(self) -> Iterator[tuple[Address, Address, Parcel]]:
        """All pairs."""
        for senders, receivers, parcel in self.edges():
            for sender, receiver in zip(senders.tolist(), receivers.tolist(), strict=True):
                yield Address(Role.SERVER, 0, sender), Address(Role.SERVER, 0, receiver), parcel


Route = Flow | TreeFlow
