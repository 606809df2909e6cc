"""Generated scripts end as plain Python does, or are refused by name: the contract of docs/trust.md.

A red run prints the blocks and their seed: `python -m tests.differential --seed SEED --scripts 1` repeats it and shows
a smaller script. 500 scripts: `python -m tests.differential --scripts 500`.
"""

import random

import pytest

from tests.differential import scripts
from tests.differential.found import FOUND, FOUND_LIBRARY
from tests.differential.known import KNOWN, Known, known_part
from tests.differential.runs import LAYOUTS, Bench, InvalidScript

pytestmark = pytest.mark.journey
FIXED = range(30)
FIXED_LIBRARY = range(12)
FRESH = [random.SystemRandom().randrange(10**6, 10**9) for _ in range(5)]


def check(bench: Bench, script: scripts.Script, layout: str) -> None:
    assert script.is_valid(), "plain Python cannot combine these blocks"
    outcome = bench.outcomes(script, [layout])[layout]
    assert outcome.is_good, f"{script}\nunder {layout}: {outcome}\n\n{script.text()}"


def check_fresh(bench: Bench, made: scripts.ScriptSet, seeds: list[int]) -> None:
    for seed in seeds:
        script = made.of_seed(seed)
        print(f"seed {seed}: {script}")
        if known_part(script) is None:
            try:
                check(bench, script, layout_of(seed))
            except InvalidScript as error:  # of blocks that nobody has tried together
                print(f"plain Python fails: {error}")


def layout_of(number: int) -> str:
    return list(LAYOUTS)[number % len(LAYOUTS)]


@pytest.mark.parametrize("seed", FIXED)
def test_a_generated_script_ends_as_in_plain_python(bench: Bench, seed: int) -> None:
    script = scripts.PLAIN_LOOP.of_seed(seed)
    if known_part(script) is None:
        check(bench, script, layout_of(seed))


# While some blocks are known to fail, a fresh script may fail by one that nobody has tried together with others.
@pytest.mark.skipif(
    bool(KNOWN), reason="some blocks are known to fail: python -m tests.differential tries fresh scripts"
)
def test_fresh_scripts_end_as_in_plain_python(bench: Bench) -> None:
    check_fresh(bench, scripts.PLAIN_LOOP, FRESH)


@pytest.mark.parametrize("seed", FIXED_LIBRARY)
def test_a_script_with_the_loop_of_a_library_ends_as_in_plain_python(library_bench: Bench, seed: int) -> None:
    check(library_bench, scripts.LIBRARY_LOOPS.of_seed(seed), layout_of(seed))


def test_fresh_scripts_with_the_loop_of_a_library_end_as_in_plain_python(library_bench: Bench) -> None:
    check_fresh(library_bench, scripts.LIBRARY_LOOPS, FRESH[:3])


@pytest.mark.parametrize(("keys", "layout"), FOUND)
def test_what_was_found_stays_fixed(bench: Bench, keys: str, layout: str) -> None:
    check(bench, scripts.PLAIN_LOOP.named(keys.split()), layout)


@pytest.mark.parametrize(("keys", "layout"), FOUND_LIBRARY)
def test_what_was_found_in_loops_of_libraries_stays_fixed(library_bench: Bench, keys: str, layout: str) -> None:
    check(library_bench, scripts.LIBRARY_LOOPS.named(keys.split()), layout)


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.blocks)
def test_what_is_known_to_fail_still_fails(bench: Bench, known: Known) -> None:
    try:
        outcome = bench.outcomes(scripts.PLAIN_LOOP.named(known.keys), [known.layout])[known.layout]
    except InvalidScript:
        return
    assert not outcome.is_good, f"no longer fails: remove it from KNOWN, and add it to FOUND ({outcome})"
