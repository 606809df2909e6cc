"""The list of mutants fits to the source, and the runner tells a mutant that survives from one that is killed."""

from pathlib import Path

import pytest

from tests.soak.mutants import ROOT, RULES, Mutant, read, survives

TESTED = "from rule import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
SOURCE = "def double(x):\n    return 2 * x\n"


def test_each_mutant_can_be_made() -> None:
    mutants = list(read(RULES.read_text()))
    outdated = [each.rule for each in mutants if (ROOT / each.file).read_text().count(each.old) != 1]
    assert mutants and not outdated, "the source has other lines now: give each mutant the new ones"
    assert not [test for each in mutants for test in each.tests if ".py" in test and not is_there(test)]


def is_there(test: str) -> bool:
    """Whether an argument of pytest names a file, and a function of it."""
    file, _, function = test.partition("::")
    return (ROOT / file).exists() and f"def {function.partition('[')[0]}" in (ROOT / file).read_text()


@pytest.mark.journey
def test_a_mutant_survives_where_no_test_fails(tmp_path: Path) -> None:
    (tmp_path / "rule.py").write_text(SOURCE)
    (tmp_path / "test_rule.py").write_text(TESTED)
    found = [
        survives(Mutant("", "rule.py", ("test_rule.py",), old, new), tmp_path)
        for old, new in (("2 * x\n", "3 * x\n"), ("2 * x\n", "x + x\n"), ("4 * x\n", "x\n"))
    ]
    assert found[0] == "" and "pytest ended with code 0" in found[1] and "0 times" in found[2]
    assert (tmp_path / "rule.py").read_text() == SOURCE
