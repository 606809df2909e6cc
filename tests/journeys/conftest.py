"""What every journey needs: a shop that runs jobs, with torch loaded once for all of them."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from shop import Shop

from topotrain.launch import forkserver


@pytest.fixture(scope="session")
def served_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("forkserver") / "forkserver.log"
    with closing(forkserver.start(log)) as served:
        yield served.path


@pytest.fixture
def shop(tmp_path: Path, served_at: str) -> Shop:
    return Shop(tmp_path, served_at)
