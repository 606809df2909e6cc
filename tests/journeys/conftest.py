"""What journeys need: a shop that runs jobs, and shells. What forks their processes is the session's
(../conftest.py)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from shells import Shells, open_shells
from shop import Shop


@pytest.fixture
def shop(tmp_path: Path, served_at: str, warm_at: str) -> Shop:
    return Shop(tmp_path, served_at, warm_at)


@pytest.fixture
def shells(tmp_path: Path, warm_at: str) -> Iterator[Shells]:
    with open_shells(tmp_path, warm_at) as opened:
        yield opened
