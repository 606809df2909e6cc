"""Leave out one rule of the source at a time, and see a test fail: `python -m tests.soak.mutants [WORD …]`.

tests/soak/mutants.txt has the rules. The words choose those that contain one of them. The repository stays as it is:
the rules are left out in a copy. It ends with code 1 if a mutant survives, or if the source has changed so that a
mutant cannot be made.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RULES = Path(__file__).with_name("mutants.txt")
COPIED = ("topotrain", "tests", "scripts", "docs", "examples", "pyproject.toml")
MINUTES = 10
"""A mutant is killed if a test has not come to its end after this time: without the rule a process waits for ever."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A rule, and the source without it. tests: the tests that must fail then, as arguments of pytest."""

    rule: str
    file: str
    tests: tuple[str, ...]
    old: str
    new: str


def read(text: str) -> Iterator[Mutant]:
    """Read the mutants of a list: see its first lines."""
    for block in text.split("\n== ")[2:]:  # the first one explains the form
        rule, *rest = block.splitlines()
        parts = {mark: [line[2:] for line in rest if line[:1] == mark] for mark in "@!-+"}
        old, new = ("".join(f"{line}\n" for line in parts[mark]) for mark in "-+")
        yield Mutant(rule, parts["@"][0], tuple(parts["!"]), old, new)


def survives(mutant: Mutant, copy: Path) -> str:
    """Return why a mutant is not killed; nothing if it is."""
    path = copy / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        return f"{mutant.file} has its lines {source.count(mutant.old)} times"
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        code, said = run(mutant.tests, copy)
    finally:
        path.write_text(source)
    return "" if code == 1 else f"pytest ended with code {code}: {said[-300:]}"


def run(tests: Sequence[str], copy: Path) -> tuple[int, str]:
    """Return the exit code of pytest and its words. A test that waits for ever has failed."""
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests)
    try:
        # The copy is the current folder, which comes before the installed package.
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=60 * MINUTES)
    except subprocess.TimeoutExpired:
        return 1, "it waits for ever"
    return done.returncode, done.stdout


def main(words: Sequence[str]) -> int:
    mutants = [each for each in read(RULES.read_text()) if not words or any(word in each.rule for word in words)]
    alive = 0
    with tempfile.TemporaryDirectory(prefix="tt-") as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # the file changes twice within the second that its time stamp has
        for tests in dict.fromkeys(mutant.tests for mutant in mutants):
            code, said = run(tests, Path(folder))
            if code:
                sys.exit(f"without a mutant {' '.join(tests)} ends with code {code}: {said[-3000:]}")
        for mutant in mutants:
            why = survives(mutant, Path(folder))
            alive += bool(why)
            print(f"{'SURVIVES' if why else 'killed'}: {mutant.rule} {why}", flush=True)
    print(f"{len(mutants) - alive} of {len(mutants)} killed")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
