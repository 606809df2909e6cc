"""Cases that only `make soak` runs: one more layout, moment or library of a contract that another case holds."""

from collections.abc import Sequence
from typing import Any

from seeds import SOAK


def soaked(always: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """Return the cases of `make test`; in the soak the others, too."""
    return [*always, *(more if SOAK else ())]
