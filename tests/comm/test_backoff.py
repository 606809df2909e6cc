"""Pauses of unequal length, which cost a script none of its random numbers."""

import ast
import random
from pathlib import Path

import topotrain
from topotrain.comm.backoff import spread


def test_pauses_are_spread_over_their_range():
    pauses = [spread(10) for _ in range(200)]
    assert all(5 <= pause <= 15 for pause in pauses)
    assert min(pauses) < 8 and max(pauses) > 12
    assert all(0 <= spread(10, 0, 1) <= 10 for _ in range(200))


def test_a_pause_leaves_the_random_generator_of_the_script_alone():
    random.seed(3)
    before = random.getstate()
    spread(1.0)
    assert random.getstate() == before


def test_only_the_sampling_of_data_touches_the_random_generator_of_the_script():
    """It swaps them for a generator of its own, and gives them back."""
    found = set()
    for path in Path(topotrain.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "random" in text else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
                found.add((path.name, node.attr))
            if isinstance(node, ast.ImportFrom) and node.module == "random":
                found |= {(path.name, alias.name) for alias in node.names}
    own = {"Random", "SystemRandom"}
    assert {name for name, attribute in found if attribute not in own} == {"rng_state.py"}
