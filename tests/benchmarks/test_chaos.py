"""The long check of benchmarks/chaos.py, without running it: what was not run is no pass, and wrong cells are seen."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import chaos, torment
from benchmarks.chaos import BEGIN, END, LEDGERS, NOT_RUN, Check, Line, counted, run
from benchmarks.torment import Trial


def trial(killed: int, *wrong: str, number: int = 0) -> Trial:
    found = Trial(LEDGERS[number], number, killed=killed, waits=[("worker", 0.5), ("server", 2.0)])
    found.wrong += wrong
    return found


def soon() -> float:
    return time.monotonic() + 60


@pytest.mark.journey
def test_what_was_not_run_is_never_a_pass() -> None:
    assert run(Check("P", "cut links", ""), soon()).verdict == NOT_RUN
    assert run(Check("Q", "a test to come", "tests/not_there.py"), soon()).verdict == NOT_RUN
    assert run(Check("K", "no time", "Makefile", ("-c", "")), 0.0).verdict == NOT_RUN
    cannot = run(Check("P", "", "Makefile", ("-c", "print('NOT RUN: there are no namespaces')")), soon())
    assert (cannot.verdict, cannot.found) == (NOT_RUN, "there are no namespaces")


@pytest.mark.journey
def test_a_check_is_as_its_command_ends() -> None:
    good, bad = (run(Check("K", "", "Makefile", ("-c", f"print('3 passed'); exit({n})")), soon()) for n in (0, 1))
    assert (good.verdict, bad.verdict) == ("ok", "FAILED")
    assert good.found.startswith("3 passed (")


def test_one_wrong_job_or_too_few_kills_fail_the_row() -> None:
    assert [line.verdict for line in counted([trial(5), trial(5)], 10)] == ["ok", "ok"]
    assert [line.verdict for line in counted([trial(5), trial(4)], 10)] == ["FAILED", "ok"]
    assert [line.verdict for line in counted([trial(5), trial(5, "2 cells are not 3")], 10)] == ["FAILED", "FAILED"]
    assert [line.verdict for line in counted([trial(5), trial(5, "process 7 is left")], 10)] == ["FAILED", "ok"]
    assert [line.verdict for line in counted([], 0)] == ["FAILED", "FAILED"]


def test_cells_and_bits_that_are_not_as_they_must_be(tmp_path: Path) -> None:
    final = tmp_path / "final.safetensors"
    assert torment._wrong(final, 3, None) == ["no result"]
    save_file({"cells": torch.tensor([3.0, 3.0, 2.0, 4.0])}, final)
    assert torment._wrong(final, 3, None) == ["2 cells are not 3: {2.0: 1, 4.0: 1}"]
    assert torment._wrong(final, 0, {"cells": torch.tensor([3.0, 3.0, 2.0, 4.0])}) == []
    assert "cells" in torment._wrong(final, 0, {"cells": torch.zeros(4)})[0]


@pytest.mark.journey
def test_a_job_that_hangs_says_where_it_stood(tmp_path: Path) -> None:
    script = "import faulthandler, os; faulthandler.enable()\ndef waits(): os.abort()\nwaits()"
    (tmp_path / "worker-0-0.log").write_text("step 1\n")
    (tmp_path / "worker-0-1.log").write_text("step 1\n")
    with open(tmp_path / "worker-0-1.log", "a") as log:
        subprocess.run([sys.executable, "-c", script], stderr=log)
    said = torment.stacks(tmp_path)
    assert "worker-0-1.log" in said and "in waits" in said and "worker-0-0" not in said and "step 1" not in said


def test_the_page_says_what_was_not_run_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setattr(chaos, "PAGE", page)
    monkeypatch.setattr(chaos, "RESULTS", tmp_path)
    asked = [Line(i, f"check {i}", NOT_RUN, "not asked for") for i in chaos.IDS if i != "K"]
    chaos.keep_waits([trial(9)], 1, 2.0)
    chaos.keep([Line("K", "images", "ok", "4 passed"), *asked])
    chaos.keep([Line(i, "", NOT_RUN, "not asked for") for i in chaos.IDS])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    ran, _, missing = text.partition(f"\n{NOT_RUN}:\n")
    assert "| K | images | ok | 4 passed |" in ran
    assert "| Sandblaster | worker | 1 | 1 | 0.5 | 0.5 | 0.5 |" in ran
    assert "* P" in missing and "* K" not in missing


@pytest.mark.journey
def test_each_check_is_kept_before_the_next_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(chaos, "RESULTS", tmp_path)
    monkeypatch.setattr(chaos, "CHECKS", [Check(i, "", "Makefile", ("-c", "print('3 passed')")) for i in "KZ"])
    chaos.PAGE.write_text(f"{BEGIN}\n{END}\n")
    found = chaos.rows(["K", "Z"], 0, 1, soon())
    chaos.keep(next(found))
    assert "| K |" in chaos.PAGE.read_text() and "| Z |" not in chaos.PAGE.read_text()
    assert [line.id for lines in found for line in lines] == ["Z"]


def test_the_page_of_the_documentation_has_its_place() -> None:
    text = chaos.PAGE.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
