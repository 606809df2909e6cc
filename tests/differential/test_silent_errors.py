"""The table of silent errors in docs/trust.md: each row with a test has the outcome that it names."""

import re
from pathlib import Path

import pytest
from soak_cases import soaked

from tests.differential import scripts
from tests.differential.runs import Bench

pytestmark = pytest.mark.journey
PAGE = Path(__file__).parents[2] / "docs/trust.md"
BLOCKS = {"clipped": "clipping=norm", "frozen": "model=frozen"}
ROWS = sorted(
    set(re.findall(r"\| (exact|refused)(?:: \"([^\"]*)\")?[^|]*\| `(\w+)` \|$", PAGE.read_text(), re.MULTILINE))
)


@pytest.mark.parametrize(
    ("outcome", "words", "name"),
    soaked([row for row in ROWS if row[0] == "refused"], [row for row in ROWS if row[0] == "exact"]),
    ids=lambda value: value or "-",
)
def test_a_silent_error_is_exact_or_refused(bench: Bench, outcome: str, words: str, name: str) -> None:
    script = scripts.PLAIN_LOOP.named([BLOCKS.get(name, f"silent={name}")])
    found = bench.outcomes(script, ["allreduce"])["allreduce"]
    assert found.kind == {"exact": "equal", "refused": "refused"}[outcome], found
    assert words in found.words


def test_the_page_names_every_block_of_this_kind() -> None:
    named = {name for _, _, name in ROWS}
    ours = {script.keys[-1].partition("=")[2] for script in scripts.PLAIN_LOOP.single(["silent"])} - {"moved_first"}
    assert named == ours | BLOCKS.keys()
