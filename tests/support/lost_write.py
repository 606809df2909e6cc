"""A store of which one operation fails, or loses what it was to write."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from topotrain.comm.store import StoreError
from topotrain.comm.store.file_store import FileStore

WRITES = ("set", "compare_and_set")


def lose_one(
    patch: pytest.MonkeyPatch, part: str, after: int = 0, names: Sequence[str] = WRITES, acts: bool | None = None
) -> list[str]:
    """Let one operation on a key with this part have no effect in stores of files; return the list that gets the key.

    after: operations on such keys before it. acts: it ends with an error instead, and (True) has its effect.
    """
    found: list[str] = []
    left = after

    def once(act: Callable[..., Any]) -> Callable[..., Any]:
        def operation(self: FileStore, key: str, *words: Any) -> Any:
            nonlocal left
            if found or part not in key or left:
                left -= part in key
                return act(self, key, *words)
            found.append(key)
            said = act(self, key, *words) if acts else True
            if acts is not None:
                raise StoreError("the store is full")
            return said

        return operation

    for name in names:
        patch.setattr(FileStore, name, once(getattr(FileStore, name)))
    return found
