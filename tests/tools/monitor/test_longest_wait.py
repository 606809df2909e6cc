"""What a job is said to wait for, phase by phase, under a clock that the test moves."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.recorded_jobs import displays_go_by, report_of
from topotrain.config.job import ChangeMethod, Cluster, LRGen, Updater, UpdaterType
from topotrain.config.topology import layout
from topotrain.core.events import (
    Connects,
    Event,
    Exited,
    Failed,
    Finished,
    Left,
    Serving,
    Started,
    StepDone,
    Waits,
)
from topotrain.tools.monitor.longest_wait import QUIET_S, LongestWait, longest
from topotrain.tools.monitor.process_tally import ProcessStates
from topotrain.tools.monitor.progress_display import FIRST_S, REPEAT_S, LiveTable, PlainProgress

CLUSTER = Cluster(nworker_groups=2, nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True)
TOPOLOGY = layout(CLUSTER)
WORKERS = [str(worker) for unit in TOPOLOGY.units for worker in unit.workers]
SERVERS = [str(server) for unit in TOPOLOGY.units for server in unit.servers]
UNITS = [f"unit {unit.rank}" for unit in TOPOLOGY.units]


def step(who: str, number: int) -> StepDone:
    return StepDone(who, 1.0, number, number, None, 0.0, 0, 0, 0)


def wait_of(states: ProcessStates, now: float) -> LongestWait | None:
    return longest(states.all(), states.topology.cluster, now)


class Clock:
    """A job and its time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits = ProcessStates(TOPOLOGY, self.now)

    def __call__(self) -> float:
        return self.now

    def tell(self, *events: Event, then: float = 0.0) -> None:
        for event in events:
            self.waits.on_event(event, self.now)
        self.now += then

    def started(self) -> None:
        """All processes run, and the servers serve."""
        self.tell(*(Started(who, 1) for who in (*UNITS, *SERVERS, *WORKERS)))
        self.tell(*(Serving(who, ("x",), 1) for who in SERVERS))

    def training(self) -> None:
        self.started()
        self.tell(*(Connects(who) for who in WORKERS), *(step(who, 18) for who in WORKERS))

    @property
    def words(self) -> str:
        found = wait_of(self.waits, self.now)
        return "" if found is None else found.words()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    displays_go_by(made, monkeypatch)
    return made


def test_the_phases_of_a_start_in_their_order(clock: Clock) -> None:
    clock.now += 3
    assert "unit 0, unit 1" in clock.words and clock.words.endswith("to load torch and start its processes, 3 s")
    clock.tell(*(Started(who, 1) for who in UNITS), then=2)
    assert clock.words.endswith("to load torch and start its processes, 2 s")
    clock.tell(*(Started(who, 1) for who in (*SERVERS, *WORKERS)), then=4)
    assert clock.words == "waiting for server 0/0, server 0/1 to open its addresses, 4 s"
    clock.tell(Serving("server 0/0", ("x",), 1), then=1)
    assert clock.words == "waiting for server 0/1 to open its addresses, 5 s"
    clock.tell(Serving("server 0/1", ("x",), 1), *(Connects(who) for who in WORKERS[:2]), then=1)
    assert clock.words == "waiting for worker 1/0, worker 1/1 to import the script, up to tt.prepare, 6 s"
    clock.tell(Connects("worker 1/1"), then=7)
    assert clock.words == "waiting for worker 1/0 to import the script, up to tt.prepare, 13 s"
    clock.tell(Connects("worker 1/0"), then=2)
    assert clock.words == "waiting for the first step of worker 0/0, worker 0/1 and 2 more, 10 s"
    clock.tell(*(step(who, 1) for who in WORKERS[1:]))
    assert clock.words == "waiting for the first step of worker 0/0, 10 s"
    clock.tell(step("worker 0/0", 1), then=QUIET_S - 0.5)
    assert clock.words == ""


