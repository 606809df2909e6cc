"""Shrinks a script that fails: blocks are dropped one by one while it still does."""

from tests.differential.runs import Bench, InvalidScript
from tests.differential.scripts import Script


def shrunk(bench: Bench, script: Script, layout: str) -> Script:
    """The smallest script found that fails under the layout in the same way."""
    kind = bench.outcomes(script, [layout])[layout].kind
    for each in script.blocks:
        smaller = script.without(each)
        if smaller.is_valid() and _kind(bench, smaller, layout) == kind:
            script = smaller
    return script


def _kind(bench: Bench, script: Script, layout: str) -> str:
    try:
        return bench.outcomes(script, [layout])[layout].kind
    except InvalidScript:
        return "invalid"
