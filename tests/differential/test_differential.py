"""Generated scripts end as plain Python does, or are refused by name: the contract of docs/trust.md.

A red run prints the blocks and their seed: `python -m tests.differential --seed SEED --scripts 1` repeats it and shows
a smaller script. 500 scripts: `python -m tests.differential --scripts 500`.
"""

import random
import re
from pathlib import Path

import pytest
from seeds import SOAK, soaked

from tests.differential import scripts
from tests.differential.found import EQUAL, EQUAL_ALIKE, FOUND_LIBRARY, REFUSED, REFUSED_ALIKE
from tests.differential.runs import LAYOUTS, Bench, InvalidScript

pytestmark = pytest.mark.journey
FIXED = range(30) if SOAK else (0, 3)
FIXED_LIBRARY = range(12 if SOAK else 1)
SILENT = Path(__file__).parents[2] / "docs/trust.md"
BLOCKS = {"clipped": "clipping=norm", "frozen": "model=frozen"}
ROWS = sorted(
    set(re.findall(r"\| (exact|refused)(?:: \"([^\"]*)\")?[^|]*\| `(\w+)` \|$", SILENT.read_text(), re.MULTILINE))
)
"""The table of silent errors."""
FRESH = [random.SystemRandom().randrange(10**6, 10**9) for _ in range(5 if SOAK else 1)]


def check(bench: Bench, script: scripts.Script, layout: str, kind: str = "") -> None:
    """A script must end as in plain Python, or be refused; or be just of this `kind`."""
    assert script.is_valid(), "plain Python cannot combine these blocks"
    outcome = bench.outcomes(script, [layout])[layout]
    is_right = outcome.kind == kind if kind else outcome.is_good
    assert is_right, f"{script}\nunder {layout}: {outcome}\n\n{script.text()}"


def check_fresh(bench: Bench, made: scripts.ScriptSet, seeds: list[int]) -> None:
    for seed in seeds:
        script = made.of_seed(seed)
        print(f"seed {seed}: {script}")
        try:
            check(bench, script, layout_of(seed))
        except InvalidScript as error:  # of blocks that nobody has tried together
            print(f"plain Python fails: {error}")


def layout_of(number: int) -> str:
    return list(LAYOUTS)[number % len(LAYOUTS)]


@pytest.mark.parametrize("seed", FIXED)
def test_a_generated_script_ends_as_in_plain_python(bench: Bench, seed: int) -> None:
    check(bench, scripts.PLAIN_LOOP.of_seed(seed), layout_of(seed))


def test_fresh_scripts_end_as_in_plain_python(bench: Bench) -> None:
    check_fresh(bench, scripts.PLAIN_LOOP, FRESH)


@pytest.mark.parametrize("seed", FIXED_LIBRARY)
def test_a_script_with_the_loop_of_a_library_ends_as_in_plain_python(library_bench: Bench, seed: int) -> None:
    check(library_bench, scripts.LIBRARY_LOOPS.of_seed(seed), layout_of(seed))


def test_fresh_scripts_with_the_loop_of_a_library_end_as_in_plain_python(library_bench: Bench) -> None:
    check_fresh(library_bench, scripts.LIBRARY_LOOPS, FRESH)


@pytest.mark.parametrize(("keys", "layout"), soaked(EQUAL, EQUAL_ALIKE))
def test_what_was_found_stays_equal(bench: Bench, keys: str, layout: str) -> None:
    check(bench, scripts.PLAIN_LOOP.named(keys.split()), layout, "equal")


@pytest.mark.parametrize(("keys", "layout"), soaked(REFUSED, REFUSED_ALIKE))
def test_what_was_found_stays_refused(bench: Bench, keys: str, layout: str) -> None:
    check(bench, scripts.PLAIN_LOOP.named(keys.split()), layout, "refused")


@pytest.mark.parametrize(("keys", "layout"), soaked(FOUND_LIBRARY[1:4], (FOUND_LIBRARY[0], FOUND_LIBRARY[4])))
def test_what_was_found_in_loops_of_libraries_stays_fixed(library_bench: Bench, keys: str, layout: str) -> None:
    check(library_bench, scripts.LIBRARY_LOOPS.named(keys.split()), layout)


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
