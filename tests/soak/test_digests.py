"""The record of final parameters: what a digest sees, what is compared, and two cases end to end."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak import digests
from tests.soak.digests import Case, Entry, JobFailed, Refused, digest, outcome

CASES = digests.read()[1]
WEIGHT = Entry("weight", "F32", (2, 1), b"12345678")
BIAS = Entry("bias", "F32", (1,), b"1234")


def test_a_digest_changes_with_name_dtype_shape_and_bytes() -> None:
    assert digest([BIAS, WEIGHT]) == digest([WEIGHT, BIAS]) != digest([WEIGHT])
    changes = ({"name": "weights"}, {"dtype": "I32"}, {"shape": (1, 2)}, {"data": b"12345679"})
    assert all(digest([BIAS, WEIGHT._replace(**change)]) != digest([BIAS, WEIGHT]) for change in changes)
    moved = [BIAS._replace(data=b"12341"), WEIGHT._replace(data=b"2345678")]
    assert digest(moved) != digest([BIAS, WEIGHT]), "where a tensor ends"


def test_a_case_is_compared_with_its_record_or_with_a_second_run() -> None:
    died, unable, recorded = JobFailed("it died"), Refused("no address"), Case("one", digest="a", code="abc")

    def verdict(*results: str | Exception, case: Case = recorded, twice: bool = False) -> str:
        left = iter(results)

        def run(_: Case) -> str:
            result = next(left)
            if isinstance(result, Exception):
                raise result
            return result

        return outcome(case, run, Case("reference", digest="a"), twice)[0]

    once = [verdict("a"), verdict("b"), verdict(died), verdict(unable), verdict("a", case=Case("one"))]
    assert once == ["ok", "DIFFERENT", "FAILED", "NOT RUN", "NOT RECORDED"]
    pairs = [verdict(*pair, twice=True) for pair in (("a", "a"), ("a", "b"), ("c", "c"), ("a", died))]
    assert pairs == ["ok", "UNSTABLE", "UNEQUAL", "FAILED"]


def test_another_machine_is_named_and_not_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = digests.conditions()
    assert digests.incomparable(here, here) == ""
    monkeypatch.setattr(digests, "conditions", lambda: {**here, "cpu capability": "ABACUS"})
    monkeypatch.setattr(digests.signal, "signal", lambda *_: None)
    for name, said in (
        ("sandblaster", "not compared: this machine has cpu capability ABACUS"),
        ("x", "invalid choice"),
    ):
        monkeypatch.setattr(sys, "argv", ["digests", "--only", name])
        with pytest.raises(SystemExit) as ended:
            digests.main()
        assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_record_is_written_as_it_is_read_and_keeps_what_the_docs_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(CASES) == 56 and all(case.digest for case in CASES.values())
    assert all(CASES[case.same_as or name].digest == case.digest for name, case in CASES.items())
    monkeypatch.setattr(digests, "RECORD", tmp_path / "digests.json")
    digests.write(CASES)
    assert digests.read()[1] == CASES


@pytest.mark.journey
def test_a_case_has_one_digest_per_seed_and_a_refused_one_has_none(
    served_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPOTRAIN_FORKSERVER", served_at)
    case = CASES["in-memory-sandblaster"]
    assert digests.run(case) == digests.run(case) != digests.run(case, seed=1)
    with pytest.raises(JobFailed, match=r"exit codes \[2\]: .*nworkers_per_group"):
        digests.run(replace(CASES["sandblaster"], cluster="nworkers_per_group: 0"))
