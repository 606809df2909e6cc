"""Messages between unit 0 and each other unit while a job runs.

The messages go through the store of the rendezvous, not over connections of their own. All units have the store open,
it checks the writers' access, and it outlives a broken connection. No messages of a unit arrive if it cannot write to
the store, so the two sides of a network partition never make two decisions.

The keys up/R.WORD and down/R.WORD hold the pages of unit R and of unit 0 (see `reliable_messages.py`). A unit that
writes a page for unit 0 also changes the key `bell`. WORD is new for each process that is unit R, so a new process
never reads messages to its predecessor.

* No caller waits for the store.
* A page that could not be written, or that was deleted, is written again every BEAT_S until it is there.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from topotrain.comm.store import Store, StoreError
from topotrain.core.events import Failed
from topotrain.launch.multinode.node_info import NodeInfo
from topotrain.launch.multinode.node_rendezvous import BEAT_S
from topotrain.launch.multinode.reliable_messages import ReliableEnd, Words

_BELL = "bell"


@dataclass(frozen=True, slots=True)
class UnitMessage:
    """Unit `rank` has sent a message."""

    rank: int
    words: Words


@dataclass(frozen=True, slots=True)
class UnitVanished:
    """Unit `rank` has stopped its heartbeat."""

    rank: int
    failed: Failed


@dataclass(frozen=True, slots=True)
class UnitReturned:
    """A new process has joined as unit `rank`, which had vanished."""

    rank: int
    unit: NodeInfo


News = UnitMessage | UnitVanished | UnitReturned


@dataclass(slots=True)
class _Line:
    """The connection to one other unit.

    word: the word of the process that is unit R; on both sides that is the unit other than 0.
    """

    rank: int
    word: str
    ends: ReliableEnd
    written: bytes = b""
    heard: bytes | None = None


class Mailbox:
    """One unit's end of its connections through the store.

    Args:
        run: the keys of this start of the job.
        rank: the rank of this unit.
        words: in unit 0, the word of the process of each other rank; in other units, {0: its own word}.
        away_s: seconds without an answer of the store after which this unit stops waiting for it.
    """

    def __init__(self, run: Store, rank: int, words: Mapping[int, str], away_s: float) -> None:
        self._run, self._rank, self._away_s = run, rank, away_s
        self.suspicious = False
        """A process has lost a peer, so a silent unit counts as gone sooner."""
        self._lines = {other: _Line(other, word, ReliableEnd()) for other, word in words.items()}
        self._lock = threading.Condition()
        self._news: deque[News] = deque()
        self._told, self._teller = socket.socketpair()
        self._closed = False
        self._rung = 0
        self._answered = time.monotonic()
        for work in (self._write, self._read):
            threading.Thread(target=work, name=f"post {work.__name__.strip('_')}s", daemon=True).start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is news."""
        return self._told.fileno()

    @property
    def alone(self) -> bool:
        """Whether the store has not answered for more than `away_s` seconds."""
        return time.monotonic() - self._answered > self._away_s

    @property
    def all_told(self) -> bool:
        """Whether the other units have acknowledged all messages."""
        with self._lock:
            return not any(line.ends.waiting for line in self._lines.values())

    @property
    def others(self) -> list[int]:
        """The ranks of the units that messages can be sent to."""
        with self._lock:
            return sorted(self._lines)

    def say(self, rank: int, words: Words) -> None:
        """Send a message to a unit.

        Does nothing for an unknown rank. The call does not block.
        """
        with self._lock:
            if rank in self._lines:
                self._lines[rank].ends.say(words)
                self._lock.notify_all()

    def news(self) -> list[News]:
        """Return the news since the last call."""
        with self._lock:
            if self._news:
                self._told.recv(4096)
            found = list(self._news)
            self._news.clear()
            return found

    def tell(self, news: News) -> None:
        """Add news from another source than the store's pages."""
        with self._lock:
            self._put(news)

    def open(self, rank: int, word: str) -> None:
        """Connect to a new process of that rank.

        Messages to the former process are dropped.
        """
        with self._lock:
            if rank in self._lines and self._lines[rank].word == word:
                return
            self._lines[rank] = _Line(rank, word, ReliableEnd())
            self._lock.notify_all()

    def close(self) -> None:
        """Stop writing and reading."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            self._told.close()
            self._teller.close()

    def _put(self, news: News) -> None:
        if self._closed:
            return
        if not self._news:
            self._teller.send(b"!")
        self._news.append(news)

    # --- pages

    def _outward(self, line: _Line) -> str:
        return f"up/{self._rank}.{line.word}" if self._rank else f"down/{line.rank}.{line.word}"

    def _inward(self, line: _Line) -> str:
        return f"down/{self._rank}.{line.word}" if self._rank else f"up/{line.rank}.{line.word}"

    def _write(self) -> None:
        """Write the pages to the store, and check every BEAT_S that they are still there."""
        due = time.monotonic() + BEAT_S
        while True:
            with self._lock:
                fresh = [line for line in self._lines.values() if line.ends.fresh]
                if not fresh and not self._closed:
                    self._lock.wait(max(0.0, due - time.monotonic()))
                if self._closed:
                    return
                late = time.monotonic() >= due
                lines = [line for line in self._lines.values() if line.ends.fresh or (late and line.written)]
                pages = [(line, self._page(line)) for line in lines]
            try:
                for line, page in pages:
                    self._bring(line, page)
                self._answered = time.monotonic() if pages else self._answered
            except StoreError:
                with self._lock:
                    for line, page in pages:
                        line.ends.fresh |= line.written != page
                    self._lock.wait(BEAT_S / 4)
            if late:
                due = time.monotonic() + BEAT_S

    def _page(self, line: _Line) -> bytes:
        line.ends.fresh = False
        return line.ends.page()

    def _bring(self, line: _Line, page: bytes) -> None:
        key = self._outward(line)
        if line.written == page and self._run.get(key) == page:
            return
        self._run.set(key, page)
        line.written = page
        if self._rank:
            self._rung += 1
            self._run.set(_BELL, f"{self._rank}.{line.word}.{self._rung}".encode())

    def _read(self) -> None:
        """Read the pages when the bell changes.

        A unit other than 0 reads one page only, and watches it directly. A missed bell costs at most BEAT_S.
        """
        known: bytes | None = None
        while not self._closed:
            with self._lock:
                lines = list(self._lines.values())
            try:
                key = _BELL if self._rank == 0 or not lines else self._inward(lines[0])
                with suppress(TimeoutError):
                    known = self._run.watch(key, BEAT_S, known)
                for line in lines:
                    self._look(line)
                self._answered = time.monotonic()
            except StoreError:
                with self._lock:
                    self._lock.wait(BEAT_S / 4)

    def _look(self, line: _Line) -> None:
        page = self._run.get(self._inward(line))
        if page is None or page == line.heard:
            return
        line.heard = page
        with self._lock:
            if self._lines.get(line.rank) is not line:
                return
            try:
                found = line.ends.read(page)
            except ValueError:  # written by another program; the unit will write its page again
                return
            for words in found:
                self._put(UnitMessage(line.rank, words))
            self._lock.notify_all()
