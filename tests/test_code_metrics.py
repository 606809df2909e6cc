"""The sizes of the repository's parts stay below their ceilings, and only loans let them exceed one."""

import json
import re
from pathlib import Path

import code_metrics
import pytest
from code_metrics import PARTS, RELEASE, excesses, lowered, main

ROWS = {"lines": 100, "modules": 3}
CEILINGS = dict.fromkeys(PARTS, ROWS)
LOANS = {"topotrain": {"lines": 10, "modules": 1}, "benchmarks": {"lines": 0, "modules": 0}}


def sizes(**lines: int) -> dict[str, dict[str, int]]:
    return {name: {**ROWS, "lines": lines.get(name.split("/")[-1], 100)} for name in PARTS}


def test_a_part_above_its_ceiling_is_named_unless_the_loan_covers_all_of_them_together() -> None:
    assert excesses(sizes(), CEILINGS, LOANS) == []
    assert excesses(sizes(core=104, comm=106), CEILINGS, LOANS) == []
    assert excesses(sizes(core=124, comm=106, tools=80), CEILINGS, LOANS) == []
    (found,) = excesses(sizes(core=105, comm=106), CEILINGS, LOANS)
    assert "topotrain/core by 5, topotrain/comm by 6; the loan of topotrain is 10" in found


def test_ceilings_are_lowered_and_never_raised() -> None:
    found = lowered(sizes(core=90, comm=120), CEILINGS)
    assert found["topotrain/core"] == {"lines": 90, "modules": 3} and found["topotrain/comm"] == ROWS


def test_every_file_belongs_to_a_part_and_the_check_fails_on_one_that_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = json.loads(RELEASE.read_text())
    assert list(kept["ceilings"]) == list(PARTS) and {part.loan for part in PARTS.values()} == set(kept["loans"])
    page = tmp_path / "topotrain" / "tools" / "page"
    page.mkdir(parents=True)
    (page / "main.js").write_text("\n" * 5000)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "large.py").write_text("\n" * 20_000)
    monkeypatch.setattr("sys.argv", ["code_metrics.py", "--check", str(tmp_path / "topotrain")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert re.fullmatch(r"lines above the ceilings: benchmarks, scripts by [\d,]+; the loan .*", str(ended.value))
    assert re.search(r"the page's own files +5,000 +[\d,]+ +1 +\d+\n", capsys.readouterr().out)
    assert code_metrics.measure(tmp_path / "topotrain")["lines"] == 0
