"""One warm process for all generated scripts of a kind."""

from collections.abc import Iterator

import pytest

from tests.differential.runs import Bench, opened


@pytest.fixture(scope="session")
def bench() -> Iterator[Bench]:
    with opened() as made:
        yield made


@pytest.fixture(scope="session")
def library_bench() -> Iterator[Bench]:
    with opened("library") as made:
        yield made
