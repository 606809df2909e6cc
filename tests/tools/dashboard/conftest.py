"""A browser window for the tests of the page."""

from collections.abc import Iterator

import pytest
from browser import Browser, chromium


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def browser(window: Browser) -> Iterator[Browser]:
    """The window as a reader without wishes has it. What the console complains about fails the test."""
    window.resize(1400, 1000)
    window.prefer(color_scheme="light", reduced_motion="no-preference")
    window.problems()
    yield window
    assert window.problems() == []
