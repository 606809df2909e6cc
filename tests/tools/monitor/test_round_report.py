"""The part of a report about rounds: members, ages, and steps that are in no round."""

from dataclasses import replace
from typing import Any

import pytest

from topotrain.config.job import Cluster, Job
from topotrain.config.topology import layout
from topotrain.core.events import Finished, LocalSteps, Rounds, Started, StateTaken
from topotrain.launch import JobOutcome
from topotrain.tools.monitor.job_report import Report
from topotrain.tools.monitor.result_tables import comparison, summary

CLUSTER = Cluster(nworker_groups=2, server_worker_separate=True)
ROUNDS = Rounds("server 0/0", {"1": 2, "2": 6}, 0.25, 2, ("0 7 0 1", "1 7 1"))


def report_of(*events: Any) -> dict[str, Any]:
    report = Report(Job(name="digits", cluster=CLUSTER), layout(CLUSTER))
    for event in events:
        report(event)
    return report.as_data(JobOutcome(0, 3.5))


def test_a_job_without_an_outer_optimizer_has_no_rounds() -> None:
    data = report_of(Started("worker 0/0", 1))
    assert data["rounds"] is None
    assert "round" not in summary(data)


def test_rounds_and_workers() -> None:
    data = report_of(
        LocalSteps("worker 0/0", 30, 4.0, 0.0, 0.5),
        LocalSteps("worker 0/0", 40, 0.0, 2.5, 1.0),
        StateTaken("worker 1/0", True),
        StateTaken("worker 1/0", False),
        StateTaken("worker 1/0", True),
        LocalSteps("worker 1/0", 20, 0.0, 0.0, 0.0),
        Finished("worker 1/0", 4, 0, 0.0, 0, 700, 900),
        ROUNDS,
    )
    found = data["rounds"]
    assert found["count"] == 8 and found["members"] == {"1": 2, "2": 6} and found["members_mean"] == 1.75
    assert (found["states_taken"], found["states_missed"]) == (2, 1)
    assert (found["age_mean"], found["age_max"], found["lost_steps"]) == (0.25, 2, 2.5)
    assert found["last"] == [
        {"fragment": 0, "number": 7, "groups": [0, 1]},
        {"fragment": 1, "number": 7, "groups": [1]},
    ]
    first, second = found["workers"]
    assert first == {
        "who": "worker 0/0", "steps": 40, "lost_steps": 2.5, "waited_s": 1.0, "bytes_out": 0, "bytes_in": 0
    }  # fmt: skip
    assert (second["who"], second["bytes_out"], second["bytes_in"]) == ("worker 1/0", 700, 900)
    assert summary(data).endswith(", 8 rounds of 1.75 groups (age 0.2, max 2), 2.5 steps lost")


def test_what_a_dead_process_had_not_told_is_lost() -> None:
    """The new process counts from 0, and its untold steps are told before its end."""
    data = report_of(
        Started("worker 1/0", 7),
        LocalSteps("worker 1/0", 9, 0.0, 0.0, 0.5),
        LocalSteps("worker 1/0", 12, 3.0, 1.0, 0.5),
        Started("worker 1/0", 8),
        LocalSteps("worker 1/0", 5, 5.0, 0.0, 0.25),
        LocalSteps("worker 1/0", 20, 0.0, 0.5, 1.0),
        ROUNDS,
    )
    (worker,) = data["rounds"]["workers"]
    assert (worker["steps"], worker["lost_steps"], worker["waited_s"]) == (32, 4.5, 1.5)


def test_a_job_that_failed_has_the_steps_of_its_workers() -> None:
    found = report_of(LocalSteps("worker 0/0", 3, 3.0, 0.0, 0.0))["rounds"]
    assert found["count"] == 0 and found["lost_steps"] == 3.0 and found["last"] == []
    assert found["members"] == {} and found["members_mean"] is None and (found["age_mean"], found["age_max"]) == (0, 0)


def test_a_job_that_failed_has_the_rounds_that_were_reported_last() -> None:
    made = Rounds("server 0/0", {"1": 2}, 0.5, 1, ())
    found = report_of(LocalSteps("worker 0/0", 3, 3.0, 0.0, 0.0), replace(made, members={"1": 1}), made)["rounds"]
    assert (found["count"], found["members"], found["members_mean"], found["last"]) == (2, {"1": 2}, 1.0, [])


@pytest.mark.parametrize("rounds", [True, False])
def test_the_table_has_columns_where_a_job_has_rounds(rounds: bool) -> None:
    table = comparison(
        [{**report_of(*([ROUNDS] if rounds else [])), "label": "islands"}, {**report_of(), "label": "x"}]
    )
    titles = [column.header for column in table.columns]
    assert ("rounds" in titles) == ("lost steps" in titles) == rounds
    if rounds:
        (cells,) = [list(column.cells) for column in table.columns if column.header == "rounds"]
        assert list(map(str, cells)) == ["8 of 1.75", "–"]
