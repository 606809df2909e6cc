"""Membership of a job's units, as one unit sees them: liveness and the job's end.

* Unit 0 decides once how the job ends, with the first cause. The other units report their causes to it.
* After a connection error it first waits for a better cause. Without one it looks for a unit without heartbeats.
* A unit is lost when nothing arrives from it and the store has no heartbeat of it. A broken connection alone is not a
  loss, and neither is a store that is away.
"""

import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from topotrain.comm.store import Store, StoreError
from topotrain.comm.store.discovery.job_registry import STOP_SAVING, JobRecord, Registry
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
    Metrics,
    Serving,
    Skipped,
    Started,
    StepDone,
    from_json,
    to_json,
)
from topotrain.launch.job_requests import JobRequests
from topotrain.launch.multinode.control_connection import (
    ControlAccess,
    ControlClient,
    ControlServer,
    UnitReturned,
    UnitVanished,
)
from topotrain.launch.multinode.forwarded_requests import ForwardedRequests, accept
from topotrain.launch.multinode.node_info import HostMap, JobEnd, NodeInfo, NodeVerifier, is_local
from topotrain.launch.multinode.node_rendezvous import ALIVE_S, BEAT_S
from topotrain.launch.multinode.reliable_messages import Words
from topotrain.launch.store_requests import StoreRequests

LOST_S = 10.0
"""Seconds of silence after which a unit is gone, regardless of its peers."""
STORE_LOST_S = 5.0
"""Seconds of silence after which unit 0 is gone, where the store that it serves is gone, too."""
AWAY_S = 15.0
"""Seconds for which a unit waits for unit 0, and for the store, before it goes on alone."""
# A heartbeat expires after ALIVE_S. Only then is it certain that the unit of a lost peer is gone.
_PATIENCE_S: Mapping[str, float] = MappingProxyType({"internal": 1.5, "peer": ALIVE_S + 1.0})
"""Seconds for which a failure waits for its cause, by kinds of failure that may have one elsewhere."""
_REGISTER_EVERY_S = 5.0  # between two updates of the registry
_LOOK_S = 0.1
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


class NodeMembership:
    """The other units of the job, as one unit sees them.

    Its subclasses implement `job_shutdown.OtherUnits`. None of their calls waits for the network, except `close`.

    Args:
        stores: the store's keys.
        rank: the rank of this unit.
        hosts: the hosts of all units.
        leads: this unit has the first server, or knows where it is. So it requests the last snapshot when another unit
            is asked to end.
    """

    def __init__(self, stores: StoreKeys, rank: int, hosts: HostMap, leads: bool) -> None:
        self._stores, self._rank, self._hosts, self._leads = stores, rank, hosts, leads
        # Other threads decide; the run loop's selector sees it through this socket.
        self._wake_out, self._wake_in = socket.socketpair()
        self._lock = threading.Lock()
        self._closed, self._decided = threading.Event(), threading.Event()
        self._asked: JobEnd | None = None
        self._finished = False
        self.end: JobEnd | None = None
        self.reports: dict[int, list[Event]] = {}

    def fileno(self) -> int:
        """Return a descriptor that is readable when `over` or `saves` has become true."""
        return self._wake_out.fileno()

    @property
    def over(self) -> bool:
        """Whether the end of the job is decided."""
        return self.end is not None

    @property
    def saves(self) -> bool:
        """Whether the job is to end after a last snapshot that this unit requests."""
        return self._leads and self._asked is not None

    def clear_wakeup(self) -> None:
        """Clear the event for which `fileno` became readable."""
        self._wake_out.recv(64)

    def signalled(self, number: int, more: str = "") -> None:
        """Report that a signal asks the job to end; `more` is added to the report."""
        # The first signal counts, which may have come to another unit.
        end = self._asked or self._by_signal(number)
        self.request_end(replace(end, text=f"{end.text}; {more}") if more else end)

    def request_end(self, end: JobEnd) -> None:
        """Ask for this end of the job."""
        raise NotImplementedError

    def exclude(self) -> None:
        """End this unit: the others continue without it after its long silence."""
        text = f"the job goes on without unit {self._rank} on {self._name}, which was silent for too long"
        self._deliver(JobEnd(1, self._rank, self._name, text=text))

    def wait(self, seconds: float) -> JobEnd | None:
        """Return the end of the job if it is decided in time, else None."""
        self._decided.wait(seconds)
        return self.end

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._decided.set()
        # Under the lock: `_deliver` on another thread must not write to a closed socket.
        with self._lock:
            self._wake_out.close()
            self._wake_in.close()

    @property
    def _name(self) -> str:
        return self._hosts.names[self._rank]

    def _by_signal(self, number: int) -> JobEnd:
        name = "SIGINT" if number == 2 else "SIGTERM" if number == 15 else f"signal {number}"
        text = f"ended by {name} to unit {self._rank} on {self._name}"
        return JobEnd(128 + number, self._rank, self._name, text=text)

    def _request_save(self, end: JobEnd) -> bool:
        """Note how the job is to end after a last snapshot; return whether this is new."""
        with self._lock:
            if self._asked is not None or self._closed.is_set():
                return False
            self._asked = end
            if self._leads:
                self._wake_in.send(b"!")
            return True

    def _deliver(self, end: JobEnd) -> None:
        with self._lock:
            # The first end counts. It is set before the wakeup, which makes the run loop read it.
            if self.end is None and not self._closed.is_set():
                self.end = end
                self._wake_in.send(b"!")
        # After `end` is set: a waiting thread reads it at once.
        self._decided.set()

    def _has_heartbeat(self, rank: int) -> bool | None:
        """Return whether the store has a heartbeat of a unit; None if it is away."""
        try:
            return self._stores.run.get(f"alive/{rank}") is not None
        except StoreError:
            return None

    def _vanished(self, rank: int, more: str = "") -> Failed:
        with_store = ", and the store with it" if self._hosts.served and rank == 0 else ""
        text = f"unit {rank} on {self._hosts.names[rank]} vanished without a word{with_store}{more}"
        return Failed(f"unit {rank}", "died", text, "")

    def _end_of(self, cause: Failed, rank: int) -> JobEnd:
        """Return the end that a failure in this unit causes."""
        return JobEnd.of(cause, rank, self._hosts.names[rank])


