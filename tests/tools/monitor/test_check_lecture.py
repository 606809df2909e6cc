"""Which jobs can be slowed down, and what is printed of one."""

import io

import pytest
from rich.console import Console

from topotrain.config.job import Cluster, ConfigError, Engine
from topotrain.config.topology import layout
from topotrain.core.events import StepDone, Traveled
from topotrain.tools.monitor.lecture import LEAST_S, MOST_PROCESSES, MOST_S, check_lecture, explaining
from topotrain.tools.monitor.progress.chosen_display import progress

SMALL = layout(Cluster(nworkers_per_group=3, nservers_per_group=2, server_worker_separate=True))
PUSH = Traveled("worker 0/1", "server 0/0", "push", 3, 0)


def test_the_bounds_are_accepted() -> None:
    for seconds in (LEAST_S, MOST_S):
        check_lecture(seconds, SMALL)
    full = layout(Cluster(nworkers_per_group=MOST_PROCESSES - 1, server_worker_separate=True))
    check_lecture(1.0, full)


@pytest.mark.parametrize("seconds", [0.0, -1.0, LEAST_S / 2, MOST_S * 1.01, float("nan"), float("inf")])
def test_other_pauses_are_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"--lecture = .*: must be from 0\.01 to 5 seconds for each message"):
        check_lecture(seconds, SMALL)


def test_jobs_that_cannot_be_followed_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 16 workers and servers: this one has 17"):
        check_lecture(1.0, layout(Cluster(nworkers_per_group=MOST_PROCESSES, server_worker_separate=True)))
    gloo = Cluster(nworkers_per_group=2, nservers_per_group=2, engine=Engine.kGloo)
    with pytest.raises(ConfigError, match="needs engine: kOwn: with kGloo the gradients travel inside"):
        check_lecture(1.0, layout(gloo))


def test_without_the_package_the_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topotrain.tools.monitor.lecture.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package topotrain\.extensions\.slow_deliveries"):
        check_lecture(1.0, SMALL)


def test_only_messages_are_explained_and_only_where_that_is_wanted() -> None:
    for wanted in (True, False):
        text = io.StringIO()
        with progress(SMALL, Console(file=text, width=40, force_terminal=False)) as shown:
            explain = explaining(SMALL, shown, wanted)
            explain(PUSH)
            explain(StepDone("worker 0/0", 1.0, 1, 8, 0.5, 0.0, 0, 0, 0))
        lines = [line for line in text.getvalue().splitlines() if "pushes its gradient of slice 0" in line]
        assert len(lines) == len(text.getvalue().splitlines()) == int(wanted)
