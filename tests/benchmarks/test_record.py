"""The measuring side of benchmarks/, without measuring: ratios, the record, and the sides of the tables."""

import platform
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from seeds import soak_only

from benchmarks import __main__ as bench
from benchmarks.harness import Figure, absent, interleave, row
from benchmarks.record import RESULTS, Table, load, machine, save
from benchmarks.sides import Refused, Sides, cluster


def test_sides_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    values = {"a": iter([100.0, 1, 2, 3, 4, 5]), "b": iter([100.0, 2, 4, 6, 8, 40])}

    def side(name: str) -> Callable[[], float]:
        return lambda: (order.append(name), next(values[name]))[1]

    found = interleave({"a": side("a"), "b": side("b")}, 5, lambda name: order.append(f"warm {name}"))
    rounds = [order[at : at + 4] for at in range(0, len(order), 4)]
    assert len(rounds) == 6
    assert {tuple(turns) for turns in rounds} == {("warm a", "a", "warm b", "b"), ("warm b", "b", "warm a", "a")}
    assert found["a"].values == (1, 2, 3, 4, 5)
    assert found["b"].over(found["a"]) == Figure(2.0, 2.0, 8.0)
    assert found["b"].figure == Figure(6.0, 2.0, 40.0)
    with pytest.raises(ValueError, match="rounds = 4"):
        interleave({"a": lambda: 1.0}, 4)
    lost: dict[str, str] = {}
    assert interleave({"a": iter(()).__next__, "b": lambda: 3.0}, lost=lost).keys() == {"b"} and lost.keys() == {"a"}


def test_tables_survive_their_file_which_is_that_of_the_machine(tmp_path: Path) -> None:
    rows = (row("even", Figure(2.0, 1.0, 3.0), "%", mode="kHidden"), absent("x", "s", "why"))
    first = Table("Starts", "python -m benchmarks.starts", "abc", "2 cores (AMD EPYC), 24 GiB", 3.0, rows)
    other = Table("Memory", "python -m benchmarks.memory", "abc+changes", first.machine, 3.0, rows[:1], 0.1, 0.0)
    path = save("starts", first, tmp_path)
    assert path == save("memory", other, tmp_path) == tmp_path / "2-cores-amd-epyc.json"
    assert load(path) == {"memory": other, "starts": first}
    xeon = Table("Starts", "", "abc", "2 cores (Intel(R) Xeon(R) Processor), 24 GiB", 3.0, ())
    assert save("starts", xeon, tmp_path).name == "2-cores-intel-xeon.json"
    assert "torch" in machine() and (platform.node() not in machine() or not platform.node())


def test_every_row_of_the_record_has_a_command_a_commit_and_a_machine() -> None:
    tables = [table for path in RESULTS.glob("*.json") for table in load(path).values()]
    assert len(tables) > 30 and all(table.command and table.commit and table.machine for table in tables)
    assert all(each.figure is not None or each.note for table in tables for each in table.rows)


def test_unknown_tables_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "p5"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "p5: must be one of starts, memory" in capsys.readouterr().err
    assert all(Path(bench.__file__).with_name(f"{name}.py").exists() for name in bench.TABLES)


@soak_only
@pytest.mark.journey
def test_a_job_takes_orders_and_a_side_that_has_ended_says_so() -> None:
    with Sides() as sides:
        side = sides.job("job", cluster(workers=1), 1, "small", "kTcp")
        assert side.run(2) > 0 and side.turn(1).wall > 0
        assert side.ask(check=True)[0]["checksum"] > 0
        alone = sides.peer("alone", "alone", 1, "small")
        alone.let_go()
        for process in alone.processes:
            process.wait()
        with pytest.raises(Refused, match="alone"):
            alone.ask(steps=1)
