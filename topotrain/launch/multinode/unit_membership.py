"""The membership of one unit over all terms: it follows the leader, or leads.

The leader of a job of several units has more than its processes. This is where each part is when that unit is lost:

* Its decisions about restarts, with their reasons: every unit has them, too (`decision_log.py`).
* Its address, and its right to lead: in the store (`leader_election.py`).
* The end of the job: in the record of the leader in the store, and in the units that were told.
* The reports of the units that are done: each unit sends its report again to the next leader.
* The snapshot to resume from: in the workspace.
* The job, its hosts, and its entry in the list of jobs, which it maintains in the store: every unit knows them.
* Worker 0/0, which writes the result, and the tcp:// store, if the first leader serves it: nowhere else.

Any unit that trains may be elected when the leader is lost. The first leader is unit 0. Where unit 0 also serves the
store, or a death ends the job, no other unit takes over.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from topotrain.comm.store import StoreError
from topotrain.comm.transport import TransportError
from topotrain.core.events import Event, Failed
from topotrain.launch.job_requests import LEADER_LOST, JobRequests
from topotrain.launch.multinode import node_membership
from topotrain.launch.multinode.control_connection import (
    ControlChannel,
    ControlServer,
    LeaderChanged,
    LeaderElected,
    NewsQueue,
)
from topotrain.launch.multinode.election.leader_election import FIRST_TERM, KEY, SHARE, LeaderElection
from topotrain.launch.multinode.forwarded_requests import ForwardedRequests
from topotrain.launch.multinode.job_ending import JobEnding
from topotrain.launch.multinode.node_info import HostMap, JobEnd
from topotrain.launch.multinode.node_membership import FollowerMembership, LeaderMembership, UnitContext
from topotrain.launch.multinode.node_rendezvous import ALIVE_S, BEAT_S
from topotrain.launch.multinode.shared_samples import SampleTransfer

_END_S = 5.0
"""Seconds for which the decided end of the job may take to reach the store. Then the units are told without it."""


class LeaderLease:
    """One unit's reads and writes of the record of the leader, on one thread.

    Args:
        context: of the unit.
        election: the state of the election.
        ending: how the job ends.
        queue: for the messages to a unit that is elected.
        replaceable: another unit takes over when the leader is lost.
    """

    def __init__(
        self, context: UnitContext, election: LeaderElection, ending: JobEnding, queue: NewsQueue, replaceable: bool
    ) -> None:
        self._context, self._election, self._ending, self._queue = context, election, ending, queue
        self._replaceable, self._host, self._alone = replaceable, "", True
        self.lock = threading.RLock()
        """Of the election. It is not held during an operation of the store or of the network."""
        self._candidate: ControlServer | None = None
        self._began_at: float | None = None  # the present look

    def place(self, hosts: HostMap) -> None:
        """Note where this unit would listen for the other units."""
        self._host, self._alone = hosts.addresses[self._context.rank] or "127.0.0.1", len(hosts.names) == 1

    def look(self, role: LeaderMembership | FollowerMembership, begun: bool) -> bool:
        """Read and write the record once; return whether the leader has changed.

        begun: this unit takes part in an attempt of the job, and may be elected. Raises StoreError.
        """
        self._began_at = time.monotonic()
        try:
            return self._look(role, begun)
        finally:
            self._began_at = None

    def is_out_of_reach(self, now: float) -> bool:
        """Return whether the store does not answer, or takes too long for a lease."""
        began_at = self._began_at
        late = began_at is not None and now - began_at > SHARE * ALIVE_S
        return late or self._election.store_is_away

    def _look(self, role: LeaderMembership | FollowerMembership, begun: bool) -> bool:
        election, run = self._election, self._context.stores.run
        raw = run.get(KEY)
        with self.lock:
            if election.on_read(raw, time.monotonic()):
                return True
        url, silent = self._own_url(role, begun)
        with self.lock:
            end = self._ending.proposed
            text = "" if end is None else end.to_text()
            proposal = election.proposal(url, silent, time.monotonic(), text)
        if proposal is None:
            return False
        written = run.compare_and_set(KEY, proposal.expected, proposal.record.dumped())
        with self.lock:
            if written:
                return election.on_written(proposal, time.monotonic())
            election.on_refused()
            return False

    def _own_url(self, role: LeaderMembership | FollowerMembership, begun: bool) -> tuple[str, bool]:
        """Return the URL of this unit if it leads, and whether it is a candidate."""
        if isinstance(role, LeaderMembership):
            return role.control.url, False
        with self.lock:
            term = self._election.term
            wants = self._election.may_campaign(time.monotonic()) and self._replaceable and begun
        if not wants or self._ending.over or not role.leader_is_silent:
            return "", False
        if self._candidate is None or self._candidate.term != term + 1:
            self.drop_candidate()
            with suppress(TransportError):  # this host has lost its address, so no other unit could reach it
                self._candidate = self.listening(term + 1)
        return (self._candidate.url, True) if self._candidate is not None else ("", False)

    def listening(self, term: int) -> ControlServer:
        """Return the leader's end of the connections of a term. Raises TransportError."""
        lease = self._election if self._replaceable else None
        server = ControlServer(self._context.access, self._queue, term, lease)
        if not self._alone:
            server.listen(self._host)
        return server

    def take_candidate(self) -> ControlServer | None:
        """Return the end that listens for the present term, if there is one."""
        found = self._candidate
        if found is None or found.term != self._election.term:
            return None
        self._candidate = None
        return found

    def drop_candidate(self) -> None:
        """Stop listening for a term in which another unit leads."""
        if self._candidate is not None:
            self._candidate.close()
            self._candidate = None


