"""What every journey needs: a shop that runs jobs. The forkserver that they share is the session's (../conftest.py)."""

from pathlib import Path

import pytest
from shop import Shop


@pytest.fixture
def shop(tmp_path: Path, served_at: str) -> Shop:
    return Shop(tmp_path, served_at)
