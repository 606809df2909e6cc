"""Membership of a job's units in one term, as one unit sees them.

* The leader decides once how the job ends, with the first cause. The other units report their causes to it.
* After a connection error it first waits for a better cause. Without one it looks for a unit without heartbeats.
* A unit is lost when nothing arrives from it and the store has no heartbeat of it. A broken connection alone is not a
  loss, and neither is a store that is away.
* Where another unit can lead (`UnitMembership`), the loss of the leader ends nothing.
"""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from topotrain.comm.store import Store, StoreError
from topotrain.comm.store.discovery.job_registry import JobRecord, Registry
from topotrain.comm.store.maintained_values import MaintainedValues
from topotrain.comm.transport import TransportError
from topotrain.config.job import ConfigError
from topotrain.core.events import (
    Apart,
    Counted,
    Event,
    Failed,
    Final,
    Finished,
    LocalSteps,
    Metrics,
    Rounds,
    Serving,
    Skipped,
    Started,
    StateTaken,
    StepDone,
    from_json,
    to_json,
)
from topotrain.launch import JobWatch
from topotrain.launch.job_requests import JobRequests
from topotrain.launch.multinode.control_connection import (
    ControlAccess,
    ControlClient,
    ControlServer,
    NewsQueue,
    UnitReturned,
    UnitVanished,
)
from topotrain.launch.multinode.election.leader_election import FIRST_TERM, LeaderElection
from topotrain.launch.multinode.forwarded_requests import ForwardedRequests, accept
from topotrain.launch.multinode.job_ending import JobEnding
from topotrain.launch.multinode.node_info import HostMap, JobEnd, NodeInfo, NodeVerifier, is_local
from topotrain.launch.multinode.node_rendezvous import ALIVE_S, BEAT_S
from topotrain.launch.multinode.reliable_messages import Words
from topotrain.launch.multinode.shared_samples import ReceivedSamples
from topotrain.launch.store_requests import StoreRequests

LOST_S = 10.0
"""Seconds of silence after which a unit is gone, regardless of its peers."""
STORE_LOST_S = 5.0
"""Seconds of silence after which unit 0 is gone, where the store that it serves is gone, too."""
AWAY_S = 15.0
"""Seconds for which a unit waits for the leader, and for the store, before it goes on alone."""
# A heartbeat expires after ALIVE_S. Only then is it certain that the unit of a lost peer is gone.
_PATIENCE_S: Mapping[str, float] = MappingProxyType({"internal": 1.5, "peer": ALIVE_S + 1.0})
"""Seconds for which a failure waits for its cause, by kinds of failure that may have one elsewhere."""
_REGISTER_EVERY_S = 5.0  # between two updates of the registry
_LOOK_S = 0.1
_ADVICE = "; with a store at redis:// or file:// another unit would lead the job, and it would go on"
_ALONE = "{} was out of reach for {:g} s at the end, so the end of the other units is unknown"


@dataclass(frozen=True, slots=True)
class StoreKeys:
    """The store's keys for a job.

    run: the keys of this start. shared: the keys of the job. registry, record: the job's entry in the list of all jobs.
    """

    run: Store
    shared: Store
    registry: Registry
    record: JobRecord


@dataclass(frozen=True, slots=True)
class UnitContext:
    """The settings of a unit and its job, for all terms.

    stores: the store's keys. rank, word: of this unit, and of its process. access: the settings of the connections.
    verifier: checks the description of a unit that rejoins.
    recovers: the job survives process deaths, so the loss of a unit does not end it.
    first_server: this unit has the first server, and requests the last snapshot.
    where: the unit of each process and unit name. maintained: values of this start of the job that a leader maintains.
    watch: knows the state of the job in the unit that leads. resumed: the job began at a snapshot.
    """

    stores: StoreKeys
    rank: int
    word: str
    access: ControlAccess
    verifier: NodeVerifier
    recovers: bool
    first_server: bool
    where: Mapping[str, int] = field(default_factory=dict)
    maintained: Mapping[str, bytes] = field(default_factory=dict)
    watch: JobWatch = field(default_factory=JobWatch)
    resumed: bool = False


