"""What a job is said to wait for, phase by phase, under a clock that the test moves."""

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.recorded_jobs import Clock, displays_go_by, report_of
from topotrain.config.job import ChangeMethod, Cluster, LRGen, Updater, UpdaterType
from topotrain.config.topology import Topology, layout
from topotrain.core.events import (
    Connects,
    Event,
    Exited,
    Failed,
    Finished,
    Left,
    Notice,
    Serving,
    Started,
    StepDone,
    Waits,
)
from topotrain.tools.monitor.longest_wait import QUIET_S, longest
from topotrain.tools.monitor.progress_display import FIRST_S, REPEAT_S, LiveTable, PlainProgress, QuietProgress
from topotrain.tools.recording.process_table import ProcessTable
from topotrain.tools.recording.recorded_lines import layout_data

CLUSTER = Cluster(nworker_groups=2, nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True)
TOPOLOGY = layout(CLUSTER)
WORKERS = [str(worker) for unit in TOPOLOGY.units for worker in unit.workers]
SERVERS = [str(server) for unit in TOPOLOGY.units for server in unit.servers]
UNITS = [f"unit {unit.rank}" for unit in TOPOLOGY.units]
SCRIPT, NEXT = "to import the script, up to tt.prepare", "waiting for the next step of"


def each(make: Callable[..., Event], names: list[str], *args: object) -> list[Event]:
    return [make(who, *args) for who in names]


def step(who: str, number: int) -> StepDone:
    return StepDone(who, 1.0, number, number, None, 0.0, 0, 0, 0)


def finished(who: str) -> Finished:
    return Finished(who, 18, 1, 0.0, 0, 0, 0)


class Waiting:
    """A job and its time: events are told, time passes, and then it waits for something."""

    def __init__(self, topology: Topology = TOPOLOGY) -> None:
        self.now, self._cluster, self._processes = 100.0, topology.cluster, ProcessTable()
        self._processes.use(layout_data(topology), self.now)

    def __call__(self, *events: Event, then: float = 0.0) -> str:
        for event in events:
            self._processes.on_event(event, self.now)
        self.now += then
        found = longest(self._processes.all(), self._cluster, self.now)
        return "" if found is None else found.words()


@pytest.fixture
def training() -> Waiting:
    """A job in which all processes run, and each worker has made a step."""
    made = Waiting()
    serving = each(Serving, SERVERS, ("x",), 1)
    made(*each(Started, [*UNITS, *SERVERS, *WORKERS], 1), *serving, *each(Connects, WORKERS), *each(step, WORKERS, 18))
    return made


def test_the_phases_of_a_start_in_their_order() -> None:
    wait = Waiting()
    assert wait(then=3).startswith("waiting for unit 0, unit 1 and ")
    units = each(Started, UNITS, 1)
    for events, then, expected in (
        (units, 2, f"{wait()[:-3]}2 s"),
        (each(Started, [*SERVERS, *WORKERS], 1), 4, "waiting for server 0/0, server 0/1 to open its addresses, 4 s"),
        ([Serving("server 0/0", ("x",), 1)], 1, "waiting for server 0/1 to open its addresses, 5 s"),
        (
            [Serving("server 0/1", ("x",), 1), *each(Connects, WORKERS[:2])],
            1,
            f"waiting for worker 1/0, worker 1/1 {SCRIPT}, 6 s",
        ),
        ([Connects("worker 1/1")], 7, f"waiting for worker 1/0 {SCRIPT}, 13 s"),
        ([Connects("worker 1/0")], 2, "waiting for the first step of worker 0/0, worker 0/1 and 2 more, 10 s"),
        (each(step, WORKERS[1:], 1), 0, "waiting for the first step of worker 0/0, 10 s"),
        ([step("worker 0/0", 1)], QUIET_S - 0.5, ""),
    ):
        assert wait(*events, then=then) == expected


def test_steps_a_restart_a_group_that_leaves_and_the_end(training: Waiting) -> None:
    several = "worker 0/0, worker 0/1 and 2 more, after step"
    for events, then, expected in (
        ([], 12, f"{NEXT} {several} 18, 12 s"),
        (
            [Waits(who, 12.0) for who in WORKERS if who != "worker 1/0"],
            1,
            f"{NEXT} worker 1/0, for which the others wait, 13 s",
        ),
        (each(step, WORKERS, 19), 12, f"{NEXT} {several} 19, 12 s"),
        (
            [Failed("worker 0/1", "died", "was killed", ""), Left(1, "has left", 1.0), Started("worker 0/1", 2)],
            5,
            f"waiting for worker 0/1 {SCRIPT}, 5 s",
        ),
        ([Connects("worker 0/1"), step("worker 0/1", 20), step("worker 0/0", 20)], 1, ""),
        ([finished("worker 0/1")], 3, f"{NEXT} worker 0/0, after step 20, 4 s"),
        ([Exited("worker 0/0", 1, 0)], 4, "waiting for server 0/0, server 0/1 to end, 38 s"),
        (each(Exited, SERVERS, 1, 0), 9, ""),
    ):
        assert training(*events, then=then) == expected


def test_a_worker_that_is_behind_is_named_with_its_step(training: Waiting) -> None:
    for number in range(19, 26):
        found = training(*each(step, WORKERS[1:], number), then=1)
    assert found == "waiting for worker 0/0, which is behind: step 18, others 25, 7 s"
    assert training(step("worker 0/0", 19)) == "", "it is slow, and goes on"


ALONE = Cluster(nworker_groups=2, server_worker_separate=True)
GROUP = Cluster(nworkers_per_group=2, server_worker_separate=True)
OUTER = Updater(type=UpdaterType.kSGD, learning_rate=LRGen(ChangeMethod.kFixed, base_lr=1.0))
BOTH = "the next step of worker 0/0, worker 0/1"


