"""Which process holds which copy of which server, when every server has two (`cluster.replicas`).

Rule: pure. A seat is a place for one server process; the process in it may be another after a death. Server i begins in
seat i, its second copy in the next one. Copies move only where a process has died: the second copy speaks from then on,
and the fresh process in the dead one's seat follows whoever has no second copy. So of the two copies of a server the
one that listens is never in an older process than the one that speaks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from topotrain.job import Apply, Compression, ConfigError, Job, OnFailure, Pull, Road
from topotrain.topology import Topology


@dataclass(frozen=True, slots=True)
class Standing:
    """One server: the seats of its copies (shadow -1: there is none), how often the speaking one has moved, and how
    many listening ones there have been."""

    lead: int
    shadow: int
    moves: int = 0
    shadows: int = 0


class Seats:
    """All servers of a job.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self.standing = {index: Standing(index, (index + 1) % count) for index in range(count)}
        self._covered: set[int] = set()

    def covered(self, server: int, shadows: int) -> None:
        """A server's so-manieth second copy has everything from now on."""
        if self.standing[server].shadows == shadows:
            self._covered.add(server)

    def uncovered(self, server: int, shadows: int) -> None:
        """That one is of no use."""
        if self.standing[server].shadows == shadows:
            self._covered.discard(server)

    def heirs(self, seat: int) -> set[int]:
        """The seats of the second copies of what speaks in this one."""
        return {where.shadow for where in self.standing.values() if where.lead == seat and where.shadow >= 0}

    def lost(self, seat: int) -> bool:
        """The process of a seat has died. False: with it the last copy of some server."""
        for server, where in self.standing.items():
            if where.lead == seat and not (where.shadow >= 0 and where.shadow != seat and server in self._covered):
                return False
        for server, where in self.standing.items():
            if where.lead == seat:
                self.standing[server] = Standing(where.shadow, -1, where.moves + 1, where.shadows)
                self._covered.discard(server)
            elif where.shadow == seat:
                self.standing[server] = replace(where, shadow=-1)
                self._covered.discard(server)
        return True

    def filled(self, seat: int) -> None:
        """A fresh process takes a seat: it follows whoever has no second copy."""
        for server, where in self.standing.items():
            if where.shadow < 0 and where.lead != seat:
                self.standing[server] = replace(where, shadow=seat, shadows=where.shadows + 1)

    def leads(self) -> set[int]:
        """The seats in which some server speaks."""
        return {where.lead for where in self.standing.values()}

    def to_data(self) -> list[list[int]]:
        """As JSON has it."""
        return [[w.lead, w.shadow, w.moves, w.shadows] for _, w in sorted(self.standing.items())]


def standings(data: Any) -> Mapping[int, Standing]:
    """The inverse of `Seats.to_data`."""
    return {index: Standing(*map(int, row)) for index, row in enumerate(data)}


def check(job: Job, topology: Topology) -> None:
    """Raise ConfigError where second copies of the servers are asked for and cannot be kept."""
    cluster = job.cluster
    if cluster.replicas < 2:
        return
    for fits, accepted in (
        (job.on_failure is OnFailure.kContinue, "needs on_failure: kContinue, or a death ends the job"),
        (cluster.road is Road.kTcp, "needs road: kTcp: what lies in shared memory has no second copy"),
        (cluster.nserver_groups == 1, "needs nserver_groups: 1"),
        (topology.shards > 1, "needs nservers_per_group of at least 2: a server's second copy is in another's process"),
        (cluster.nservers_per_procs == 1, "needs nservers_per_procs: 1, so that each server has its own process"),
        (not topology.collective, "needs a job whose servers add up the gradients: algorithm kAuto, no engine"),
        (cluster.compression is Compression.kNone, "needs compression: kNone"),
        (cluster.link is None, "takes no link"),
        (job.apply is Apply.kAtStep, "needs apply: kAtStep"),
        (job.pull is Pull.kStep, "needs pull: kStep"),
        (not job.splits, "takes no model that is split over workers"),
        (cluster.backup == 0, "needs backup: 0"),
    ):
        if not fits:
            raise ConfigError("cluster.replicas", cluster.replicas, accepted)
