"""What journeys need: a shop that runs jobs, and shells. The forkserver that they share is the session's
(../conftest.py)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from shells import Shells, open_shells
from shop import Shop


@pytest.fixture
def shop(tmp_path: Path, served_at: str) -> Shop:
    return Shop(tmp_path, served_at)


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[Shells]:
    with open_shells(tmp_path) as opened:
        yield opened