class FollowerMembership(NodeMembership):
    """The membership of a unit other than unit 0.

    Args:
        stores, rank, hosts, leads: as for `NodeMembership`.
        access: the settings of the control connection.
        word: the word of this process.
    """

    def __init__(
        self, stores: StoreKeys, rank: int, hosts: HostMap, leads: bool, access: ControlAccess, word: str
    ) -> None:
        super().__init__(stores, rank, hosts, leads)
        self._lost_peer = False
        self.control = ControlClient(access, rank, word, self, AWAY_S)
        self.requests, self.forwards = JobRequests(), ForwardedRequests(self.control)
        self.control.start()
        threading.Thread(target=self._watch, name="membership", daemon=True).start()

    def close(self) -> None:
        """Stop watching, and end the connection."""
        super().close()
        self.forwards.close()
        self.control.close()

    def tell(self, cause: Failed) -> None:
        """Report why the job cannot go on here."""
        self._lost_peer |= cause.kind == "peer"  # it may have been in unit 0, which then cannot report it
        self.control.send(0, {"cause": to_json(cause)})
        self._end_if_alone(self._end_of(cause, self._rank))

    def save(self, number: int) -> None:
        """Report that a signal asks the job to end after a last snapshot."""
        end = self._by_signal(number)
        self._request_save(end)
        self.control.send(0, {"save": end.to_text()})

    def request_end(self, end: JobEnd) -> None:
        """Ask unit 0 for this end of the job."""
        self.control.send(0, {"end": end.to_text()})
        self._end_if_alone(end)

    def _end_if_alone(self, end: JobEnd) -> None:
        if self.control.alone:  # no decision of unit 0 can be waited for
            self._deliver(end)

    def finish(self, events: Sequence[Event]) -> None:
        """Report that this unit ended well. When all have, unit 0 ends the job."""
        self._finished = True
        self.reports[self._rank] = list(events)
        self.control.send(0, {"report": [to_json(event) for event in events]})

    def receive(self, rank: int, words: Words) -> bool:
        """Process a decision of unit 0; return False for a command to the run loop."""
        if "end" in words:
            self._deliver(JobEnd.loaded(words["end"]))
        elif "save" in words:
            self._request_save(JobEnd.loaded(words["save"]))
        elif "answer" in words:
            self.forwards.receive(words["answer"])
        else:
            return False
        return True

    def _watch(self) -> None:
        """Find out whether unit 0 is gone, until the job ends."""
        while not self._decided.wait(BEAT_S):
            silent_s = self.control.silence_s(0)
            # A store that unit 0 serves goes away with it: that is a second sign, so a shorter silence is enough.
            limit_s = STORE_LOST_S if self._hosts.served else LOST_S
            suspects = self._lost_peer or self.control.suspects
            # A lost peer is a sign, too.
            if silent_s > (min(limit_s, ALIVE_S) if suspects else limit_s):
                self._look_for_unit_0()
            if self._finished and self.control.alone:
                self._deliver(JobEnd(0, text=_ALONE.format("unit 0", AWAY_S)))

    def _look_for_unit_0(self) -> None:
        """Deliver the end that unit 0 has left in the store, or the loss of unit 0."""
        beats, raw = self._has_heartbeat(0), None
        with suppress(StoreError):
            raw = self._stores.run.get("end")
        # Unit 0 writes the end here, too, for units that are not connected.
        if raw is not None:
            self._deliver(JobEnd.loaded(raw))
        # A store that is away is no loss, unless unit 0 serves it.
        elif beats is False or (beats is None and self._hosts.served):
            self._deliver(self._end_of(self._vanished(0), 0))


