"""The goodput part of `topotrain simulate`: failures of chips, in virtual time."""

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from topotrain.config.job import ConfigError
from topotrain.tools import amounts
from topotrain.tools.monitor.live_terminal import redraws

if TYPE_CHECKING:
    from topotrain.tools.simulator.goodput import ChipFailures, Goodput

PUBLISHED_WORD = "published"
"""In the place of a number of islands: all layouts with a published goodput."""
MOST_ISLANDS = 50_000


def layouts(islands: str, chips: str, failures: "ChipFailures") -> "Sequence[tuple[ChipFailures, int]]":
    """Return what is to be simulated, each as failures and a number of islands.

    Raises:
        ConfigError: the number of islands or of chips is none.
    """
    from dataclasses import replace

    from topotrain.tools.simulator.goodput import published_layouts

    if islands == PUBLISHED_WORD:
        if chips:
            raise ConfigError("--chips", chips, f"must not be given with --islands {PUBLISHED_WORD}")
        return published_layouts(failures)
    if not islands.isdecimal() or not 1 <= int(islands) <= MOST_ISLANDS:
        raise ConfigError("--islands", islands, f"must be a number from 1 to {MOST_ISLANDS}, or {PUBLISHED_WORD}")
    if not chips:
        raise ConfigError("--chips", None, "is required by --islands: the chips of the whole job, such as 1.2M")
    found = amounts.count("--chips", chips)
    if found < int(islands):
        raise ConfigError("--chips", chips, f"must be at least {islands}, one for each island")
    return [(replace(failures, chips=found), int(islands))]


def goodput(wanted: "Sequence[tuple[ChipFailures, int]]", quorum: int, seed: int, as_json: bool) -> int:
    """Simulate each layout, and print its goodput. Returns the exit code."""
    from topotrain.tools.simulator.goodput import GoodputSimulation, pushes_for

    for _, islands in wanted:
        if not 0 <= quorum <= islands:
            raise ConfigError("--quorum", quorum, f"must be at most {islands}, the number of islands; 0: all of them")
    began, found, shows = time.monotonic(), list["Goodput"](), redraws(sys.stderr)
    total = sum(pushes_for(*each) for each in wanted)
    before = 0
    for failures, islands in wanted:
        simulation = GoodputSimulation(failures, islands, quorum, seed)
        for pushes in simulation.run(pushes_for(failures, islands)):
            if shows:
                share = (before + pushes) / total
                print(f"\r{islands} islands: {share:.0%} of {total} pushes", end="", file=sys.stderr, flush=True)
        before += pushes_for(failures, islands)
        found.append(simulation.found())
    if shows:
        print("\r\033[K", end="", file=sys.stderr)
    took = time.monotonic() - began
    if as_json:
        rows = [{**each.as_data(), "published": _published(each)} for each in found]
        print(json.dumps({"layouts": rows, "seconds": round(took, 1)}, indent=2))
    else:
        print(_table(found, took))
    return 0


def _published(found: "Goodput") -> float | None:
    """Return the goodput of the paper for a layout, or None."""
    from topotrain.tools.simulator.goodput import PUBLISHED, YEAR_S

    failures = found.failures
    return PUBLISHED.get((failures.chips, found.islands)) if failures.mtbi_s == YEAR_S else None


def _table(found: "Sequence[Goodput]", took: float) -> str:
    head = f"{'chips':>11}  {'islands':>7}  {'goodput':>7}  {'formula':>7}  {'published':>9}"
    lines = [head]
    for each in found:
        paper = _published(each)
        cells = f"{each.failures.chips:>11,}  {each.islands:>7,}  {each.share:>7.1%}"
        cells += f"  {each.failures.formula(each.islands):>7.1%}  {'–' if paper is None else f'{paper:.0%}':>9}"
        lines.append(cells)
    if any(_published(each) is not None for each in found):
        lines.append("published: Decoupled DiLoCo (arXiv 2604.21428)")
    counts = [sum(values) for values in zip(*((each.pushes, each.rounds, each.stalls) for each in found), strict=True)]
    lines.append("topotrain: {:,} pushes in {:,} rounds, {:,} failures, {:.0f} s".format(*counts, took))
    return "\n".join(lines)
