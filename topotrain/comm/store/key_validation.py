"""Check keys, values and lifetimes for every store.

A valid key can safely become a part of a file name, of a URL or of a command to a server, whatever the kind of store.
"""

import re

MAX_KEY = 200  # characters
MAX_VALUE = 1 << 20  # bytes
MAX_TTL = 366 * 86_400.0  # seconds

# No part begins with a dot, so no key leads out of a store's folder, as `..` would.
_PART = r"[a-z0-9_-][a-z0-9_.-]*"
_KEY = re.compile(rf"{_PART}(/{_PART})*")
_PREFIX = re.compile(rf"({_PART}/)*({_PART})?")


class StoreError(Exception):
    """A store that cannot be opened or used; the text is for the user."""


def is_key(text: str) -> bool:
    """Return whether this is a valid key."""
    return len(text) <= MAX_KEY and _KEY.fullmatch(text) is not None


def check_key(key: str, name: str = "key") -> None:
    """Raise ValueError unless `key` is a valid key."""
    if not is_key(key):
        rule = "parts of [a-z0-9_.-] joined by '/', none beginning with a dot"
        raise ValueError(f"{name} = {key!r}: must be {rule}, at most {MAX_KEY} characters")


def check_prefix(prefix: str) -> None:
    """Raise ValueError when no key can begin like this. An empty prefix is allowed."""
    if len(prefix) > MAX_KEY or not _PREFIX.fullmatch(prefix):
        raise ValueError(f"prefix = {prefix!r}: must be the beginning of a key")


def check_value(value: bytes) -> None:
    """Raise ValueError when a value is larger than MAX_VALUE bytes."""
    if len(value) > MAX_VALUE:
        raise ValueError(f"value of {len(value)} bytes: at most {MAX_VALUE}")


def check_ttl(ttl: float | None) -> int:
    """Return `ttl` in whole milliseconds, 0 for None. Raises ValueError."""
    if ttl is None:
        return 0
    if not 0 < ttl <= MAX_TTL:
        raise ValueError(f"ttl = {ttl!r}: must be above 0 and at most {MAX_TTL:.0f} seconds, or None")
    # 0 would mean that the value stays.
    return max(1, round(ttl * 1000))
