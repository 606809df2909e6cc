"""What two units say to each other while a job runs, so that each word is heard once: numbers, and what was heard last.

Rule: pure. Each end has one page, which it alone writes: its words that the other end has not acknowledged yet, and the
number of the last one that it has heard itself. A page may be written again as often as one likes, may be lost, and may
be read twice or late: a word is heard once, in order, or its page is still to come.
"""

import json
from collections.abc import Mapping
from typing import Any

PAGE_BYTES = 1 << 19
"""What does not fit waits for the next page."""
_TEXT = 20_000  # bytes of an event's text, the end of which says most

Words = Mapping[str, Any]


class ReliableEnd:
    """One end of a line between two units."""

    def __init__(self) -> None:
        self._said: list[tuple[int, Words]] = []
        self._number = 0
        self._heard = 0
        self.fresh = True
        """The page has something that the other end was not told before."""

    @property
    def waiting(self) -> bool:
        """Something was said of which it is not known that it was heard."""
        return bool(self._said)

    def say(self, words: Words) -> None:
        """Put a word on the page; it stays there until it was heard."""
        self._number += 1
        self._said.append((self._number, words))
        self.fresh = True

    def page(self) -> bytes:
        """What the other end is to read."""
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
        """What is new on the other end's page. Raises ValueError for a page that cannot be read."""
        try:
            data = json.loads(page)
            heard, said = int(data["heard"]), [(int(number), dict(words)) for number, words in data["said"]]
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"no page: {error}") from None
        left = [(number, words) for number, words in self._said if number > heard]
        more = len(left) < len(self._said) and bool(left)  # what had no room has it now
        self._said = left
        found: list[Words] = []
        for number, words in sorted(said, key=lambda each: each[0]):
            if number == self._heard + 1:
                self._heard = number
                found.append(words)
        self.fresh |= bool(found) or more
        return found


def shortened(values: dict[str, Any]) -> dict[str, Any]:
    """The same with the end of each text that is too long for a letter."""
    return {key: value[-_TEXT:] if isinstance(value, str) else value for key, value in values.items()}
