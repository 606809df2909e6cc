"""Replacement of lost server processes in a job with replicated servers.

The backup of a lost primary becomes the primary, and a new process gets the new backup. Without a unit for it the
servers continue with one replica. This module is pure.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from topotrain.config.topology import Address, Topology
from topotrain.core.events import Differs, Failed
from topotrain.extensions.replication.replica_placement import ReplicaPlacement, domain_in, domains
from topotrain.launch.recovery.attempt_state import AttemptState
from topotrain.launch.recovery.recovery_actions import Action, EndProcess, PlaceReplica
from topotrain.launch.recovery.restarts import WHOLE_JOB, Restarts, what


class ServerReplacement:
    """Decides which process holds which replica, over all attempts of a job.

    Args:
        topology: the layout of the whole job.
        attempt, restarts: of the job.
    """

    def __init__(self, topology: Topology, attempt: AttemptState, restarts: Restarts) -> None:
        self._attempt, self._restarts = attempt, restarts
        self._slots = {str(server): server.index for unit in topology.units for server in unit.servers}
        self._differed: set[str] = set()  # servers with replicas that have differed once
        self._replaced = 0
        self.reset(topology)

    def reset(self, topology: Topology) -> None:
        """Begin another attempt. Raises ValueError where its hosts allow no two replicas."""
        self._topology, self._placement = topology, ReplicaPlacement(domains(topology))

    @property
    def servers(self) -> AbstractSet[str]:
        """The names of the server processes."""
        return self._slots.keys()

    def primary_of(self, server: Address) -> str:
        """Return the process in which this server is active."""
        return str(Address(server.role, server.group, self._placement.servers[server.index].primary))

    def on_covered(self, who: str, shadows: int) -> None:
        """Record that a backup replica is complete."""
        self._placement.covered(self._slots[who], shadows)
        # It is connected again, so no loss has to explain its lost connection.
        self._attempt.missed.discard(who)

    def on_differs(self, event: Differs, now: float) -> list[Action]:
        """Return the actions after the replicas of a server have diverged."""
        who = event.who
        # Only faulty memory or a bug causes this. A backup that differs must not become the primary.
        self._placement.uncovered(self._slots[who], event.shadows)
        if self._attempt.over:
            return []
        # Once may be a flipped bit. Twice means that the primary itself may be the wrong one.
        if who in self._differed:
            text = f"{who} and its second copy differ once more, so the values of one of them are wrong"
            return self._restarts.give_up(Failed(who, "internal", f"{text}: look at the memory of their hosts", ""))
        self._differed.add(who)
        found = Failed(who, "internal", f"{who} and its second copy differ", "")
        action = "the job goes on with the first; the second copy is made anew"
        return [self._restarts.incident(found, action, now)]

    def on_finished(self) -> list[Action]:
        """End server processes that are only backups, once all primaries have finished."""
        # A process of backups only has nothing to deliver, so it would never end by itself.
        finished = self._attempt.finished
        primaries = {who for who, slot in self._slots.items() if slot in self._placement.primaries()}
        rest = sorted(self._slots.keys() - finished) if primaries <= finished else []
        self._attempt.dismiss(rest)
        return [EndProcess(who) for who in rest]

    def is_needed(self, gone: AbstractSet[str]) -> bool:
        """Whether lost server processes have to be replaced."""
        attempt = self._attempt
        # A process that has finished has delivered the values of its primaries.
        missed = gone - attempt.finished
        standbys = {slot for who in missed for slot in self._placement.standbys_of(self._slots[who])}
        ended = {slot for who, slot in self._slots.items() if who in attempt.finished}
        # Workers need servers until their processes have ended, and not only their scripts.
        return bool(missed and not standbys & ended and attempt.group_of.keys() & attempt.up)

    def moves_first(self, gone: AbstractSet[str]) -> bool:
        """Whether the first server moves to its backup if these processes are lost."""
        return self._placement.servers[0].primary in {self._slots[who] for who in gone - self._attempt.finished}

    def replace(self, gone: AbstractSet[str], lost: Failed, now: float) -> list[Action]:
        """Replace server processes; their complete backups become primaries."""
        missed = sorted(gone - self._attempt.finished)
        # Every server process has a budget of its own, below those of the job and the groups.
        keys = {who: WHOLE_JOB - 1 - self._slots[who] for who in missed}
        spent = next((key for key in keys.values() if not self._restarts.budget.allows(key, now)), None)
        if spent is not None:
            return self._restarts.give_up(self._restarts.exhausted(lost, spent))
        # All are marked as lost before any is replaced: none can continue from a replica that was in another.
        if not all(self._placement.lost(self._slots[who]) for who in missed):
            return self._restarts.restart_job_if_possible(lost, now)
        found = []
        for who, key in keys.items():
            self._restarts.budget.count(key, what(lost), now)
            found.append(self._fill(who, lost, now))
        # Lost connections between servers are explained by this loss.
        self._attempt.forget_servers(self.servers)
        # Any group's next step shows that the servers answer again.
        self._restarts.times.begin(self._restarts.next_incident, None, now)
        return [self._restarts.incident(lost, _consequence([each.unit for each in found], lost), now), *found]

    def _fill(self, who: str, lost: Failed, now: float) -> PlaceReplica:
        """Replace a server process, where a unit may host the replacement."""
        slot = self._slots[who]
        rank = self._unit_for(who, slot)
        self._attempt.overdue.forget(who)
        if rank >= 0:
            self._placement.filled(slot, domain_in(self._topology, slot, rank))
            self._attempt.move(who, rank, now)
            # The number becomes the incarnation of the process: peers refuse one with a lower number.
            self._replaced += 1
        return PlaceReplica(who, self._replaced, what(lost), self._placement.to_data(), rank)

    def _unit_for(self, who: str, slot: int) -> int:
        """Return the unit for the replacement of a server process; -1: there is none.

        It is the process's own unit if that still runs. Otherwise it is the one in which the process would be a useful
        replica for most servers, and of those the one with the fewest servers.
        """
        # A unit that was lost may still run somewhere, so it gets no processes.
        lost = self._attempt.lost_units
        if self._attempt.unit_of(who) not in lost:
            return self._attempt.unit_of(who)
        living = [unit.rank for unit in self._topology.units if unit.rank not in lost]
        best = max(living, key=lambda rank: self._worth(slot, rank), default=-1)
        # A replica in the failure domain of its primary would be lost together with it.
        return best if best >= 0 and self._worth(slot, best)[0] else -1

    def _worth(self, slot: int, rank: int) -> tuple[int, int, int]:
        servers = sum(name.startswith("server") for name in self._attempt.residents_of(rank))
        return self._placement.missing(domain_in(self._topology, slot, rank)), -servers, -rank


def _consequence(units: Sequence[int], lost: Failed) -> str:
    """Describe what follows in these units; -1: a server is not replaced."""
    if not lost.who.startswith("unit"):
        return "its second copy goes on; a fresh process becomes the second one"
    if min(units) < 0:
        return "the second copies of its servers go on, alone where no other unit may have a second one"
    where = " and ".join(f"unit {unit}" for unit in sorted(set(units)))
    return f"the second copies of its servers go on; fresh processes in {where} become the second ones"
