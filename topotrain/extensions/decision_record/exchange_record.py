"""The choices of a worker between two rounds, written down and made again.

They are few: a worker of a job without an outer optimizer makes none.
"""

from collections import deque
from collections.abc import Iterator
from enum import IntEnum

from topotrain.config.job import ConfigError
from topotrain.extensions.decision_record.order_entries import ByteReader, varint
from topotrain.extensions.decision_record.recording_server import RecordingSink
from topotrain.extensions.outer_optimizer.exchange_choices import ExchangeChoices


class ExchangeKind(IntEnum):
    """The kinds of choices, by the number in their bytes."""

    PUSH = 0
    TAKE = 1
    FRAGMENT = 2
    COPY = 3


class RecordedExchanges(ExchangeChoices):
    """Writes the choices of one worker's process down. sink: takes the bytes."""

    def __init__(self, sink: RecordingSink) -> None:
        self._sink = sink
        self._asked = (0, False)  # step, and whether the worker pushes behind it

    def pushes(self, step: int, now: bool) -> bool:
        # A message may come between two questions about one step, and both must get one answer.
        if self._asked[0] != step:
            self._asked = step, now
            if now:
                self._write(step, ExchangeKind.PUSH)
        return self._asked[1]

    def takes(self, step: int, now: bool) -> bool:
        if now:
            self._write(step, ExchangeKind.TAKE)
        return now

    def fragment(self, step: int, now: int) -> int:
        self._write(step, ExchangeKind.FRAGMENT, now)
        return now

    def copies(self, now: int) -> int:
        self._write(now, ExchangeKind.COPY)
        return now

    def _write(self, step: int, kind: ExchangeKind, *more: int) -> None:
        self._sink.write(b"".join(map(varint, (step << 2 | kind, *more))))


class ReplayedExchanges(ExchangeChoices):
    """Makes the recorded choices of one worker's process.

    data: its bytes. whole: the process has come to its end in the recording. name: of the worker, for errors.
    """

    def __init__(self, data: bytes, whole: bool, name: str) -> None:
        choices = list(decode_choices(data))
        # The thread of a connection copies, between any two choices of the script's thread.
        self._copies = deque(step for step, kind, _ in choices if kind == ExchangeKind.COPY)
        self._choices = deque(choice for choice in choices if choice[1] != ExchangeKind.COPY)
        self._copied = frozenset(self._copies)
        self._whole, self._name = whole, name
        self._asked = (0, False)

    def pushes(self, step: int, now: bool) -> bool:
        if self._asked[0] != step:
            self._asked = step, self._is_next(step, ExchangeKind.PUSH)
        return self._asked[1]

    def takes(self, step: int, now: bool) -> bool:
        return self._is_next(step, ExchangeKind.TAKE)

    def fragment(self, step: int, now: int) -> int:
        """As `ExchangeChoices.fragment`.

        Raises ConfigError for a push that the recording does not have.
        """
        if not self._choices and not self._whole:
            return now  # in the recording the process has died before
        found = self._choices.popleft() if self._choices else None
        if found is None or found[:2] != (step, ExchangeKind.FRAGMENT):
            wanted = "the end of its script" if found is None else f"a choice behind step {found[0]}"
            accepted = f"is not what the recording has, which is {wanted}"
            raise ConfigError(f"replay: step {step} of {self._name}", "a push", accepted)
        return found[2]

    def copies(self, now: int) -> int:
        return self._copies.popleft() if self._copies else now

    def is_copied(self, step: int) -> bool:
        return step in self._copied

    def _is_next(self, step: int, kind: ExchangeKind) -> bool:
        if self._choices and self._choices[0][:2] == (step, kind):
            self._choices.popleft()
            return True
        return False


def decode_choices(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (step, kind, fragment) of each choice in the bytes of a worker.

    A choice that is cut off at the end is left out.

    Raises:
        ValueError: these are no choices.
    """
    reader = ByteReader(data)
    try:
        while not reader.over:
            first = reader.number()
            kind = ExchangeKind(first & 3)
            yield first >> 2, kind, reader.number() if kind is ExchangeKind.FRAGMENT else 0
    except EOFError:
        return
