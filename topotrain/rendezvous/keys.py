"""What may be a key and a value in every store, and how a store says that it cannot.

Rule: a key is safe to become a part of a file name, a URL or a command of a server, whatever the store is made of.
"""

import re

MAX_KEY = 200  # characters
MAX_VALUE = 1 << 20  # bytes

_KEY = re.compile(r"[a-z0-9_-][a-z0-9_.-]*(/[a-z0-9_-][a-z0-9_.-]*)*")


class StoreError(Exception):
    """A store that cannot be opened or used; the text is for the user."""


def check_key(key: str) -> None:
    """Raise ValueError when this is no key."""
    if len(key) > MAX_KEY or not _KEY.fullmatch(key):
        rule = "parts of [a-z0-9_.-] joined by '/', none beginning with a dot"
        raise ValueError(f"key = {key!r}: must be {rule}, at most {MAX_KEY} characters")


def check_value(value: bytes) -> None:
    """Raise ValueError when a value is too big."""
    if len(value) > MAX_VALUE:
        raise ValueError(f"value of {len(value)} bytes: at most {MAX_VALUE}")
