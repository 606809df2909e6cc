"""Membership of a job's units, as one unit sees it: liveness and the job's end.

* A job ends once, by compare-and-set on the key `end`, with the first cause.
* A unit with a connection error first waits for a better cause. Without one it looks for a unit without a heartbeat.
* The store decides nothing during training. The job continues while the store is unavailable. Only a unit that stays
  silent for LOST_S while the store is available ends the job.
"""

import json
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
from topotrain.launch.multinode.mailbox import Mailbox, UnitReturned, UnitVanished
from topotrain.launch.multinode.node_info import HostMap, JobEnd, NodeInfo
from topotrain.launch.multinode.node_rendezvous import ALIVE_S, BEAT_S

LOST_S = 10.0
"""Seconds of silence after which a unit is gone, regardless of its peers."""
STORE_LOST_S = 5.0
"""Seconds without the store after which unit 0, which serves it, is gone."""
AWAY_S = 15.0
"""Seconds for which a finished unit waits for an unavailable store, to learn how the others have ended."""
_PATIENCE_S: Mapping[str, float] = MappingProxyType({"internal": 1.5, "peer": ALIVE_S + 1.0})
"""Seconds for which a failure waits for its cause, by kinds of failure that may have one elsewhere."""
_WATCH_S = 5.0
_TELL_EVERY_S = 5.0  # between two updates of the registry
_LOOK_S = 0.1
SAVE = "save"  # the key by which a unit that is to end asks for a last snapshot


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
    """The other units of the job; it implements `job_shutdown.OtherUnits`.

    Args:
        stores: the store's keys.
        rank: the rank of this unit.
        hosts: the hosts of all units.
        leads: this unit has the first server, or knows where it is. So it requests the last snapshot when another unit
            is asked to end.
        lines: the words for a `Mailbox`, where the job survives process deaths. None: the loss of a unit ends the job.
        hear: reads the description of a unit that rejoins.
    """

    def __init__(
        self,
        stores: StoreKeys,
        rank: int,
        hosts: HostMap,
        leads: bool = False,
        lines: Mapping[int, str] | None = None,
        hear: Callable[[bytes], NodeInfo] = NodeInfo.loaded,
    ) -> None:
        self._stores, self._rank, self._hosts, self._leads, self._hear = stores, rank, hosts, leads, hear
        self._kept = MaintainedValues(stores.run)
        self.post = None if lines is None else Mailbox(stores.run, rank, lines, AWAY_S)
        self.where: Mapping[str, int] = {}
        """The unit of each process, where this unit receives the events of the others."""
        self._gone: set[int] = set()  # units without a check of their heartbeat
        self._words: set[str] = set()  # of units that rejoined and were reported
        self._asked: JobEnd | None = None
        self._told, self._teller = socket.socketpair()
        self._lock = threading.Lock()
        self._cause: Failed | None = None
        self._closed = threading.Event()
        self._decided = threading.Event()
        self.end: JobEnd | None = None
        self.reports: dict[int, list[Event]] = {}
        self._silent: dict[int, float] = {}
        self._beaten = 0.0
        self._answered = time.monotonic()
        for work in (self._watch, self._look):
            self._start(work)

    def fileno(self) -> int:
        """Return a descriptor that is readable when the end of the job is decided."""
        return self._told.fileno()

    @property
    def over(self) -> bool:
        """Whether the end of the job is decided."""
        return self.end is not None

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._decided.set()
        self._kept.close()
        if self.post is not None:
            self.post.close()
        with self._lock:
            self._told.close()
            self._teller.close()

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=work.__name__.strip("_"), daemon=True).start()

    @property
    def _name(self) -> str:
        return self._hosts.names[self._rank]

    # --- how it ends

    def tell(self, cause: Failed) -> None:
        """Report why the job cannot go on here.

        The call does not block.
        """
        with self._lock:
            first, self._cause = self._cause is None, cause
        if first:
            self._start(self._explain)

    @property
    def saves(self) -> bool:
        """Whether the job is to end after a last snapshot that this unit requests."""
        return self._leads and self._asked is not None

    def heard(self) -> None:
        """Clear the event for which `fileno` became readable."""
        self._told.recv(64)

    def save(self, number: int) -> None:
        """Report that a signal asks the job to end after a last snapshot.

        The call does not block.
        """
        self._asked = end = self._by_signal(number)
        self._start(lambda: self._ask_to_save(end))

    def _ask_to_save(self, end: JobEnd) -> None:
        with suppress(StoreError):  # without the store the job ends when the grace period is over
            self._stores.run.compare_and_set(SAVE, None, end.dumped())
        self._kept.keep(SAVE, end.dumped())

    def _by_signal(self, number: int) -> JobEnd:
        name = "SIGINT" if number == 2 else "SIGTERM" if number == 15 else f"signal {number}"
        return JobEnd(
            128 + number, self._rank, self._name, text=f"ended by {name} to unit {self._rank} on {self._name}"
        )

    def signalled(self, number: int, more: str = "") -> None:
        """Report that a signal asks the job to end.

        The call does not block. more: text to add to the report.
        """
        end = self._asked or self._by_signal(number)
        end = replace(end, text=f"{end.text}; {more}") if more else end
        self._start(lambda: self._decide(end))

    def wait(self, seconds: float) -> JobEnd | None:
        """Return the end of the job if it is decided in time, else None."""
        self._decided.wait(seconds)
        return self.end

    def _explain(self) -> None:
        """Wait for a better cause, then end the job with the best known one.

        The time limit depends on the kind of failure.
        """
        began = time.monotonic()
        while not self._decided.is_set():
            assert self._cause is not None
            cause = self._cause
            gone = self._silent_one() if cause.kind == "peer" else None
            if gone is not None:
                self._decide(JobEnd.of(self._vanished(gone), gone, self._hosts.names[gone]))
                return
            if time.monotonic() - began >= _PATIENCE_S.get(cause.kind, 0.0):
                rank = self.where.get(cause.who, self._rank)
                self._decide(JobEnd.of(cause, rank, self._hosts.names[rank]))
                return
            self._decided.wait(_LOOK_S)

    def _silent_one(self) -> int | None:
        """Return a unit without a heartbeat; None if there is none.

        It is unit 0 if the store that unit 0 serves is gone.
        """
        try:
            living = set(self._stores.run.keys("alive/"))
        except StoreError:
            return 0 if self._hosts.served and self._rank else None
        return next((rank for rank in range(len(self._hosts.names)) if f"alive/{rank}" not in living), None)

    def _vanished(self, rank: int) -> Failed:
        with_store = ", and the store with it" if self._hosts.served and rank == 0 else ""
        text = f"unit {rank} on {self._hosts.names[rank]} vanished without a word{with_store}"
        return Failed(f"unit {rank}", "died", text, "")

    def _decide(self, end: JobEnd) -> None:
        """Set the end of the job, unless it is decided already."""
        try:
            if self._stores.run.compare_and_set("end", None, end.dumped()):
                self._deliver_decided(end.dumped())
            else:
                self._deliver_decided(self._stores.run.get("end") or b"")
        except StoreError:
            self._deliver(end)  # no other unit can be asked

    def _deliver_decided(self, raw: bytes) -> None:
        """Deliver the end that the store has.

        It is kept in the store until this unit leaves, because other units may not have read it.
        """
        self._kept.keep("end", raw)
        self._deliver(JobEnd.loaded(raw))

    def _deliver(self, end: JobEnd) -> None:
        with self._lock:
            if self.end is None and not self._closed.is_set():
                self.end = end
                self._teller.send(b"!")
        self._decided.set()

    # --- watching

    def _watch(self) -> None:
        while not self._decided.is_set():
            try:
                self._deliver_decided(self._stores.run.watch("end", _WATCH_S))
            except TimeoutError:
                continue
            except StoreError:
                self._decided.wait(BEAT_S)

    def _look(self) -> None:
        """Watch heartbeats until the job ends.

        Unit 0 watches all units, and also the user's request to stop. The others watch unit 0.
        """
        while not self._decided.wait(BEAT_S):
            try:
                if self._rank == 0:
                    self._listen()
                    self._look_for_returns()
                if self._leads and self._asked is None:
                    self._look_for_save()
                self._look_after(range(len(self._hosts.names)) if self._rank == 0 else (0,))
                self._answered = time.monotonic()
            except StoreError:
                self._silent.clear()
                if self._rank and self._hosts.served and time.monotonic() - self._answered > STORE_LOST_S:
                    self._deliver(JobEnd.of(self._vanished(0), 0, self._hosts.names[0]))

    def _look_for_save(self) -> None:
        word = self._stores.run.get(SAVE)
        with self._lock:
            if word is not None and self._asked is None and not self._closed.is_set():
                self._asked = JobEnd.loaded(word)
                self._teller.send(b"!")

    def _look_after(self, ranks: Sequence[int]) -> None:
        for rank in [rank for rank in ranks if rank not in self._gone]:
            asked = time.monotonic()
            there = rank == self._rank or self._stores.run.get(f"alive/{rank}") is not None
            now = time.monotonic()
            if now - asked > BEAT_S:  # the store was unavailable, for others too: restart the timers
                self._silent.clear()
            if there:
                self._silent.pop(rank, None)
            elif now - self._silent.setdefault(rank, now) >= self._patience_s(rank):
                self._lose(rank)

    def _patience_s(self, rank: int) -> float:
        return 0.0 if rank and self.post is not None and self.post.suspicious else LOST_S

    def _lose(self, rank: int) -> None:
        """Handle the loss of a unit.

        It ends the job, or unit 0 decides about it.
        """
        if self.post is None or rank == 0:
            self._decide(JobEnd.of(self._vanished(rank), rank, self._hosts.names[rank]))
        else:
            self._gone.add(rank)
            self.post.tell(UnitVanished(rank, self._vanished(rank)))

    def _look_for_returns(self) -> None:
        if self.post is None:
            return
        for key in self._stores.run.keys("back/"):
            raw = self._stores.run.get(key)
            with suppress(StoreError, ConfigError):  # not a unit of this job: it gets no reply
                unit = self._hear(raw or b"")
                if unit.word not in self._words and 0 < unit.rank < len(self._hosts.names):
                    self._words.add(unit.word)
                    self._gone.add(unit.rank)
                    self.post.tell(UnitReturned(unit.rank, unit))

    def expect(self, hosts: HostMap, ranks: Collection[int]) -> None:
        """Watch these units from now on, and no others. Only for unit 0."""
        self._hosts = hosts
        self._gone = set(range(len(hosts.names))) - set(ranks)
        self._silent.clear()

    def cast_out(self) -> None:
        """End this unit: the others continue without it after its long silence."""
        text = f"the job goes on without unit {self._rank} on {self._name}, which was silent for too long"
        self._deliver(JobEnd(1, self._rank, self._name, text=text))

    def nobody_came(self, rank: int, seconds: float, more: str) -> None:
        """End the job because no replacement of a vanished unit joined.

        The call does not block.
        """
        lost = self._vanished(rank)
        text = f"{lost.text}, and within {seconds:g} s no replacement was started{more}"
        end = JobEnd.of(replace(lost, text=text), rank, self._hosts.names[rank])
        self._start(lambda: self._decide(end))

    def _listen(self) -> None:
        if self._stores.shared.get("stop") is not None:
            self._decide(JobEnd(130, text="stopped by `topotrain jobs stop`"))
        if time.monotonic() - self._beaten > _TELL_EVERY_S:
            self._stores.registry.keep(self._stores.record)
            self._beaten = time.monotonic()

    # --- a good end

    def finish(self, events: Sequence[Event]) -> None:
        """Report that this unit ended well.

        When all have, unit 0 ends the job. The call does not block.
        """
        self.reports[self._rank] = list(events)
        self._start(self._collect if self._rank == 0 else self._report)

    def _report(self) -> None:
        """Keep the report in the store until the end is known.

        A report that is written once might be lost with the store.
        """
        key, raw = f"report/{self._rank}", json.dumps([to_json(event) for event in self.reports[self._rank]]).encode()
        answered = self._answered
        while not self._decided.is_set():
            try:
                if self._stores.run.get(key) is None:
                    self._stores.run.set(key, raw)
                answered = time.monotonic()
            except StoreError:
                self._end_alone(answered)
            self._decided.wait(BEAT_S)

    def _collect(self) -> None:
        answered = self._answered
        for rank in range(1, len(self._hosts.names)):
            while rank not in self.reports and rank not in self._gone:
                if self._decided.is_set():
                    return
                try:
                    raw = self._stores.run.watch(f"report/{rank}", BEAT_S)
                    self.reports[rank] = [from_json(line) for line in json.loads(raw)]
                except TimeoutError:
                    answered = time.monotonic()
                except StoreError:
                    self._end_alone(answered)
                    self._decided.wait(BEAT_S)
        self._decide(JobEnd(0))

    def _end_alone(self, answered: float) -> None:
        """End well without the reports of the others if the store stays away."""
        if time.monotonic() - answered > AWAY_S:
            text = f"the store was unavailable for {AWAY_S:g} s at the end, so the end of the other units is unknown"
            self._deliver(JobEnd(0, text=text))

    def leave(self, state: str) -> None:
        """Record in the registry how the job ended. Only for unit 0.

        Raises StoreError.
        """
        self._kept.close()  # otherwise removed keys would be written again
        self._stores.registry.keep(self._stores.record)
        self._stores.registry.end(self._stores.record.id, state)


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
