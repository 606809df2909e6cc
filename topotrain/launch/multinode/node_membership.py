"""Membership of a job's units, as one unit sees it: liveness and the job's end.

* Unit 0 decides once how the job ends, with the first cause. The other units report their causes to it.
* After a connection error it first waits for a better cause. Without one it looks for a unit that gives no sign.
* A unit is lost when it gives no sign of life, neither over its connection nor in the store. A broken connection alone
  is not a loss, and neither is a store that is away.
"""

import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
    Metrics,
    Serving,
    Skipped,
    Started,
    StepDone,
    from_json,
    to_json,
)
from topotrain.launch.multinode.control_connection import (
    ControlAccess,
    ControlClient,
    ControlConnection,
    ControlServer,
    UnitReturned,
    UnitVanished,
)
from topotrain.launch.multinode.node_info import HostMap, JobEnd, NodeInfo, NodeVerifier, is_local
from topotrain.launch.multinode.node_rendezvous import ALIVE_S, BEAT_S
from topotrain.launch.multinode.reliable_messages import Words

LOST_S = 10.0
"""Seconds of silence after which a unit is gone, regardless of its peers."""
STORE_LOST_S = 5.0
"""Seconds of silence after which unit 0 is gone, where the store that it serves is gone, too."""
AWAY_S = 15.0
"""Seconds for which a unit waits for unit 0, and for the store, before it goes on alone."""
_PATIENCE_S: Mapping[str, float] = MappingProxyType({"internal": 1.5, "peer": ALIVE_S + 1.0})
"""Seconds for which a failure waits for its cause, by kinds of failure that may have one elsewhere."""
_WATCH_S = 5.0
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
    """The other units of the job; it implements `run_loop.OtherUnits`.

    `LeaderMembership` is that of unit 0, and `FollowerMembership` that of the other units.

    Args:
        stores: the store's keys.
        rank: the rank of this unit.
        hosts: the hosts of all units.
        leads: this unit has the first server, or knows where it is. So it requests the last snapshot when another unit
            is asked to end.
    """

    control: ControlConnection

    def __init__(self, stores: StoreKeys, rank: int, hosts: HostMap, leads: bool) -> None:
        self._stores, self._rank, self._hosts, self._leads = stores, rank, hosts, leads
        self._told, self._teller = socket.socketpair()
        self._lock = threading.Lock()
        self._closed, self._decided = threading.Event(), threading.Event()
        self._asked: JobEnd | None = None
        self._finished = False
        self.end: JobEnd | None = None
        self.reports: dict[int, list[Event]] = {}

    # --- for the run loop

    def fileno(self) -> int:
        """Return a descriptor that is readable when the end of the job is decided, or a last snapshot is asked for."""
        return self._told.fileno()

    @property
    def over(self) -> bool:
        """Whether the end of the job is decided."""
        return self.end is not None

    @property
    def saves(self) -> bool:
        """Whether the job is to end after a last snapshot that this unit requests."""
        return self._leads and self._asked is not None

    def heard(self) -> None:
        """Clear the event for which `fileno` became readable."""
        self._told.recv(64)

    def tell(self, cause: Failed) -> None:
        """Report why the job cannot go on here.

        The call does not block.
        """
        raise NotImplementedError

    def save(self, number: int) -> None:
        """Report that a signal asks the job to end after a last snapshot.

        The call does not block.
        """
        raise NotImplementedError

    def signalled(self, number: int, more: str = "") -> None:
        """Report that a signal asks the job to end.

        The call does not block. more: text to add to the report.
        """
        end = self._asked or self._by_signal(number)
        self._request_end(replace(end, text=f"{end.text}; {more}") if more else end)

    def cast_out(self) -> None:
        """End this unit: the others continue without it after its long silence."""
        text = f"the job goes on without unit {self._rank} on {self._name}, which was silent for too long"
        self._deliver(JobEnd(1, self._rank, self._name, text=text))

    # --- for the unit

    def wait(self, seconds: float) -> JobEnd | None:
        """Return the end of the job if it is decided in time, else None."""
        self._decided.wait(seconds)
        return self.end

    def finish(self, events: Sequence[Event]) -> None:
        """Report that this unit ended well.

        When all have, unit 0 ends the job. The call does not block.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Stop watching, and end the connections."""
        self._closed.set()
        self._decided.set()
        self.control.close()
        with self._lock:
            self._told.close()
            self._teller.close()

    # --- for both kinds

    @property
    def _name(self) -> str:
        return self._hosts.names[self._rank]

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=work.__name__.strip("_"), daemon=True).start()

    def _request_end(self, end: JobEnd) -> None:
        """Ask unit 0 to end the job in this way. The call does not block."""
        raise NotImplementedError

    def _by_signal(self, number: int) -> JobEnd:
        name = "SIGINT" if number == 2 else "SIGTERM" if number == 15 else f"signal {number}"
        return JobEnd(
            128 + number, self._rank, self._name, text=f"ended by {name} to unit {self._rank} on {self._name}"
        )

    def _ask_to_save(self, end: JobEnd) -> bool:
        """Note how the job is to end after a last snapshot; return whether this is new."""
        with self._lock:
            if self._asked is not None or self._closed.is_set():
                return False
            self._asked = end
            if self._leads:
                self._teller.send(b"!")
            return True

    def _deliver(self, end: JobEnd) -> None:
        with self._lock:
            if self.end is None and not self._closed.is_set():
                self.end = end
                self._teller.send(b"!")
        self._decided.set()

    def _watch(self) -> None:
        """Look after the other units until the job ends."""
        while not self._decided.wait(BEAT_S):
            self._look()

    def _look(self) -> None:
        """Find lost units."""
        raise NotImplementedError

    def _heartbeat(self, rank: int) -> bool | None:
        """Return whether the store has a heartbeat of this unit; None if the store is away."""
        try:
            return self._stores.run.get(f"alive/{rank}") is not None
        except StoreError:
            return None

    def _vanished(self, rank: int) -> Failed:
        with_store = ", and the store with it" if self._hosts.served and rank == 0 else ""
        text = f"unit {rank} on {self._hosts.names[rank]} vanished without a word{with_store}"
        return Failed(f"unit {rank}", "died", text, "")

    def _loss(self, rank: int) -> JobEnd:
        """Return the end that the loss of a unit is."""
        return JobEnd.of(self._vanished(rank), rank, self._hosts.names[rank])


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
        self.control: ControlClient = ControlClient(access, rank, word, self, AWAY_S)
        self.control.start()
        self._start(self._watch)

    def tell(self, cause: Failed) -> None:
        """Report why the job cannot go on here. A lost peer may be in unit 0, whose silence then tells more."""
        self.control.suspect(self.control.suspects or cause.kind == "peer")
        self.control.send(0, {"cause": to_json(cause)})

    def save(self, number: int) -> None:
        """Report that a signal asks the job to end after a last snapshot."""
        end = self._by_signal(number)
        self._ask_to_save(end)
        self.control.send(0, {"save": end.text_of()})

    def finish(self, events: Sequence[Event]) -> None:
        """Report that this unit ended well."""
        self._finished = True
        self.reports[self._rank] = list(events)
        self.control.send(0, {"report": [to_json(event) for event in events]})

    def receive(self, rank: int, words: Words) -> bool:
        """Process a decision of unit 0; return False for a command to the run loop."""
        if "end" in words:
            self._deliver(JobEnd.loaded(words["end"]))
        elif "save" in words:
            self._ask_to_save(JobEnd.loaded(words["save"]))
        else:
            return False
        return True

    def _request_end(self, end: JobEnd) -> None:
        self.control.send(0, {"end": end.text_of()})

    def _look(self) -> None:
        """Find out whether unit 0 is gone."""
        silent_s = self.control.silence_s(0)
        limit_s = STORE_LOST_S if self._hosts.served else LOST_S
        if silent_s > (min(limit_s, ALIVE_S) if self.control.suspects else limit_s):
            beats = self._heartbeat(0)
            if beats is False or (beats is None and self._hosts.served):
                self._deliver(self._published_end() or self._loss(0))
        if self._finished and silent_s > AWAY_S:
            self._deliver(JobEnd(0, text=_ALONE.format("unit 0", AWAY_S)))

    def _published_end(self) -> JobEnd | None:
        """Return the end that unit 0 has left in the store."""
        with suppress(StoreError):
            raw = self._stores.run.get("end")
            return None if raw is None else JobEnd.loaded(raw)
        return None


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
        self.control: ControlServer = ControlServer(access, {unit.rank: unit.word for unit in units[1:]}, self)
        self.control.start(hosts.addresses[0] or "127.0.0.1")
        for work in (self._watch, self._watch_end):
            self._start(work)

    def close(self) -> None:
        """Stop watching, and end the connections."""
        self._kept.close()
        super().close()

    def receive(self, rank: int, words: Words) -> bool:
        """Process what a unit says about itself or the job; return False for an event of its processes."""
        if "cause" in words:
            cause = from_json(words["cause"])
            if isinstance(cause, Failed):
                self._judge(cause, rank)
        elif "end" in words:
            self._request_end(JobEnd.loaded(words["end"]))
        elif "save" in words:
            self._pass_on(JobEnd.loaded(words["save"]))
        elif "report" in words:
            self.reports[rank] = [from_json(line) for line in words["report"]]
            self._end_if_complete()
        else:
            return False
        return True

    # --- the end

    def tell(self, cause: Failed) -> None:
        """Report why the job cannot go on here."""
        self._judge(cause, 0)

    def save(self, number: int) -> None:
        """Report that a signal asks the job to end after a last snapshot."""
        self._pass_on(self._by_signal(number))

    def _pass_on(self, end: JobEnd) -> None:
        """Tell the unit that requests the last snapshot."""
        if self._ask_to_save(end):
            self._broadcast({"save": end.text_of()})

    def finish(self, events: Sequence[Event]) -> None:
        """Report that this unit ended well. When all have, the job ends."""
        self._finished = True
        self.reports[0] = list(events)
        self._end_if_complete()

    def nobody_came(self, rank: int, seconds: float, more: str) -> None:
        """End the job because no replacement of a vanished unit joined.

        The call does not block.
        """
        lost = self._vanished(rank)
        text = f"{lost.text}, and within {seconds:g} s no replacement was started{more}"
        self._request_end(JobEnd.of(replace(lost, text=text), rank, self._hosts.names[rank]))

    def _judge(self, cause: Failed, rank: int) -> None:
        self._start(lambda: self._explain(cause, rank))

    def _explain(self, cause: Failed, rank: int) -> None:
        """Wait for a better cause of the failure in this unit, then end the job with it.

        The time limit depends on the kind of failure.
        """
        until = time.monotonic() + _PATIENCE_S.get(cause.kind, 0.0)
        while not self._decided.is_set():
            gone = self._silent_one() if cause.kind == "peer" else None
            if gone is not None:
                self._decide(self._loss(gone))
            elif time.monotonic() >= until:
                there = self._where.get(cause.who, rank)
                self._decide(JobEnd.of(cause, there, self._hosts.names[there]))
            else:
                self._decided.wait(_LOOK_S)

    def _silent_one(self) -> int | None:
        """Return a unit that gives no sign now; None if there is none."""
        return next((rank for rank in self._silent(2 * BEAT_S) if self._heartbeat(rank) is False), None)

    def _request_end(self, end: JobEnd) -> None:
        self._start(lambda: self._decide(end))

    def _decide(self, end: JobEnd) -> None:
        """Set the end of the job, unless it is decided already."""
        with suppress(StoreError):  # a unit that could not start has written its own there
            if not self._stores.run.compare_and_set("end", None, end.dumped()):
                end = JobEnd.loaded(self._stores.run.get("end") or b"")
        self._publish(end)

    def _publish(self, end: JobEnd) -> None:
        """Send the end to all units. The store has it for units that have not connected."""
        self._kept.keep("end", end.dumped())
        self._broadcast({"end": end.text_of()})
        self._deliver(end)

    def _broadcast(self, words: Words) -> None:
        for rank in self.control.ranks:
            self.control.send(rank, words)

    def _end_if_complete(self) -> None:
        if self._finished and not self._unreported():
            self._request_end(JobEnd(0))

    def _unreported(self) -> set[int]:
        return set(range(1, len(self._hosts.names))) - self.reports.keys() - self._gone

    def leave(self, state: str) -> None:
        """Record in the registry how the job ended. Raises StoreError."""
        self._kept.close()  # otherwise removed keys would be written again
        self.control.close()
        self._stores.registry.keep(self._stores.record)
        self._stores.registry.end(self._stores.record.id, state)

    # --- watching

    def _watch_end(self) -> None:
        """Wait for an end that a unit has written to the store before it was a member."""
        while not self._decided.is_set():
            try:
                self._publish(JobEnd.loaded(self._stores.run.watch("end", _WATCH_S)))
            except TimeoutError:
                continue
            except StoreError:
                self._decided.wait(BEAT_S)

    def _look(self) -> None:
        """Look after the units, and after requests to stop the job."""
        with suppress(StoreError):
            self._look_into_store()
        for rank in self._silent(ALIVE_S if self.control.suspects else LOST_S):
            if self._heartbeat(rank) is False:
                self._lose(rank)
        missing = self._unreported() if self._finished else set()
        if missing and missing.issubset(self._silent(AWAY_S)) and self._heartbeat(0) is None:
            self._deliver(JobEnd(0, text=_ALONE.format("the store", AWAY_S)))

    def _silent(self, seconds: float) -> list[int]:
        """Return the units of which nothing has arrived for so long."""
        return [
            rank for rank in self.control.ranks if rank not in self._gone and self.control.silence_s(rank) > seconds
        ]

    def _look_into_store(self) -> None:
        if self._stores.shared.get("stop") is not None:
            self._decide(JobEnd(130, text="stopped by `topotrain jobs stop`"))
        if time.monotonic() - self._registered > _REGISTER_EVERY_S:
            self._stores.registry.keep(self._stores.record)
            self._registered = time.monotonic()
        if self._recovers and (self._gone or self._silent(2 * BEAT_S)):
            self._look_for_returns()

    def _lose(self, rank: int) -> None:
        """Handle the loss of a unit: it ends the job, or is news for the recovery policy."""
        if not self._recovers:
            self._decide(self._loss(rank))
            return
        self._gone.add(rank)
        self.control.put(UnitVanished(rank, self._vanished(rank)))
        self._end_if_complete()

    def _look_for_returns(self) -> None:
        for key in self._stores.run.keys("back/"):
            raw = self._stores.run.get(key)
            # Any of these: not a unit of this job, or this unit cannot be reached by it. It gets no reply.
            with suppress(StoreError, ConfigError, TransportError):
                unit = self._verifier.verify(raw or b"")
                if unit.word not in self._words and 0 < unit.rank < len(self._hosts.names):
                    self._reach(unit)
                    self._words.add(unit.word)
                    self._gone.add(unit.rank)
                    self.control.put(UnitReturned(unit.rank, unit))

    def _reach(self, unit: NodeInfo) -> None:
        """Listen at an address that other machines reach, if this unit is on one. Raises TransportError."""
        if self._local and unit.machine != self._me.machine and not is_local(self._me.address):
            self.control.listen(self._me.address)
            self._local = False

    def expect(self, hosts: HostMap, ranks: Collection[int]) -> None:
        """Watch these units from now on, and no others."""
        self._hosts = hosts
        self._gone = set(range(len(hosts.names))) - set(ranks)


_OF_A_REPORT = (Started, Serving, StepDone, Skipped, Finished, Metrics, Final, Counted, Apart)


class UnitReport:
    """The events of a unit that a report needs.

    Of repeated events it keeps the last one.
    """

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
