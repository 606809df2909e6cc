"""The units of a job that run elsewhere, as one unit sees them: who lives, and how the job ends.

Rule: a job ends once, by compare-and-set on `end`, with the first cause. Whoever has lost a peer waits for a better
reason first, and where none comes looks who is missing. The store decides nothing while training goes on: when it is
away the job goes on, and only who stays silent for LOST_S though the store is there ends it.
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
"""A unit that was silent for so long is gone, whatever its peers have noticed."""
STORE_LOST_S = 5.0
"""Unit 0 is gone when the store that it serves was away for so long."""
AWAY_S = 15.0
"""So long a unit whose part has ended well waits for a store that is away, to hear how the others have ended."""
_PATIENCE_S: Mapping[str, float] = MappingProxyType({"internal": 1.5, "peer": ALIVE_S + 1.0})
"""How long a failure of a kind that may have a cause elsewhere waits for it."""
_WATCH_S = 5.0
_TELL_EVERY_S = 5.0  # between two signs of life in the registry
_LOOK_S = 0.1
SAVE = "save"  # where a unit that is asked to end asks for a last snapshot


@dataclass(frozen=True, slots=True)
class StoreKeys:
    """The keys of this start of the job, those of the job, and its entry among all jobs, in the whole store."""

    run: Store
    shared: Store
    registry: Registry
    record: JobRecord


class NodeMembership:
    """See `run_loop.NodeMembership`.

    Args:
        stores: what to watch.
        rank: of this unit.
        hosts: where all units are.
        leads: the first server is in this unit, or this one knows where it is: it has the last snapshot taken where
            another unit is asked to end.
        lines: where the job goes on when processes die, see `Mailbox`; None: the loss of a unit ends it.
        hear: reads the introduction of a unit that has come back.
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
        """Who lives in which unit, where this one knows what the others say."""
        self._gone: set[int] = set()  # units that are not looked after
        self._words: set[str] = set()  # of units that came back, once known
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
        """See `run_loop.NodeMembership`."""
        return self._told.fileno()

    @property
    def over(self) -> bool:
        """See `run_loop.NodeMembership`."""
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
        """See `run_loop.NodeMembership`."""
        with self._lock:
            first, self._cause = self._cause is None, cause
        if first:
            self._start(self._explain)

    @property
    def saves(self) -> bool:
        """See `run_loop.NodeMembership`."""
        return self._leads and self._asked is not None

    def heard(self) -> None:
        """See `run_loop.NodeMembership`."""
        self._told.recv(64)

    def save(self, number: int) -> None:
        """See `run_loop.NodeMembership`."""
        self._asked = end = self._by_signal(number)
        self._start(lambda: self._ask_to_save(end))

    def _ask_to_save(self, end: JobEnd) -> None:
        with suppress(StoreError):  # then the job ends without it, when there was time enough
            self._stores.run.compare_and_set(SAVE, None, end.dumped())
        self._kept.keep(SAVE, end.dumped())

    def _by_signal(self, number: int) -> JobEnd:
        name = "SIGINT" if number == 2 else "SIGTERM" if number == 15 else f"signal {number}"
        return JobEnd(
            128 + number, self._rank, self._name, text=f"ended by {name} to unit {self._rank} on {self._name}"
        )

    def signalled(self, number: int, more: str = "") -> None:
        """See `run_loop.NodeMembership`."""
        end = self._asked or self._by_signal(number)
        end = replace(end, text=f"{end.text}; {more}") if more else end
        self._start(lambda: self._decide(end))

    def wait(self, seconds: float) -> JobEnd | None:
        """The end, if it is decided in time."""
        self._decided.wait(seconds)
        return self.end

    def _explain(self) -> None:
        """Wait as long as the cause deserves for one that explains it, then make it the job's."""
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
        """A unit that gives no sign of life; with the store that it served, unit 0."""
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
        """Make it the end of the job, if it has none yet."""
        try:
            if self._stores.run.compare_and_set("end", None, end.dumped()):
                self._deliver_decided(end.dumped())
            else:
                self._deliver_decided(self._stores.run.get("end") or b"")
        except StoreError:
            self._deliver(end)  # nobody else can be asked

    def _deliver_decided(self, raw: bytes) -> None:
        """The end as it is in the store, and stays until this unit leaves: others may not have heard of it."""
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
        """Unit 0 looks after everybody and hears the user; the others look after unit 0."""
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
            if now - asked > BEAT_S:  # the store was away, for others as well: silence counts from here on
                self._silent.clear()
            if there:
                self._silent.pop(rank, None)
            elif now - self._silent.setdefault(rank, now) >= self._patience_s(rank):
                self._lose(rank)

    def _patience_s(self, rank: int) -> float:
        return 0.0 if rank and self.post is not None and self.post.suspicious else LOST_S

    def _lose(self, rank: int) -> None:
        """A unit is gone: that ends the job, or is for unit 0 to judge."""
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
            with suppress(StoreError, ConfigError):  # a stranger, or one that has another job in mind: it hears nothing
                unit = self._hear(raw or b"")
                if unit.word not in self._words and 0 < unit.rank < len(self._hosts.names):
                    self._words.add(unit.word)
                    self._gone.add(unit.rank)
                    self.post.tell(UnitReturned(unit.rank, unit))

    def expect(self, hosts: HostMap, ranks: Collection[int]) -> None:
        """By unit 0: these units, which are there, are looked after from now on, and no others."""
        self._hosts = hosts
        self._gone = set(range(len(hosts.names))) - set(ranks)
        self._silent.clear()

    def cast_out(self) -> None:
        """The others go on without this unit, which they have not heard for too long."""
        text = f"the job goes on without unit {self._rank} on {self._name}, which was not heard of for too long"
        self._deliver(JobEnd(1, self._rank, self._name, text=text))

    def nobody_came(self, rank: int, seconds: float, more: str) -> None:
        """A unit that had vanished did not come back: that ends the job; does not wait."""
        lost = self._vanished(rank)
        text = f"{lost.text}, and within {seconds:g} s none was started in its place{more}"
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
        """This unit's part ended well. When all have, unit 0 ends the job; does not wait."""
        self.reports[self._rank] = list(events)
        self._start(self._collect if self._rank == 0 else self._report)

    def _report(self) -> None:
        """Until the end is known: what is told once might be wiped out with the store."""
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
        """All is well here, and nobody says how it is elsewhere."""
        if time.monotonic() - answered > AWAY_S:
            text = f"the store was away for {AWAY_S:g} s at the end, so how the other units ended is not known here"
            self._deliver(JobEnd(0, text=text))

    def leave(self, state: str) -> None:
        """By unit 0: note in the registry how the job ended. Raises StoreError."""
        self._kept.close()  # or what is removed after this would be written again
        self._stores.registry.keep(self._stores.record)
        self._stores.registry.end(self._stores.record.id, state)


class UnitReport:
    """Keeps what a report needs of one unit's events: the last of what repeats, and all that does not."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Event] = {}

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, Started | Serving | StepDone | Skipped | Finished | Metrics | Final):
            self._last[(type(event).__name__, getattr(event, "who", ""))] = event

    @property
    def events(self) -> list[Event]:
        """In an order in which they may have happened."""
        return list(self._last.values())