class NodeMembership:
    """The other units of the job, as one unit sees them in one term.

    None of its calls waits for the network, except `close`.

    Args:
        context: of this unit.
        hosts: the hosts of all units.
        ending: how the job ends.
    """

    def __init__(self, context: UnitContext, hosts: HostMap, ending: JobEnding) -> None:
        self._context, self._hosts, self._ending = context, hosts, ending
        self._stores, self._rank = context.stores, context.rank
        self._left = threading.Event()
        self._finished = False
        self.reports: dict[int, list[Event]] = {}

    @property
    def takes_snapshot(self) -> bool:
        """Whether this unit requests the last snapshot when another unit is asked to end."""
        return self._context.first_server

    def by_signal(self, number: int) -> JobEnd:
        """Return the end that a signal to this unit causes."""
        name = "SIGINT" if number == 2 else "SIGTERM" if number == 15 else f"signal {number}"
        where = self._hosts.names[self._rank]
        return JobEnd(128 + number, self._rank, where, text=f"ended by {name} to unit {self._rank} on {where}")

    def close(self) -> None:
        """Stop watching, and end the connections."""
        self._left.set()

    def _pause(self) -> bool:
        """Wait for the next look at the other units; return False when there is none."""
        return not self._ending.pause(BEAT_S) and not self._left.is_set()

    def _request_save(self, end: JobEnd) -> bool:
        """Note how the job is to end after a last snapshot; return whether this is new."""
        new = self._ending.ask(end)
        if new and self.takes_snapshot:
            self._ending.wake()
        return new

    def _has_heartbeat(self, rank: int) -> bool | None:
        """Return whether the store has a heartbeat of a unit; None if it is away."""
        try:
            return self._stores.run.get(f"alive/{rank}") is not None
        except StoreError:
            return None

    def vanished(self, rank: int, more: str = "") -> Failed:
        """Return the loss of a unit."""
        with_store = ", and the store with it" if self._hosts.served and rank == 0 else ""
        text = f"unit {rank} on {self._hosts.names[rank]} vanished without a word"
        return Failed(f"unit {rank}", "died", f"{text}{with_store}{more}", "")

    def _end_of(self, cause: Failed, rank: int) -> JobEnd:
        """Return the end that a failure in this unit causes."""
        return JobEnd.of(cause, rank, self._hosts.names[rank])


class FollowerMembership(NodeMembership):
    """The membership of a unit that follows the leader.

    Args:
        context, hosts, ending: as for `NodeMembership`.
        queue: receives messages for the run loop.
        election: of the leader.
        forwards: gets the answers to requests of the user.
        replaceable: another unit takes over when the leader is lost.
    """

    def __init__(
        self,
        context: UnitContext,
        hosts: HostMap,
        ending: JobEnding,
        queue: NewsQueue,
        election: LeaderElection,
        forwards: ForwardedRequests,
        replaceable: bool,
    ) -> None:
        super().__init__(context, hosts, ending)
        self._lost_peer, self._forwards, self._replaceable = False, forwards, replaceable
        self.control = ControlClient(
            context.access, context.rank, context.word, self.receive, queue, election.term, election.leader
        )
        self.control.start()
        threading.Thread(target=self._watch, name="membership", daemon=True).start()

    def close(self) -> None:
        """Stop watching, and end the connection."""
        super().close()
        self.control.close()

    @property
    def leader_is_silent(self) -> bool:
        """Whether nothing has arrived from the leader for so long that it may be lost."""
        # A store that unit 0 serves goes away with it: that is a second sign, so a shorter silence is enough.
        limit_s = STORE_LOST_S if self._hosts.served else LOST_S
        suspects = self._lost_peer or self.control.suspects
        # A lost peer is a sign, too.
        return self._silence_s > (min(limit_s, ALIVE_S) if suspects else limit_s)

    @property
    def _silence_s(self) -> float:
        return self.control.silence_s(self.control.leader)

    def tell(self, cause: Failed) -> None:
        """Report why the job cannot go on here."""
        self._lost_peer |= cause.kind == "peer"  # it may have been in the leader, which then cannot report it
        self._report({"cause": to_json(cause)})
        self._end_if_alone(self._end_of(cause, self._rank))

    def announce_save(self, end: JobEnd) -> None:
        """Report that this unit is asked for this end, after a last snapshot."""
        self._request_save(end)
        self._report({"save": end.to_text()})

    def request_end(self, end: JobEnd) -> None:
        """Ask the leader for this end of the job."""
        self._report({"end": end.to_text()})
        self._end_if_alone(end)

    def _report(self, words: Words) -> None:
        self.control.send(self.control.leader, words)

    def _end_if_alone(self, end: JobEnd) -> None:
        if self._silence_s > AWAY_S:  # no decision of the leader can be waited for
            self._ending.deliver(end)

    def send_samples(self, lines: Sequence[str]) -> bool:
        """Send events for displays; return False if a former message is still on its way."""
        # So little is kept for a leader that is out of reach.
        free = self.control.all_received
        if free:
            self._report({"samples": list(lines)})
        return free

    def finish(self, events: Sequence[Event]) -> None:
        """Report that this unit ended well. When all have, the leader ends the job."""
        self._finished = True
        self.reports[self._rank] = list(events)
        self._report({"report": [to_json(event) for event in events]})

    def receive(self, rank: int, words: Words) -> bool:
        """Process a decision of the leader; return False for a command to the run loop."""
        if self._left.is_set():  # another unit leads by now
            return True
        if "end" in words:
            self._ending.deliver(JobEnd.loaded(words["end"]))
        elif "save" in words:
            self._request_save(JobEnd.loaded(words["save"]))
        elif "answer" in words:
            self._forwards.receive(words["answer"])
        else:
            return False
        return True

    def _watch(self) -> None:
        """Find out whether the leader is gone, until the job ends."""
        while self._pause():
            if self.leader_is_silent:
                self._look_for_leader()
            if self._finished and self._silence_s > AWAY_S:
                self._ending.deliver(JobEnd(0, text=_ALONE.format(f"unit {self.control.leader}", AWAY_S)))

    def _look_for_leader(self) -> None:
        """Deliver the end that the leader has left in the store, or its loss."""
        rank, raw = self.control.leader, None
        with suppress(StoreError):
            raw = self._stores.run.get("end")
        # The leader writes the end here, too, for units that are not connected.
        if raw is not None:
            end = JobEnd.loaded(raw)
            if end.counts_in(self.control.term):
                self._ending.deliver(end)
        elif not self._replaceable:
            # A store that is away is no loss, unless unit 0 serves it.
            beats = self._has_heartbeat(rank)
            if beats is False or (beats is None and self._hosts.served):
                more = _ADVICE if self._hosts.served and self._context.recovers else ""
                self._ending.deliver(self._end_of(self.vanished(rank, more), rank))


