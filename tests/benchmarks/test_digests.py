"""The record of final parameters in benchmarks/: what a digest sees, what is compared, and two cases end to end."""

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import digests
from benchmarks.digests import CASES, Case, Entry, JobFailed, Verdict, compare, digest, parameters, rows, settle
from benchmarks.sides import Refused

ROOT = Path(__file__).parents[2]
RECORDED = json.loads(digests.RECORD.read_text(encoding="utf-8"))
BY_NAME = {case.name: case for case in CASES}

WEIGHT = Entry("weight", "F32", (2, 1), b"12345678")
BIAS = Entry("bias", "F32", (1,), b"1234")


@pytest.mark.parametrize(
    "other",
    [
        WEIGHT._replace(name="weights"),
        WEIGHT._replace(dtype="I32"),
        WEIGHT._replace(shape=(1, 2)),
        WEIGHT._replace(data=b"12345679"),
    ],
)
def test_a_digest_changes_with_name_dtype_shape_and_bytes(other: Entry) -> None:
    assert digest([BIAS, WEIGHT]) == digest([WEIGHT, BIAS])
    assert digest([BIAS, other]) != digest([BIAS, WEIGHT])


def test_a_digest_knows_where_a_tensor_ends() -> None:
    assert digest([BIAS, WEIGHT]) != digest([WEIGHT])
    moved = [BIAS._replace(data=b"12341"), WEIGHT._replace(data=b"2345678")]
    assert digest(moved) != digest([BIAS, WEIGHT])


def test_the_digest_of_a_file_is_that_of_its_tensors(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    weight = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    save_file({"weight": weight, "count": torch.tensor(3)}, one)
    save_file({"count": torch.tensor(3), "weight": weight.clone()}, other, metadata={"made by": "another version"})
    assert one.read_bytes() != other.read_bytes()
    assert [entry.shape for entry in sorted(parameters(one))] == [(), (2, 3)]
    assert digest(parameters(one)) == digest(parameters(other))


def test_rows_of_a_table_count_whichever_part_has_them(tmp_path: Path) -> None:
    def table(name: str, *parts: tuple[list[int], list[float]]) -> str:
        folder = tmp_path / name / "words"
        folder.mkdir(parents=True)
        for number, (ids, values) in enumerate(parts):
            tensors = {"ids": torch.tensor(ids), "values": torch.tensor(values).reshape(-1, 1)}
            save_file(tensors, folder / f"part-{number:05}.safetensors")
        return digest(rows(tmp_path / name))

    whole = table("whole", ([1, 2, 3], [0.1, 0.2, 0.3]))
    assert table("cut", ([3], [0.3]), ([2, 1], [0.2, 0.1])) == whole
    assert table("exchanged", ([1, 2, 3], [0.2, 0.1, 0.3])) != whole


def runs(*results: str | Exception) -> Callable[[Case], str]:
    """A runner that has these results, one after the other."""
    left: Iterator[str | Exception] = iter(results)

    def run(_: Case) -> str:
        result = next(left)
        if isinstance(result, Exception):
            raise result
        return result

    return run


CASE = Case("one", same_as="reference")


@pytest.mark.parametrize(
    ("runner", "verdict"),
    [
        (runs("a"), Verdict.OK),
        (runs("b"), Verdict.DIFFERENT),
        (runs(JobFailed("it died")), Verdict.FAILED),
        (runs(Refused("no address")), Verdict.NOT_RUN),
    ],
)
def test_a_case_is_compared_with_its_record(runner: Callable[[Case], str], verdict: Verdict) -> None:
    assert compare(CASE, {"one": {"digest": "a", "code": "abc"}}, runner).verdict is verdict


def test_a_case_without_a_record_is_not_ok() -> None:
    outcome = compare(CASE, {}, runs("a"))
    assert outcome.verdict is Verdict.NOT_RECORDED
    assert outcome.verdict not in digests.WELL


@pytest.mark.parametrize(
    ("runner", "verdict"),
    [
        (runs("a", "a"), Verdict.OK),
        (runs("a", "b"), Verdict.UNSTABLE),
        (runs("c", "c"), Verdict.UNEQUAL),
        (runs("a", JobFailed("it died")), Verdict.FAILED),
    ],
)
def test_what_is_recorded_was_the_same_twice(runner: Callable[[Case], str], verdict: Verdict) -> None:
    assert settle(CASE, {"reference": {"digest": "a", "code": "abc"}}, runner).verdict is verdict


@pytest.mark.journey
def test_another_machine_is_named_and_not_compared(tmp_path: Path) -> None:
    here = digests.conditions()
    assert digests.incomparable(here, here) == ""
    assert digests.incomparable({**here, "torch": "1.0"}, here) == f"torch {torch.__version__} (recorded: 1.0)"
    record = tmp_path / "digests.json"
    record.write_text(json.dumps({"conditions": {**here, "cpu capability": "ABACUS"}, "machine": "", "cases": {}}))
    script = (
        "import sys; from pathlib import Path; from benchmarks import digests; "
        "digests.RECORD = Path(sys.argv.pop(1)); digests.main()"
    )
    words = [sys.executable, "-c", script, str(record), "--only", "sandblaster"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "not compared: this machine has cpu capability" in done.stderr
    assert "(recorded: ABACUS)" in done.stderr
    assert done.stdout == ""


def test_an_unknown_case_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"--only sandblast: must be one of sandblaster, "):
        digests.chosen(["sandblast"])
    assert digests.chosen([]) == list(CASES)


def test_the_record_has_every_case_and_keeps_what_the_docs_promise() -> None:
    assert len(BY_NAME) == len(CASES)
    assert list(RECORDED["cases"]) == list(BY_NAME)
    for case in CASES:
        if case.same_as:
            assert RECORDED["cases"][case.name]["digest"] == RECORDED["cases"][case.same_as]["digest"], case.name


@pytest.mark.parametrize("path", [Path(digests.__file__), digests.SCRIPT], ids=lambda path: path.stem)
def test_only_names_that_survive_a_move_are_used(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("topotrain.")]
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("topotrain")


@pytest.mark.journey
@pytest.mark.parametrize("name", ["python", "in-memory-sandblaster"])
def test_a_case_has_one_digest_per_seed(name: str, served_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPOTRAIN_FORKSERVER", served_at)
    case = BY_NAME[name]
    first = digests.run(case)
    assert digests.run(case) == first
    assert digests.run(case, seed=1) != first


@pytest.mark.journey
def test_a_job_that_is_refused_is_told_and_has_no_digest() -> None:
    case = replace(BY_NAME["sandblaster"], cluster="nworkers_per_group: 0")
    with pytest.raises(JobFailed, match=r"exit codes \[2\]: .*nworkers_per_group"):
        digests.run(case)
