"""Records of the messages of a rehearsal: their sizes, and the moments of each step."""

from collections import defaultdict
from collections.abc import Iterator
from enum import Enum, auto

from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m

_CONTRIBUTIONS = (m.Push, m.BackwardEnd, m.GradientOverride)
_MEANS = (m.ReducedGradient, m.BackwardReduced)

Pair = tuple[Address, Address]
"""Sender and receiver."""


class Moment(Enum):
    """Moments of a worker's step."""

    PUSHED = auto()  # the last gradient is at its server
    REDUCED = auto()  # the last mean has left a server
    MEAN = auto()  # the last mean is at the worker
    COMMITTED = auto()  # the commit is at its server
    ANSWERED = auto()  # the last answer to the commit has left a server


class MessageRecords:
    """The messages of a rehearsal.

    one_group: there is one worker group, so that a step's number names one step of the job.
    """

    def __init__(self, one_group: bool) -> None:
        self._one_group = one_group
        self.sizes: dict[Pair, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        """Bytes of each message with a step's number, by that number."""
        self.others: dict[Pair, list[tuple[float, int]]] = defaultdict(list)
        """Time and bytes of messages without one."""
        self._times: dict[tuple[Moment, Address, int], float] = {}
        self._there: dict[tuple[Moment, int, int], dict[Address, float]] = defaultdict(dict)

    def sent(self, me: Address, to: Address, message: m.Message, nbytes: int, now: float) -> None:
        """A message between two processes is sent."""
        step = _step_of(message)
        between_servers = me.role is to.role is Role.SERVER
        if step is None or (between_servers and not self._one_group):
            self.others[me, to].append((now, nbytes))
        else:
            self.sizes[me, to][step].append(nbytes)

    def left(self, me: Address, to: Address, message: m.Message, now: float) -> None:
        """A message has left its process."""
        step = _step_of(message)
        if step is not None and me.role is Role.SERVER and to.role is Role.WORKER:
            moment = Moment.REDUCED if isinstance(message, _MEANS) else Moment.ANSWERED
            self._times[moment, to, step] = now

    def arrived(self, me: Address, to: Address, message: m.Message, now: float) -> None:
        """A message is at its receiver."""
        step = _step_of(message)
        if step is None:
            return
        if isinstance(message, _MEANS):
            self._times[Moment.MEAN, to, step] = now
        elif me.role is Role.WORKER and isinstance(message, (*_CONTRIBUTIONS, m.Commit)):
            moment = Moment.COMMITTED if isinstance(message, m.Commit) else Moment.PUSHED
            self._times[moment, me, step] = now
            self._there[moment, me.group, step][me] = now

    def exchange(self, me: Address, step: int) -> Iterator[tuple[str, float, Address]]:
        """Yield name, end and process of each part of a worker's exchange; that of a wait is the one it waits for."""
        rounds = (Moment.PUSHED, Moment.REDUCED, Moment.MEAN), (Moment.COMMITTED, Moment.ANSWERED, None)
        for sent, left, here in rounds:
            there = self._there.get((sent, me.group, step))
            yield "push", self._time(sent, me, step), me
            if there:
                who, when = max(there.items(), key=lambda each: each[1])
                yield "wait", when, who
            yield "apply", self._time(left, me, step), me
            if here is not None:
                yield "pull", self._time(here, me, step), me

    def _time(self, moment: Moment, worker: Address, step: int) -> float:
        """Return when a moment of a worker's step was; 0: it has none."""
        return self._times.get((moment, worker, step), 0.0)


def _step_of(message: m.Message) -> int | None:
    """Return the number of the step of a worker group to which a message belongs, or None."""
    if isinstance(message, m.StepDecision) and message.change:
        return None
    step = getattr(message, "step", None)
    if step is None:
        # The values of a step have its number as their round.
        step = getattr(message, "round", None) if isinstance(message, m.Values) else None
    return step if isinstance(step, int) and step >= 0 else None