class UnitMembership(SampleTransfer):
    """The other units of the job, as one unit sees them over all terms.

    It implements `job_shutdown.OtherUnits`. None of its calls waits for the network, except `close`.

    Args:
        context: of this unit.
        hosts: the hosts of all units.
        leads: this unit has opened the job, and leads in the first term.

    Raises:
        TransportError: the unit that opens the job cannot listen at its address.
    """

    def __init__(self, context: UnitContext, hosts: HostMap, leads: bool) -> None:
        self._context, self._hosts = context, hosts
        self._ending, self.control = JobEnding(), ControlChannel(node_membership.AWAY_S)
        self.requests, self.forwards = JobRequests(), ForwardedRequests()
        self._election = LeaderElection(context.rank, context.word, ALIVE_S, leads, time.monotonic())
        self._closed = threading.Event()
        self._replaceable = context.recovers and not hosts.served and len(hosts.names) > 1
        self._lease = LeaderLease(context, self._election, self._ending, self.control.queue, self._replaceable)
        self._lease.place(hosts)
        self._lock = self._lease.lock
        self._begun = leads  # a unit that waits to be included in the job cannot lead it
        self._told: Failed | None = None
        self._wanted: JobEnd | None = None
        self._report: list[Event] | None = None
        self._role: LeaderMembership | FollowerMembership
        try:
            self._role = self._lead(self._lease.listening(FIRST_TERM)) if leads else self._follow()
        except TransportError:
            self._ending.close()
            self.control.close()
            raise
        if isinstance(self._role, LeaderMembership):
            self._role.announced.set()
        if len(hosts.names) > 1:
            threading.Thread(target=self._watch_record, name="leader", daemon=True).start()
            threading.Thread(target=self._watch_lease, name="lease", daemon=True).start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `over` or `saves` has become true."""
        return self._ending.fileno()

    @property
    def over(self) -> bool:
        """Whether the end of the job is decided."""
        return self._ending.over

    @property
    def end(self) -> JobEnd | None:
        """How the job ends, if that is decided."""
        return self._ending.end

    @property
    def saves(self) -> bool:
        """Whether the job is to end after a last snapshot that this unit requests."""
        return self._ending.asked is not None and self._role.takes_snapshot

    @property
    def reports(self) -> dict[int, list[Event]]:
        """The reports of the units that have ended well."""
        return self._role.reports

    @property
    def leader(self) -> LeaderMembership | None:
        """The membership as the leader; None in a unit that follows."""
        role = self._role
        return role if isinstance(role, LeaderMembership) else None

    def clear_wakeup(self) -> None:
        """Clear the event for which `fileno` became readable."""
        self._ending.clear_wakeup()

    def tell(self, cause: Failed) -> None:
        """Report why the job cannot go on here."""
        with self._lock:
            self._told = cause
            self._role.tell(cause)

    def save(self, number: int) -> None:
        """Report that a signal asks the job to end after a last snapshot."""
        with self._lock:
            self._role.announce_save(self._role.by_signal(number))

    def signalled(self, number: int, more: str = "") -> None:
        """Report that a signal asks the job to end; `more` is added to the report."""
        # The first signal counts, which may have come to another unit.
        end = self._ending.asked or self._role.by_signal(number)
        with self._lock:
            self._wanted = replace(end, text=f"{end.text}; {more}") if more else end
            self._role.request_end(self._wanted)

    def exclude(self) -> None:
        """End this unit: the others continue without it after its long silence."""
        rank, name = self._context.rank, self._hosts.names[self._context.rank]
        text = f"the job goes on without unit {rank} on {name}, which was silent for too long"
        self._ending.deliver(JobEnd(1, rank, name, text=text))

    def give_up_waiting(self, seconds: float) -> None:
        """End this unit: it was out of reach of the leader, and of the store, for so long."""
        rank, name = self._context.rank, self._hosts.names[self._context.rank]
        text = f"unit {rank} on {name} has found no leader of the job for {seconds:g} s"
        self._ending.deliver(JobEnd(1, rank, name, text=text))

    def finish(self, events: Sequence[Event]) -> None:
        """Report that this unit ended well. When all have, the leader ends the job."""
        with self._lock:
            self._report = list(events)
            self._role.finish(self._report)

    @property
    def leads(self) -> bool:
        return self.leader is not None

    def send_samples(self, lines: Sequence[str]) -> bool:
        role = self._role
        return isinstance(role, FollowerMembership) and role.send_samples(lines)

    def take_samples(self) -> Iterable[Event]:
        role = self._role
        return role.samples.take() if isinstance(role, LeaderMembership) else ()

    def wait(self, seconds: float) -> JobEnd | None:
        """Return the end of the job if it is decided in time, else None."""
        return self._ending.wait(seconds)

    def begin(self, hosts: HostMap) -> None:
        """Note that this unit takes part in an attempt of the job on these hosts."""
        with self._lock:
            self._hosts, self._begun = hosts, True
            self._lease.place(hosts)

    def close(self) -> None:
        """Stop watching, and end the connections."""
        with self._lock:
            self._closed.set()
        self._ending.close()
        self.forwards.close()
        self._role.close()
        self.control.close()
        self._lease.drop_candidate()

    def _watch_record(self) -> None:
        """Renew the lease of this unit, or find the one that leads, until `close`."""
        while not self._closed.is_set():
            # Before the look: a proposal that comes meanwhile must not be missed.
            self._ending.hurry.clear()
            former, changed = self._role, False
            try:
                changed = self._lease.look(former, self._begun)
            except StoreError:
                with self._lock:
                    self._election.on_failure()
            with self._lock:
                if changed and not self._closed.is_set():
                    self._change_role()
            self._announce()
            # Without the lock, which the readers of a connection may be waiting for.
            if former is not self._role:
                former.close()
            self._ending.hurry.wait(BEAT_S)

    def _announce(self) -> None:
        """Tell the end of the job that is in the record, or that cannot be there."""
        with self._lock:
            role, end, away = self._role, self._election.end, self._election.store_is_away
        if end and not isinstance(role, LeaderMembership):
            self._ending.deliver(JobEnd.loaded(end))
        elif isinstance(role, LeaderMembership) and (end or away):
            role.announce_end()

    def _watch_lease(self) -> None:
        """Step down where the lease cannot be renewed, and no other unit can be reached."""
        proposed_at: float | None = None
        # Often enough to be done before a unit is elected that counts from the same moment on.
        while not self._closed.wait(BEAT_S / 4):
            former, now = self._role, time.monotonic()
            if not isinstance(former, LeaderMembership):
                continue
            # The store may take long to fail, which must not delay the end.
            proposed_at = None if self._ending.proposed is None else proposed_at or now
            if proposed_at is not None and now - proposed_at > _END_S:
                former.announce_end()
            with self._lock:
                # Where other units hear from this one, no other unit takes over, however long the store is away.
                alone = bool(former.watched) and former.silent(SHARE * ALIVE_S) == former.watched
                # A process that was stopped for a while, on a busy machine, renews its lease first.
                lost = alone and self._lease.is_out_of_reach(now) and not self._election.holds_lease(now)
                lost = lost and self._replaceable and self._report is None
                if lost and former is self._role and not self._closed.is_set():
                    self._election.step_down()
                    self._change_role()
            if former is not self._role:
                former.close()

    def _change_role(self) -> None:
        """Lead, or follow the unit that leads. The lock is held."""
        former, term, queue = self._role, self._election.term, self.control.queue
        if self._election.leads:
            server = self._lease.take_candidate()
            if server is None:  # elected by a reply that came too late
                self._election.step_down()
                return
            lost = former.control.leader if isinstance(former, FollowerMembership) else -1
            self._role = role = self._lead(server)
            if lost >= 0:
                role.give_up(lost)
            queue.put(LeaderElected(term, lost, former.vanished(max(lost, 0))))
            role.announced.set()
        else:
            self._lease.drop_candidate()
            self._ending.retract()
            # The next leader answers those that came over the store.
            self.requests.close(LEADER_LOST)
            self._role = self._follow()
            queue.put(LeaderChanged(term, self._election.leader, isinstance(former, LeaderMembership)))
        self._repeat()

    def _lead(self, server: ControlServer) -> LeaderMembership:
        self.control.use(server)
        self.forwards.use(None)
        queue = self.control.queue
        return LeaderMembership(
            self._context, self._hosts, self._ending, server, queue, self.requests, self._replaceable
        )

    def _follow(self) -> FollowerMembership:
        queue, election = self.control.queue, self._election
        role = FollowerMembership(
            self._context, self._hosts, self._ending, queue, election, self.forwards, self._replaceable
        )
        self.control.use(role.control)
        self.forwards.use(role.control if election.leader >= 0 else None)
        return role

    def _repeat(self) -> None:
        """Tell the present leader what a former one may have forgotten."""
        if self._ending.end is not None:
            # The former leader has decided it, perhaps without telling all units.
            self._role.request_end(self._ending.end)
        elif self._wanted is not None:
            self._role.request_end(self._wanted)
        elif self._ending.asked is not None:
            self._role.announce_save(self._ending.asked)
            if self._role.takes_snapshot:
                self._ending.wake()
        if self._told is not None:
            self._role.tell(self._told)
        if self._report is not None:
            self._role.finish(self._report)
