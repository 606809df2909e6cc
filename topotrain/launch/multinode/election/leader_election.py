"""The election of the unit that leads a job: a record with a term and a lease.

The record changes by compare-and-set only. The leader renews it; a record that stays the same for a whole lease, by
the clock of the reader alone, belongs to a leader that is gone. Then any unit may write itself into the record, with
the next term.

* At most one unit leads in a term: a compare-and-set that would make a second one finds another record.
* A leader that could not renew its lease no longer holds it before any other unit may be elected.
* A unit accepts a leader of a higher term than it knows, and never returns to a lower one. So decisions of a former
  leader are refused by every unit that knows of its successor.
* Clocks of different hosts are never compared.

This module is pure: it does no I/O, and receives the time.
"""

import json
from dataclasses import asdict, dataclass

KEY = "leader"
"""The store's key of the record, among the keys of a start of the job."""
FIRST_TERM = 1
"""The term of the unit that has opened the job."""
SHARE = 0.75
"""The part of the lease that a leader uses. The rest is a margin for clocks of different speed."""


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """The unit that leads, as it is in the store.

    term: counted over the job. rank, word: of the unit, and of its process. url: where units connect to it.
    beat: how often the lease was renewed. end: how the job ends; "" until that is decided.
    """

    term: int
    rank: int
    word: str
    url: str
    beat: int = 0
    end: str = ""

    def dumped(self) -> bytes:
        """Serialize for the store."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def loaded(raw: bytes | None) -> "LeaderRecord | None":
        """Deserialize the result of `dumped`; None where there is no such record."""
        try:
            data = json.loads(raw or b"")
            record = LeaderRecord(**data)
            numbers = (record.term, record.rank, record.beat)
            texts = (record.word, record.url, record.end)
        except (ValueError, TypeError):
            return None
        right = all(type(number) is int for number in numbers) and all(isinstance(text, str) for text in texts)
        return record if right else None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A compare-and-set of the record. asked_at: when it was made."""

    expected: bytes | None
    record: LeaderRecord
    asked_at: float


class LeaderElection:
    """The leader, as one unit knows it.

    Args:
        rank, word: of this unit, and of its process.
        lease_s: seconds after which an unchanged record belongs to a leader that is gone.
        leads: this unit has opened the job, and leads in its first term.
        now: the time.
    """

    def __init__(self, rank: int, word: str, lease_s: float, leads: bool, now: float) -> None:
        self._rank, self._word, self._lease_s = rank, word, lease_s
        self.term, self.leader = FIRST_TERM, 0
        """The highest term that this unit knows, and the rank of its leader; -1: it has none."""
        self.leads = leads
        self.end = ""
        """How the job ends, as the record says; "" until that is decided. Nothing is decided after it."""
        self._beat = 0
        self._raw: bytes | None = None
        self._since: float | None = None  # when the record was first read as it is; None: it has not been read
        self._renewed_at = now
        self._tried: Proposal | None = None  # it may have been carried out although no reply came

    def on_read(self, raw: bytes | None, now: float) -> bool:
        """Record what the store has; return whether the leader has changed for this unit."""
        if self._since is None or raw != self._raw:
            self._raw, self._since = raw, now
        tried, self._tried = self._tried, None
        if tried is not None and raw == tried.record.dumped():
            return self._accept(tried)
        record = LeaderRecord.loaded(raw)
        if record is None or record.term < self.term:
            return False
        self.end = self.end or record.end
        mine = (record.rank, record.word) == (self._rank, self._word)
        # A leader also yields to another one of its own term, which exists only if the store has lost its data.
        if mine or (record.term == self.term and not self.leads):
            return False
        self.term, self.leader, self.leads = record.term, record.rank, False
        return True

    def on_failure(self) -> None:
        """Record that the store did not answer."""
        # The leader may not reach the store either, so the lease counts from the next read on.
        self._since = None

    def proposal(self, url: str, silent: bool, now: float, end: str = "") -> Proposal | None:
        """Return the compare-and-set that is due, if one is.

        url: where units connect to this one if it leads. silent: nothing arrives from the leader.
        end: how the job ends, if this unit leads and has decided it.
        """
        if self.leads:
            self._beat += 1
            record = LeaderRecord(self.term, self._rank, self._word, url, self._beat, self.end or end)
        elif silent and self.may_campaign(now):
            record = LeaderRecord(self.term + 1, self._rank, self._word, url)
        else:
            return None
        self._tried = Proposal(self._raw, record, now)
        return self._tried

    def may_campaign(self, now: float) -> bool:
        """Return whether the lease of the leader has expired."""
        return not (self.leads or self.end or self._since is None) and now - self._since >= self._lease_s

    def on_written(self, proposal: Proposal, now: float) -> bool:
        """Record that a proposal was carried out; return whether this unit now leads."""
        self._raw, self._since, self._tried = proposal.record.dumped(), now, None
        return self._accept(proposal)

    def on_refused(self) -> None:
        """Record that a proposal was not carried out, because the record was another one."""
        self._tried = None

    def _accept(self, proposal: Proposal) -> bool:
        elected = not self.leads
        self.term, self.leader, self.leads = proposal.record.term, self._rank, True
        # From before the request: others may have read the record at any time since.
        self._renewed_at, self._beat = proposal.asked_at, proposal.record.beat
        self.end = proposal.record.end
        return elected

    def holds_lease(self, now: float) -> bool:
        """Return whether this unit leads, and no other unit can have been elected."""
        return self.leads and now - self._renewed_at < SHARE * self._lease_s

    def may_decide(self, now: float) -> bool:
        """Return whether this unit may send a decision.

        It holds its lease, or the store is away for it. While the store is away, units that hear from this one elect no
        other leader.
        """
        return self.leads and (self.holds_lease(now) or self.store_is_away)

    @property
    def store_is_away(self) -> bool:
        """Whether the store did not answer the last time."""
        return self._since is None

    def step_down(self) -> None:
        """Stop leading. This unit follows the next leader, or is elected again."""
        self.leads, self.leader = False, -1
        self._since = self._tried = None