def test_a_worker_that_is_behind_is_named_with_its_step(clock: Clock) -> None:
    clock.training()
    for number in range(19, 26):
        clock.tell(*(step(who, number) for who in WORKERS[1:]), then=1)
    assert clock.words == "waiting for worker 0/0, which is behind: step 18, others 25, 7 s"
    clock.tell(step("worker 0/0", 19))
    # It is slow, and goes on.
    assert clock.words == ""


ALONE = Cluster(nworker_groups=2, server_worker_separate=True)
GROUP = Cluster(nworkers_per_group=2, server_worker_separate=True)
OUTER = Updater(type=UpdaterType.kSGD, learning_rate=LRGen(ChangeMethod.kFixed, base_lr=1.0))
NEXT = "the next step of worker 0/0, worker 0/1"


@pytest.mark.parametrize(
    ("cluster", "slow", "lead", "what"),
    [
        (ALONE, "worker 1/0", 15, "the next step of worker 0/0, worker 1/0"),
        (replace(ALONE, max_staleness=20), "worker 1/0", 15, "the next step of worker 0/0, worker 1/0"),
        (replace(ALONE, max_staleness=3), "worker 1/0", 3, "worker 1/0, which is behind"),
        (GROUP, "worker 0/1", 1, "worker 0/1, which is behind"),
        (replace(GROUP, backup=1), "worker 0/1", 2, NEXT),
        (replace(GROUP, outer=OUTER, sync_freq=64), "worker 0/1", 15, NEXT),
        (replace(GROUP, outer=OUTER, sync_freq=64, quorum=1), "worker 0/1", 70, NEXT),
    ],
)
def test_only_a_worker_that_others_wait_for_is_behind(cluster: Cluster, slow: str, lead: int, what: str) -> None:
    topology = layout(cluster)
    waits = ProcessStates(topology, 0.0)
    workers = [str(worker) for unit in topology.units for worker in unit.workers]
    for who in ("unit 0", *(str(server) for unit in topology.units for server in unit.servers), *workers):
        waits.on_event(Started(who, 1), 0.0)
        waits.on_event(Serving(who, ("x",), 1), 0.0) if who.startswith("server") else None
    for who in workers:
        waits.on_event(step(who, 18 if who == slow else 18 + lead), 1.0)
    found = wait_of(waits, 9.0)
    assert found is not None and found.what == what
    # The others go on.
    waits.on_event(step(workers[0], 19 + lead), 8.0)
    found = wait_of(waits, 9.0)
    assert (None if found is None else found.what) == (what if "behind" in what else None)
    # The slow worker is done with its work before the others.
    waits.on_event(Finished(slow, 18, 1, 0.0, 0, 0, 0), 9.0)
    found = wait_of(waits, 20.0)
    assert found is not None and found.what == f"the next step of {workers[0]}"
    if cluster == ALONE:
        return
    # What the others report that they wait for.
    waits.on_event(step(slow, 18), 20.0)
    waits.on_event(Waits(workers[0], 12.0), 30.0)
    found = wait_of(waits, 30.0)
    awaited = not (cluster.backup or cluster.quorum)
    assert found is not None and (slow in found.what and workers[0] not in found.what) is awaited


def test_a_synchronous_job_that_stands_still(clock: Clock) -> None:
    clock.training()
    clock.now += 12
    assert clock.words == "waiting for the next step of worker 0/0, worker 0/1 and 2 more, after step 18, 12 s"
    clock.tell(*(Waits(who, 12.0) for who in WORKERS if who != "worker 1/0"), then=1)
    assert clock.words == "waiting for the next step of worker 1/0, for which the others wait, 13 s"
    clock.tell(*(step(who, 19) for who in WORKERS), then=12)
    assert clock.words == "waiting for the next step of worker 0/0, worker 0/1 and 2 more, after step 19, 12 s"


def test_the_end_of_a_job(clock: Clock) -> None:
    clock.training()
    clock.tell(*(Finished(who, 18, 1, 0.0, 0, 0, 0) for who in WORKERS[1:]), then=3)
    assert clock.words == "waiting for the next step of worker 0/0, after step 18, 3 s"
    clock.tell(Exited("worker 0/0", 1, 0), then=4)
    assert clock.words == "waiting for server 0/0, server 0/1 to end, 7 s"
    clock.tell(*(Exited(who, 1, 0) for who in SERVERS), then=9)
    assert clock.words == ""