@pytest.mark.parametrize(
    ("cluster", "slow", "lead", "what"),
    [
        (ALONE, "worker 1/0", 15, "the next step of worker 0/0, worker 1/0"),
        (replace(ALONE, max_staleness=20), "worker 1/0", 15, "the next step of worker 0/0, worker 1/0"),
        (replace(ALONE, max_staleness=3), "worker 1/0", 3, "worker 1/0, which is behind"),
        (GROUP, "worker 0/1", 1, "worker 0/1, which is behind"),
        (replace(GROUP, backup=1), "worker 0/1", 2, BOTH),
        (replace(GROUP, outer=OUTER, sync_freq=64), "worker 0/1", 15, BOTH),
        (replace(GROUP, outer=OUTER, sync_freq=64, quorum=1), "worker 0/1", 70, BOTH),
    ],
)
def test_only_a_worker_that_others_wait_for_is_behind(cluster: Cluster, slow: str, lead: int, what: str) -> None:
    topology = layout(cluster)
    wait = Waiting(topology)
    workers = [str(worker) for unit in topology.units for worker in unit.workers]
    servers = [str(server) for unit in topology.units for server in unit.servers]
    wait(*each(Started, ["unit 0", *servers, *workers], 1), *each(Serving, servers, ("x",), 1))
    assert f"waiting for {what}" in wait(*(step(who, 18 + lead * (who != slow)) for who in workers), then=8)
    # The others go on.
    assert (what in wait(step(workers[0], 19 + lead), then=1)) == ("behind" in what)
    # The slow worker is done with its work before the others.
    assert wait(finished(slow), then=11).startswith(f"{NEXT} {workers[0]},")
    if cluster == ALONE:
        return
    # What the others report that they wait for.
    wait(step(slow, 18), then=10)
    found = wait(Waits(workers[0], 12.0))
    assert (slow in found and workers[0] not in found) is not bool(cluster.backup or cluster.quorum)


def test_servers_alone_and_in_one_process() -> None:
    units = tuple(unit for unit in TOPOLOGY.units if unit.servers)[:1]
    (who,) = map(str, units[0].servers)
    wait = Waiting(replace(TOPOLOGY, units=units))
    assert wait(Started(who, 1), then=2) == f"waiting for {who} to open its addresses, 2 s"
    assert wait(Serving(who, ("x",), 1), then=60) == ""
    # A process with several servers has the name of the first one.
    topology = layout(replace(CLUSTER, nservers_per_procs=2))
    ((first, _),) = [unit.servers for unit in topology.units if unit.servers]
    found = Waiting(topology)(
        Started(str(first), 1), Serving(str(first), ("x",), 1), *each(Started, WORKERS, 1), then=2
    )
    assert found == "waiting for server 0/1 to open its addresses, 2 s"


# ---- how it is shown -------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    displays_go_by(made, monkeypatch)
    return made


def test_plain_lines_come_after_a_while_and_then_each_minute(clock: Clock) -> None:
    text = io.StringIO()
    shown = PlainProgress(report_of(TOPOLOGY), Console(file=text, width=20))
    told: list[tuple[float, str]] = []
    while clock.now < 3 * REPEAT_S:
        shown.check()
        told += [(clock.now, line) for line in text.getvalue().splitlines()[len(told) :]]
        clock.now += 1
    assert [at for at, _ in told] == [FIRST_S, FIRST_S + REPEAT_S, FIRST_S + 2 * REPEAT_S]
    assert told[1][1].startswith("topotrain: waiting for unit 0") and told[1][1].endswith(", 70 s")
    # Another wait has its own first line.
    for event in each(Started, [*UNITS, *SERVERS, *WORKERS], 1):
        shown(event)
    shown.check()
    clock.now += FIRST_S
    shown.check()
    *before, last = text.getvalue().splitlines()
    assert last == "topotrain: waiting for server 0/0, server 0/1 to open its addresses, 10 s"
    # Slow steps have a line a minute.
    for event in each(Serving, SERVERS, ("x",), 1):
        shown(event)
    for second in range(180):
        for event in each(step, WORKERS, second // 15) if second % 15 == 0 else ():
            shown(event)
        shown.check()
        clock.now += 1
    assert len([line for line in text.getvalue().splitlines()[len(before) + 1 :] if "waiting for" in line]) == 3


def test_the_live_table_shows_it_with_seconds_and_not_at_the_end(clock: Clock) -> None:
    def drawn(table: LiveTable) -> str:
        console = Console(file=io.StringIO(), width=120)
        console.print(table._renderable())
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    live = Console(file=io.StringIO(), force_terminal=True, width=120, height=30, color_system=None)
    with LiveTable(report_of(TOPOLOGY), live) as table:
        serving = each(Serving, SERVERS, ("x",), 1)
        for event in (*each(Started, [*UNITS, *SERVERS, *WORKERS], 1), *serving, *each(Connects, WORKERS[1:])):
            table(event)
        assert "waiting" not in drawn(table)
        clock.now += 4
        assert f"waiting for worker 0/0 {SCRIPT}, 4 s" in drawn(table)
    assert "waiting" not in drawn(table)


def test_without_progress_there_is_no_line_about_waits(clock: Clock) -> None:
    text = io.StringIO()
    with QuietProgress(report_of(TOPOLOGY), Console(file=text, width=20)) as shown:
        clock.now += 100
        shown(Notice("worker 0/0", "still here"))
    assert text.getvalue() == "topotrain: worker 0/0: still here\n"