class LeaderMembership(NodeMembership):
    """The membership of the leader, which decides.

    Args:
        context, hosts, ending: as for `NodeMembership`.
        control: the connections of the other units; it listens.
        queue: receives the losses and returns of units.
        requests: of the user, from other units and the store.
        replaceable: another unit takes over when this one is lost, so the end of the job has to be in the store first.
    """

    def __init__(
        self,
        context: UnitContext,
        hosts: HostMap,
        ending: JobEnding,
        control: ControlServer,
        queue: NewsQueue,
        requests: JobRequests,
        replaceable: bool,
    ) -> None:
        super().__init__(context, hosts, ending)
        self.control, self._queue, self._requests = control, queue, requests
        self._replaceable = replaceable
        self._local = is_local(hosts.addresses[self._rank])
        self._kept, self._kept_of_job = MaintainedValues(context.stores.run), MaintainedValues(context.stores.shared)
        # The unit that has opened the job maintains these by itself.
        if control.term > FIRST_TERM:
            for key, value in context.maintained.items():
                self._kept.keep(key, value)
            self._kept_of_job.keep("run", context.access.run_id.rpartition(".")[2].encode())
        self._gone: set[int] = set()  # units that are not looked after
        self._words = {unit.word for unit in hosts.units}  # of units that are members, or were reported
        self._registered = 0.0
        self._asked_in_store = StoreRequests(context.stores.shared, requests)
        self.samples = ReceivedSamples()
        # Not the lock of `_ending`, which is taken inside.
        self._deciding = threading.Lock()
        self.announced = threading.Event()
        """Set when the run loop has the news that this unit leads. Messages of other units come after it."""
        context.watch.lead(context.resumed or control.term > FIRST_TERM, hosts.names)
        others = {unit.rank: unit.word for unit in hosts.units if unit.rank != self._rank}
        control.start(self.receive, others)
        threading.Thread(target=self._watch, name="membership", daemon=True).start()

    def close(self) -> None:
        """Stop watching, and end the connections."""
        super().close()
        self.announced.set()
        self._kept.close()
        self._kept_of_job.close()
        self.control.close()

    @property
    def takes_snapshot(self) -> bool:
        """Return True: the leader ends the job if the first server's unit is too late."""
        return True

    def receive(self, rank: int, words: Words) -> bool:
        """Process a request of a unit; return False for an event of its processes."""
        # On the thread of one connection. A unit that joins must not be heard before the news of the election.
        self.announced.wait()
        if self._left.is_set():  # another unit leads by now
            return True
        if "cause" in words:
            cause = from_json(words["cause"])
            if isinstance(cause, Failed):
                self._judge(cause, rank)
        elif "end" in words:
            self.request_end(JobEnd.loaded(words["end"]))
        elif "save" in words:
            self.announce_save(JobEnd.loaded(words["save"]))
        elif "report" in words:
            self.reports[rank] = [from_json(line) for line in words["report"]]
            self._end_if_complete()
        elif "samples" in words:
            self.samples.add(words["samples"])
        elif "ask" in words:
            accept(self._requests, self.control, rank, words["ask"])
        else:
            return False
        return True

    def tell(self, cause: Failed) -> None:
        """Report why the job cannot go on here."""
        self._judge(cause, self._rank)

    def announce_save(self, end: JobEnd) -> None:
        """Let the unit of the first server request the last snapshot."""
        if self._request_save(end):
            self._broadcast({"save": end.to_text()})

    def request_end(self, end: JobEnd) -> None:
        """End the job in this way, unless its end is decided already."""
        if not self._left.is_set() and self._ending.propose(end) and not self._replaceable:
            self.announce_end()

    def announce_end(self) -> None:
        """Tell all units how the job ends, as it was proposed. A second call does nothing."""
        with self._deciding:
            end = self._ending.proposed
            if end is not None and not self._ending.over and not self._left.is_set():
                # This unit's own end comes last: it leads to the end of the connections.
                self._kept.keep("end", replace(end, term=self.control.term).dumped())  # for units not connected yet
                self._broadcast({"end": end.to_text()})
                self._ending.deliver(end)

    def finish(self, events: Sequence[Event]) -> None:
        """Report that this unit ended well. When all have, the job ends."""
        self._finished = True
        self.reports[self._rank] = list(events)
        self._end_if_complete()

    def end_without(self, rank: int, why: str) -> None:
        """End the job because of a late unit. why: the predicate of a sentence about it."""
        lost = Failed(f"unit {rank}", "died", f"unit {rank} on {self._hosts.names[rank]} {why}", "")
        self.request_end(self._end_of(lost, rank))

    def _judge(self, cause: Failed, rank: int) -> None:
        # A thread for the wait: the caller is the run loop, or the reader of a connection.
        threading.Thread(target=self._explain, args=(cause, rank), name="explain", daemon=True).start()

    def _explain(self, cause: Failed, rank: int) -> None:
        """Wait for a better cause of a failure in this unit, then end the job."""
        until = time.monotonic() + _PATIENCE_S.get(cause.kind, 0.0)
        while not self._ending.over and not self._left.is_set():
            # A lost peer may be the death of its unit, which explains more than the lost connection.
            silent = self.silent(2 * BEAT_S) if cause.kind == "peer" else []
            # None, for a store that is away, is no proof of a loss.
            gone = [each for each in silent if self._has_heartbeat(each) is False]
            if gone:
                self.request_end(self._end_of(self.vanished(gone[0]), gone[0]))
            elif time.monotonic() >= until:
                self.request_end(self._end_of(cause, self._context.where.get(cause.who, rank)))
            self._ending.pause(_LOOK_S)

    def _broadcast(self, words: Words) -> None:
        for rank in self.control.ranks:
            self.control.send(rank, words)

    def _end_if_complete(self) -> None:
        if self._finished and not self._unreported():
            self.request_end(JobEnd(0))

    def _unreported(self) -> set[int]:
        return set(range(len(self._hosts.names))) - {self._rank} - self.reports.keys() - self._gone

    def leave(self, end: JobEnd, state: str) -> None:
        """Record in the registry how the job ended. Raises StoreError."""
        self.close()  # otherwise removed keys would be written again
        self._asked_in_store.write()
        if end.code:
            self._stores.run.set("end", end.dumped())  # the user may ask why the job failed
        self._stores.registry.keep(self._stores.record)
        self._tell_summary()
        self._stores.registry.end(self._stores.record.id, state)

    def _watch(self) -> None:
        """Watch the units, and requests in the store, until the job ends."""
        while self._pause():
            with suppress(StoreError):
                self._look_into_store()
            for rank in self.silent(ALIVE_S if self.control.suspects else LOST_S):
                # Only both together are a loss: a broken connection is made again, and a store may be away.
                if self._has_heartbeat(rank) is False:
                    self._lose(rank)
            missing = self._unreported() if self._finished else set()
            # With the store away no loss can be proved, and the remaining units may be unreachable forever.
            if missing and missing.issubset(self.silent(AWAY_S)) and self._has_heartbeat(self._rank) is None:
                self._ending.deliver(JobEnd(0, text=_ALONE.format("the store", AWAY_S)))

    @property
    def watched(self) -> list[int]:
        """The units that are looked after."""
        return [rank for rank in self.control.ranks if rank not in self._gone]

    def silent(self, seconds: float) -> list[int]:
        """Return the units of which nothing has arrived for so long."""
        return [rank for rank in self.watched if self.control.silence_s(rank) > seconds]

    def _look_into_store(self) -> None:
        self._asked_in_store.look()
        if self._stores.shared.get("stop") is not None:
            self.announce_save(JobEnd(143, text="asked to end by its launcher or by `topotrain jobs stop`"))
        raw = self._stores.run.get("end")
        if raw is not None:  # of a unit that could not start, or of a former leader
            end = JobEnd.loaded(raw)
            if end.counts_in(self.control.term):
                self.request_end(end)
            else:
                self._stores.run.delete("end")
        if time.monotonic() - self._registered > _REGISTER_EVERY_S:
            self._stores.registry.keep(self._stores.record)
            self._tell_summary()
            self._registered = time.monotonic()
        if self._context.recovers and (self._gone or self.silent(2 * BEAT_S)):
            self._look_for_returns()

    def _tell_summary(self) -> None:
        """Write the state of the job to the store. Raises StoreError."""
        found = self._context.watch.summary()
        if found is not None:
            self._stores.registry.report(self._stores.record.id, found)

    def _lose(self, rank: int) -> None:
        """Handle the loss of a unit: it ends the job, or the recovery policy decides."""
        if not self._context.recovers:
            self.request_end(self._end_of(self.vanished(rank), rank))
            return
        # First: its silence is reported once.
        self.give_up(rank)
        self._queue.put(UnitVanished(rank, self.vanished(rank)))

    def give_up(self, rank: int) -> None:
        """Look after a unit no longer, because it is lost."""
        self._gone.add(rank)
        self._end_if_complete()

    def _look_for_returns(self) -> None:
        for key in self._stores.run.keys("back/"):
            raw = self._stores.run.get(key)
            # Another secret, or an address that cannot be listened at: the unit gets no reply.
            with suppress(StoreError, ConfigError, TransportError):
                unit = self._context.verifier.verify(raw or b"")
                # The key stays in the store, and must be reported once.
                known = unit.word in self._words or unit.rank == self._rank
                if not known and 0 <= unit.rank < len(self._hosts.names):
                    self._listen_for(unit)
                    self._words.add(unit.word)
                    # Its predecessor may not be known as lost yet. From here on its silence does not count.
                    self._gone.add(unit.rank)
                    self._queue.put(UnitReturned(unit.rank, unit))

    def _listen_for(self, unit: NodeInfo) -> None:
        """Listen where other machines connect, once. Raises TransportError."""
        me = self._hosts.units[self._rank]
        if self._local and unit.machine != me.machine and not is_local(me.address):
            # On one machine the leader listens at a loopback address only.
            self.control.listen(me.address)
            self._local = False

    def expect(self, hosts: HostMap, ranks: Collection[int]) -> None:
        """Watch these units from now on, and no others."""
        self._hosts = hosts
        self._gone = set(range(len(hosts.names))) - set(ranks) - {self._rank}


_OF_A_REPORT = (
    Started,
    Serving,
    StepDone,
    Skipped,
    Finished,
    Metrics,
    Final,
    Counted,
    Apart,
    Rounds,
    LocalSteps,
    StateTaken,
)


class UnitReport:
    """The events of a unit that a report needs; of repeated events the last one."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Event] = {}

    def __call__(self, event: Event) -> None:
        """Record one event."""
        if isinstance(event, _OF_A_REPORT):
            self._last[(type(event).__name__, getattr(event, "who", ""))] = event

    @property
    def events(self) -> list[Event]:
        """The recorded events, in a possible order of occurrence."""
        return list(self._last.values())
