"""The differential test by hand: `python -m tests.differential --scripts 500 --seed 0`.

Each script is made from a seed of its own, so that a red one is repeated with `--seed ITS --scripts 1`.
"""

import argparse
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]

from tests.differential import scripts  # noqa: E402
from tests.differential.runs import LAYOUTS, Bench, InvalidScript, opened  # noqa: E402
from tests.differential.scripts import Script  # noqa: E402
from tests.differential.shrink import shrunk  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--scripts", type=int, default=20, help="number of scripts (20)")
    parser.add_argument("--seed", type=int, help="seed of the first script; a fresh one otherwise")
    parser.add_argument(
        "--set", choices=scripts.SETS, default="plain", help="loops of the scripts' own, or of libraries"
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--turns", action="store_true", help="each script under one of the layouts, in turn")
    parser.add_argument("--blocks", nargs="*", metavar="AXIS=NAME", help="run the script of these blocks")
    parser.add_argument("--single", nargs="*", metavar="AXIS", help="run one script for each block (of these axes)")
    parser.add_argument("--keep-going", action="store_true", help="do not shrink what fails")
    parser.add_argument("--jobs", type=int, default=2, help="scripts in flight (2)")
    options = parser.parse_args(arguments)
    made = scripts.SETS[options.set]
    seed = random.randrange(10**6) if options.seed is None else options.seed
    if options.blocks is not None:
        chosen = {0: made.named(options.blocks)}
    elif options.single is not None:
        chosen = dict(enumerate(made.single(options.single)))
    else:
        chosen = {number: made.of_seed(number) for number in range(seed, seed + options.scripts)}
        print(f"seeds {seed} to {seed + options.scripts - 1}")
    counts: Counter[str] = Counter()
    with opened(options.set) as bench, ThreadPoolExecutor(options.jobs) as pool:
        for count, name in pool.map(lambda item: _tried(bench, item, options), chosen.items()):
            counts.update(count)
            print(name, flush=True)
    print(", ".join(f"{number} {kind}" for kind, number in sorted(counts.items())))
    return 1 if counts.keys() & {"different", "crash", "hang"} else 0


def _tried(bench: Bench, item: tuple[int, Script], options: argparse.Namespace) -> tuple[Counter[str], str]:
    seed, script = item
    try:
        layouts = [options.layouts[seed % len(options.layouts)]] if options.turns else options.layouts
        found = bench.outcomes(script, layouts)
    except InvalidScript as error:
        return Counter(invalid=1), f"{seed}: {script}\n    plain Python fails: {str(error).strip().splitlines()[-1:]}"
    lines = [f"{seed}: {script}", *(f"    {layout:12} {outcome}" for layout, outcome in found.items())]
    bad = next((layout for layout, outcome in found.items() if not outcome.is_good), None)
    if bad is not None and not options.keep_going:
        small = shrunk(bench, script, bad)
        lines += [f"    shrunk under {bad}: {small}", "", small.text()]
    return Counter(outcome.kind for outcome in found.values()), "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