class LeaderMembership(NodeMembership):
    """The membership of unit 0, which decides.

    Args:
        stores, hosts, leads: as for `NodeMembership`.
        access: the settings of the control connections.
        units: the descriptions of all units, by rank.
        verifier: checks the description of a unit that rejoins.
        recovers: the job survives process deaths, so the loss of a unit does not end it.
        where: the unit of each process and unit name.

    Raises:
        TransportError: this unit cannot listen at its address.
    """

    def __init__(
        self,
        stores: StoreKeys,
        hosts: HostMap,
        leads: bool,
        access: ControlAccess,
        units: Sequence[NodeInfo],
        verifier: NodeVerifier,
        recovers: bool,
        where: Mapping[str, int],
    ) -> None:
        super().__init__(stores, 0, hosts, leads)
        self._me, self._verifier, self._recovers, self._where = units[0], verifier, recovers, where
        self._local = is_local(hosts.addresses[0])
        self._kept = MaintainedValues(stores.run)
        self._gone: set[int] = set()  # units that are not looked after
        self._words: set[str] = set()  # of units that rejoined and were reported
        self._registered = 0.0
        self.requests = JobRequests()
        self._asked_in_store = StoreRequests(stores.shared, self.requests)
        # Not `_lock`, which `_deliver` takes inside.
        self._deciding = threading.Lock()
        self.control = ControlServer(access, {unit.rank: unit.word for unit in units[1:]}, self)
        if self.control.ranks:
            self.control.start(hosts.addresses[0] or "127.0.0.1")
        threading.Thread(target=self._watch, name="membership", daemon=True).start()

    def close(self) -> None:
        """Stop watching, and end the connections."""
        super().close()
        self._kept.close()
        self.control.close()

    def receive(self, rank: int, words: Words) -> bool:
        """Process a request of a unit; return False for an event of its processes."""
        if "cause" in words:
            cause = from_json(words["cause"])
            if isinstance(cause, Failed):
                self._judge(cause, rank)
        elif "end" in words:
            self.request_end(JobEnd.loaded(words["end"]))
        elif "save" in words:
            self._announce_save(JobEnd.loaded(words["save"]))
        elif "report" in words:
            self.reports[rank] = [from_json(line) for line in words["report"]]
            self._end_if_complete()
        elif "ask" in words:
            accept(self.requests, self.control, rank, words["ask"])
        else:
            return False
        return True

    def tell(self, cause: Failed) -> None:
        """Report why the job cannot go on here."""
        self._judge(cause, 0)

    def save(self, number: int) -> None:
        """Report that a signal asks the job to end after a last snapshot."""
        self._announce_save(self._by_signal(number))

    def request_end(self, end: JobEnd) -> None:
        """End the job in this way, unless its end is decided already."""
        with self._deciding:
            if not self.over:
                # This unit's own end comes last: it leads to the end of the connections.
                self._kept.keep("end", end.dumped())  # for units that are not connected yet
                self._broadcast({"end": end.to_text()})
                self._deliver(end)

    def finish(self, events: Sequence[Event]) -> None:
        """Report that this unit ended well. When all have, the job ends."""
        self._finished = True
        self.reports[0] = list(events)
        self._end_if_complete()

    def on_not_replaced(self, rank: int, seconds: float, more: str) -> None:
        """End the job because no replacement of a vanished unit joined."""
        lost = self._vanished(rank, f", and within {seconds:g} s no replacement was started{more}")
        self.request_end(self._end_of(lost, rank))

    def _announce_save(self, end: JobEnd) -> None:
        """Let the unit of the first server request the last snapshot."""
        if self._request_save(end):
            self._broadcast({"save": end.to_text()})

    def _judge(self, cause: Failed, rank: int) -> None:
        # A thread for the wait: the caller is the run loop, or the reader of a connection.
        threading.Thread(target=self._explain, args=(cause, rank), name="explain", daemon=True).start()

    def _explain(self, cause: Failed, rank: int) -> None:
        """Wait for a better cause of a failure in this unit, then end the job."""
        until = time.monotonic() + _PATIENCE_S.get(cause.kind, 0.0)
        while not self._decided.is_set():
            # A lost peer may be the death of its unit, which explains more than the lost connection.
            silent = self._silent(2 * BEAT_S) if cause.kind == "peer" else []
            # None, for a store that is away, is no proof of a loss.
            gone = [each for each in silent if self._has_heartbeat(each) is False]
            if gone:
                self.request_end(self._end_of(self._vanished(gone[0]), gone[0]))
            elif time.monotonic() >= until:
                self.request_end(self._end_of(cause, self._where.get(cause.who, rank)))
            self._decided.wait(_LOOK_S)

    def _broadcast(self, words: Words) -> None:
        for rank in self.control.ranks:
            self.control.send(rank, words)

    def _end_if_complete(self) -> None:
        if self._finished and not self._unreported():
            self.request_end(JobEnd(0))

    def _unreported(self) -> set[int]:
        return set(range(1, len(self._hosts.names))) - self.reports.keys() - self._gone

    def leave(self, state: str) -> None:
        """Record in the registry how the job ended. Raises StoreError."""
        self.close()  # otherwise removed keys would be written again
        self._asked_in_store.write()
        if self.end is not None and self.end.code:
            self._stores.run.set("end", self.end.dumped())  # the user may ask why the job failed
        self._stores.registry.keep(self._stores.record)
        self._stores.registry.end(self._stores.record.id, state)

    def _watch(self) -> None:
        """Watch the units, and requests in the store, until the job ends."""
        while not self._decided.wait(BEAT_S):
            with suppress(StoreError):
                self._look_into_store()
            for rank in self._silent(ALIVE_S if self.control.suspects else LOST_S):
                # Only both together are a loss: a broken connection is made again, and a store may be away.
                if self._has_heartbeat(rank) is False:
                    self._lose(rank)
            missing = self._unreported() if self._finished else set()
            # With the store away no loss can be proved, and the remaining units may be unreachable forever.
            if missing and missing.issubset(self._silent(AWAY_S)) and self._has_heartbeat(0) is None:
                self._deliver(JobEnd(0, text=_ALONE.format("the store", AWAY_S)))

    def _silent(self, seconds: float) -> list[int]:
        """Return the units of which nothing has arrived for so long."""
        ranks = [rank for rank in self.control.ranks if rank not in self._gone]
        return [rank for rank in ranks if self.control.silence_s(rank) > seconds]

    def _look_into_store(self) -> None:
        self._asked_in_store.look()
        stop = self._stores.shared.get("stop")
        if stop == STOP_SAVING:
            self._announce_save(JobEnd(143, text="asked to end after a last snapshot"))
        elif stop is not None:
            self.request_end(JobEnd(130, text="stopped by `topotrain jobs stop`"))
        raw = self._stores.run.get("end")
        if raw is not None:  # of a unit that could not start
            self.request_end(JobEnd.loaded(raw))
        if time.monotonic() - self._registered > _REGISTER_EVERY_S:
            self._stores.registry.keep(self._stores.record)
            self._registered = time.monotonic()
        if self._recovers and (self._gone or self._silent(2 * BEAT_S)):
            self._look_for_returns()

    def _lose(self, rank: int) -> None:
        """Handle the loss of a unit: it ends the job, or the recovery policy decides."""
        if not self._recovers:
            self.request_end(self._end_of(self._vanished(rank), rank))
            return
        # First: its silence is reported once.
        self._gone.add(rank)
        self.control.put(UnitVanished(rank, self._vanished(rank)))
        self._end_if_complete()

    def _look_for_returns(self) -> None:
        for key in self._stores.run.keys("back/"):
            raw = self._stores.run.get(key)
            # Another secret, or an address that cannot be listened at: the unit gets no reply.
            with suppress(StoreError, ConfigError, TransportError):
                unit = self._verifier.verify(raw or b"")
                # The key stays in the store, and must be reported once.
                if unit.word not in self._words and 0 < unit.rank < len(self._hosts.names):
                    self._listen_for(unit)
                    self._words.add(unit.word)
                    # Its predecessor may not be known as lost yet. From here on its silence does not count.
                    self._gone.add(unit.rank)
                    self.control.put(UnitReturned(unit.rank, unit))

    def _listen_for(self, unit: NodeInfo) -> None:
        """Listen where other machines connect, once. Raises TransportError."""
        if self._local and unit.machine != self._me.machine and not is_local(self._me.address):
            # On one machine unit 0 listens at a loopback address only.
            self.control.listen(self._me.address)
            self._local = False

    def expect(self, hosts: HostMap, ranks: Collection[int]) -> None:
        """Watch these units from now on, and no others."""
        self._hosts = hosts
        self._gone = set(range(len(hosts.names))) - set(ranks)


UnitMembership = LeaderMembership | FollowerMembership

_OF_A_REPORT = (Started, Serving, StepDone, Skipped, Finished, Metrics, Final, Counted, Apart)


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
