"""Reliable messages between two units: numbered, in order, exactly once.

Each end writes one page. It holds the messages that the other end has not acknowledged yet, and the number of the last
message that this end has received. Delivery is in order and exactly once. Pages may be rewritten, lost, or read late or
twice. The module is pure: it does no I/O and reads no clock.
"""

import json
from collections.abc import Mapping
from typing import Any

PAGE_BYTES = 1 << 19
"""The limit of a page. Further messages wait for the next page."""
_TEXT = 20_000  # the last characters of an event's text are the most useful ones

Words = Mapping[str, Any]


class ReliableEnd:
    """One end of a connection between two units."""

    def __init__(self) -> None:
        self._said: list[tuple[int, Words]] = []
        self._number = 0
        self._heard = 0
        self.fresh = True
        """Whether the page has data that was not written yet."""

    @property
    def waiting(self) -> bool:
        """Whether some messages are not acknowledged yet."""
        return bool(self._said)

    def say(self, words: Words) -> None:
        """Add a message to the page.

        It stays there until it is acknowledged.
        """
        self._number += 1
        self._said.append((self._number, words))
        self.fresh = True

    def page(self) -> bytes:
        """Return the page for the other end."""
        lines: list[str] = []
        room = PAGE_BYTES
        for number, words in self._said:
            line = json.dumps([number, words], separators=(",", ":"))
            room -= len(line)
            if room < 0 and lines:
                break
            lines.append(line)
        return f'{{"heard":{self._heard},"said":[{",".join(lines)}]}}'.encode()

    def read(self, page: bytes) -> list[Words]:
        """Return the new messages on the other end's page.

        Raises ValueError for a page that cannot be read.
        """
        try:
            data = json.loads(page)
            heard, said = int(data["heard"]), [(int(number), dict(words)) for number, words in data["said"]]
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a page: {error}") from None
        left = [(number, words) for number, words in self._said if number > heard]
        more = len(left) < len(self._said) and bool(left)  # messages that did not fit may fit now
        self._said = left
        found: list[Words] = []
        for number, words in sorted(said, key=lambda each: each[0]):
            if number == self._heard + 1:
                self._heard = number
                found.append(words)
        self.fresh |= bool(found) or more
        return found


def shortened(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with long texts cut to their ends."""
    return {key: value[-_TEXT:] if isinstance(value, str) else value for key, value in values.items()}
