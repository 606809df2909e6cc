"""The long check, without running it: what was not run is no pass, and wrong cells are seen."""

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.record import ROOT
from tests.soak import chaos
from tests.soak.chaos import BEGIN, CHECKS, END, LEDGERS, NOT_RUN, Check, Line, counted, run
from tests.soak.torment import Trial, wrong_values


def trial(killed: int, *wrong: str) -> Trial:
    return Trial(LEDGERS[0], 0, killed, waits=[("worker", 0.5), ("server", 2.0)], wrong=list(wrong))


@pytest.mark.journey
def test_a_check_is_as_its_command_ends_and_what_was_not_run_is_no_pass() -> None:
    def verdict(program: str, left_s: float = 60.0) -> tuple[str, str]:
        line = run(Check("K", "", ("-c", program)), time.monotonic() + left_s)
        return line.verdict, line.found.partition(" (")[0]

    assert verdict("print('3 passed')") == ("ok", "3 passed")
    assert verdict("print('3 passed'); exit(1)") == ("FAILED", "3 passed")
    assert verdict("print('NOT RUN: there are no namespaces')") == (NOT_RUN, "there are no namespaces")
    assert verdict("", 0.0) == (NOT_RUN, "the time was over")


def test_every_check_has_its_files() -> None:
    words = [word for check in CHECKS for word in check.words]
    assert all((ROOT / word).exists() for word in words if word.endswith(".py")) and len(words) > 20


def test_one_wrong_job_or_too_few_kills_fail_the_row() -> None:
    def verdicts(kills: int, *trials: Trial) -> list[str]:
        return [line.verdict for line in counted(trials, kills)]

    assert verdicts(10, trial(5), trial(5)) == ["ok", "ok"]
    assert verdicts(10, trial(5), trial(4)) == ["FAILED", "ok"]
    assert verdicts(10, trial(5), trial(5, "2 cells are not 3")) == ["FAILED", "FAILED"]
    assert verdicts(10, trial(5), trial(5, "process 7 is left")) == ["FAILED", "ok"]
    assert verdicts(0) == ["FAILED", "FAILED"]


def test_cells_and_bits_that_are_not_as_they_must_be(tmp_path: Path) -> None:
    final, cells = tmp_path / "final.safetensors", torch.tensor([3.0, 3.0, 2.0, 4.0])
    assert wrong_values(final, 3) == ["no result"]
    save_file({"cells": cells}, final)
    assert wrong_values(final, 3) == ["2 cells are not 3: {2.0: 1, 4.0: 1}"]
    assert wrong_values(final, 0, {"cells": cells}) == []
    assert "cells" in wrong_values(final, 0, {"cells": torch.zeros(4)})[0]


def test_the_page_says_what_was_not_run_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = chaos.PAGE.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setattr(chaos, "PAGE", page)
    monkeypatch.setattr(chaos, "RECORD", tmp_path / "chaos.json")
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
