"""Cases that only `make soak` runs: one more layout, moment or library of a contract that another case holds."""

from collections.abc import Sequence
from typing import Any

import pytest
from seeds import SOAK

soak_only = pytest.mark.skipif(not SOAK, reason="runs in `make soak`")


def soaked(always: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """Return the cases of `make test`; in the soak the others, too."""
    return [*always, *(more if SOAK else ())]
