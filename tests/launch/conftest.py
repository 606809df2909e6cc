"""The mark of the processes that a test of the launch package starts."""

import uuid
from collections.abc import Iterator

import pytest

from tests.support.launch_targets import MARK, marked, wait_for

GONE_S = 5.0


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The processes that the test starts carry the mark; none of them is left at the end."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield mark
    wait_for(lambda: marked(mark) == [], GONE_S)