def test_a_restart_and_a_group_that_leaves(clock: Clock) -> None:
    clock.training()
    clock.tell(
        Failed("worker 0/1", "died", "was killed", ""), Left(1, "has left", 1.0), Started("worker 0/1", 2), then=5
    )
    assert clock.words == "waiting for worker 0/1 to import the script, up to tt.prepare, 5 s"
    clock.tell(Connects("worker 0/1"), step("worker 0/1", 19), step("worker 0/0", 19), then=1)
    assert clock.words == ""


def test_servers_alone_and_in_one_process() -> None:
    units = tuple(unit for unit in TOPOLOGY.units if unit.servers)[:1]
    (who,) = map(str, units[0].servers)
    waits = ProcessStates(replace(TOPOLOGY, units=units), 0.0)
    waits.on_event(Started(who, 1), 1.0)
    found = wait_of(waits, 3.0)
    assert found is not None and found.words() == f"waiting for {who} to open its addresses, 2 s"
    waits.on_event(Serving(who, ("x",), 1), 4.0)
    assert wait_of(waits, 60.0) is None
    # A process with several servers has the name of the first one.
    topology = layout(replace(CLUSTER, nservers_per_procs=2))
    waits = ProcessStates(topology, 0.0)
    ((first, _),) = [unit.servers for unit in topology.units if unit.servers]
    for event in (Started(str(first), 1), Serving(str(first), ("x",), 1), *(Started(who, 1) for who in WORKERS)):
        waits.on_event(event, 1.0)
    found = wait_of(waits, 3.0)
    assert found is not None and found.words() == "waiting for server 0/1 to open its addresses, 2 s"


def test_plain_lines_come_after_a_while_and_then_each_minute(clock: Clock) -> None:
    text = io.StringIO()
    began = clock.now
    shown = PlainProgress(report_of(TOPOLOGY), Console(file=text, width=20))
    told = []
    while clock.now < began + 3 * REPEAT_S:
        shown.check()
        new = text.getvalue().splitlines()[len(told) :]
        told += [(clock.now - began, line) for line in new]
        clock.now += 1
    assert [at for at, _ in told] == [FIRST_S, FIRST_S + REPEAT_S, FIRST_S + 2 * REPEAT_S]
    assert told[1][1].startswith("topotrain: waiting for unit 0") and told[1][1].endswith(", 70 s")
    # Another wait has its own first line.
    for who in (*UNITS, *SERVERS, *WORKERS):
        shown(Started(who, 1))
    shown.check()
    clock.now += FIRST_S
    shown.check()
    *_, last = text.getvalue().splitlines()
    assert last == "topotrain: waiting for server 0/0, server 0/1 to open its addresses, 10 s"
    # Slow steps have a line a minute.
    for who in SERVERS:
        shown(Serving(who, ("x",), 1))
    before = len(text.getvalue().splitlines())
    for second in range(180):
        if second % 15 == 0:
            for who in WORKERS:
                shown(step(who, second // 15))
        shown.check()
        clock.now += 1
    assert len([line for line in text.getvalue().splitlines()[before:] if "waiting for" in line]) == 3


def test_the_live_table_shows_it_with_seconds_and_not_at_the_end(clock: Clock) -> None:

    def drawn(table: LiveTable) -> str:
        console = Console(file=io.StringIO(), width=120)
        console.print(table._renderable())
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    live = Console(file=io.StringIO(), force_terminal=True, width=120, height=30, color_system=None)
    with LiveTable(report_of(TOPOLOGY), live) as table:
        for who in (*UNITS, *SERVERS, *WORKERS):
            table(Started(who, 1))
        for who in SERVERS:
            table(Serving(who, ("x",), 1))
        for who in WORKERS[1:]:
            table(Connects(who))
        assert "waiting" not in drawn(table)
        clock.now += 4
        assert "waiting for worker 0/0 to import the script, up to tt.prepare, 4 s" in drawn(table)
    assert "waiting" not in drawn(table)
