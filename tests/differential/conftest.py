"""One warm process for all generated scripts."""

from collections.abc import Iterator

import pytest

from tests.differential.runs import Bench, opened


@pytest.fixture(scope="session")
def bench() -> Iterator[Bench]:
    with opened() as made:
        yield made
