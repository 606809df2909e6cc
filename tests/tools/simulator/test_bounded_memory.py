"""What a server keeps does not depend on how many epochs it has seen: counted after few and after many."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

import fault_trial as trial
import pytest
import torch
from fault_schedule import Fault, FaultSchedule
from fault_trial import Trial
from faulty_network import NetworkFaults
from seeds import SOAK
from simulation import job

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Commit
from topotrain.core.server.consistency import EVERYTHING, STATIC, AppliedBatches
from topotrain.training.data.data_messages import Lease, LeaseRelease, LeaseRequest
from topotrain.training.data.lease_queue import LeaseQueue

pytestmark = pytest.mark.simulated


def fields(value: object) -> Iterator[tuple[str, Any]]:
    """Names and values of an object's own fields."""
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        for name in getattr(cls, "__slots__", ()):
            if isinstance(name, str) and hasattr(value, name):
                yield name, getattr(value, name)


def entries(root: object) -> Counter[str]:
    """How many entries the containers below an object have, by the path that leads there."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    kept: list[object] = []
    todo: deque[tuple[str, object]] = deque([(type(root).__name__, root)])
    while todo:
        path, value = todo.popleft()
        if id(value) in seen or isinstance(value, str | bytes | int | float | torch.Tensor | type):
            continue
        seen.add(id(value))
        kept.append(value)  # or another object may get its id
        if isinstance(value, Mapping):
            found[path] += len(value)
            todo.extend((f"{path}[]", item) for item in value.values())
            todo.extend((f"{path}{{}}", item) for item in value)
        elif isinstance(value, list | tuple | set | frozenset | deque):
            found[path] += len(value)
            todo.extend((f"{path}[]", item) for item in value)
        # The disk of a simulated host, and the record of the trial behind it, are no part of a server.
        elif type(value).__module__.startswith("topotrain"):
            todo.extend((f"{path}.{name}", item) for name, item in fields(value))
    return found


LAYOUTS: dict[str, dict[str, Any]] = {
    "downpour": {"groups": 3, "workers": 1, "shards": 2},
    "downpour of pairs": {"groups": 2, "workers": 2},
    "sandblaster": {"groups": 1, "workers": 2, "shards": 2},
    "hogwild": {"groups": 3, "nserver_groups": 3},
}
EVERY = (0.0, 0.005)
CASES = [
    (layout, mode, every)
    for number, (layout, mode) in enumerate((layout, mode) for layout in LAYOUTS for mode in ("lease", "static"))
    for every in (EVERY if SOAK else EVERY[(number + number // 2) % 2 :][:1])
    if (layout, mode) != ("sandblaster", "lease")
]


def lived(layout: str, mode: str, every: float, epochs: int, kind: type[Trial] = Trial) -> Trial:
    """A job of so many epochs, one of whose groups dies in the first ones."""
    # Groups that others do not read for stay behind; and with nobody there nobody looks at the clock.
    mortal = mode == "lease" or (layout == "sandblaster" and not every)
    faults = () if not mortal else (Fault(0, 0, after=4, kind=Commit, away=0.001),)
    schedule = FaultSchedule("calm", 3, epochs, mode, True, faults, every=every)
    settings = {"snapshot_s": 30.0 if every else 0.0, **LAYOUTS[layout]}
    found = kind(job(**settings), 5, schedule, NetworkFaults(delay=(0.0001, 0.001))).run()
    assert not found.wrong() and bool(found.snapshots) is bool(every) and found.kills == len(faults)
    return found


def grown(few: Trial, many: Trial) -> dict[str, tuple[int, int]]:
    """Containers of servers, of clients and of the newest snapshot that have more entries after more epochs."""
    found = {}
    for name, of in (
        *((str(me), lambda trial, me=me: trial.sim_servers[me].server) for me in few.sim_servers),
        *((str(me), lambda trial, me=me: trial.clients[me]) for me in few.clients),
        ("snapshot", lambda trial: trial.disks and trial.disks.last),
    ):
        short, long = entries(of(few)), entries(of(many))
        found |= {f"{name}: {at}": (short[at], long[at]) for at in long if long[at] > short[at] + 12}
    return found


@pytest.mark.parametrize(("layout", "mode", "every"), CASES)
def test_after_many_epochs_a_job_keeps_no_more_than_after_few(
    monkeypatch: pytest.MonkeyPatch, layout: str, mode: str, every: float
) -> None:
    monkeypatch.setattr(trial, "LONG", 1e6)
    few, many = (lived(layout, mode, every, epochs) for epochs in ((12, 48) if SOAK else (8, 24)))
    assert grown(few, many) == {}


def test_epochs_that_are_left_early_are_over_once_every_group_is_past_them() -> None:
    book, workers = LeaseQueue(2), [Address(Role.WORKER, group, 0) for group in (0, 1)]
    for epoch in range(200):
        for who in workers:
            ((_, lease),) = book.handle(who, LeaseRequest(epoch, 0, 100, 0, 0, False))
            assert book.handle(who, LeaseRelease(epoch, 0, lease.first + 1)) == []
    assert book.open_epochs == (198, 199), "a fresh process may begin in the epoch before the last"
    assert book.handle(workers[0], LeaseRequest(197, 0, 100, 0, 0, True)) == [(workers[0], Lease(197, 0, -1, 0, -1))]
    assert sum(entries(book).values()) < 100


def test_a_group_that_comes_late_keeps_the_epochs_that_it_has_not_seen_and_one_that_has_left_does_not() -> None:
    book, worker = LeaseQueue(2), Address(Role.WORKER, 0, 0)
    for epoch in range(20):
        ((_, lease),) = book.handle(worker, LeaseRequest(epoch, 0, 100, 0, 0, False))
        book.handle(worker, LeaseRelease(epoch, 0, lease.first + 1))
    assert len(book.open_epochs) == 20
    book.group_over(1)
    book.handle(worker, LeaseRequest(20, 0, 100, 0, 0, False))
    assert book.open_epochs == (19, 20)


def test_what_is_forgotten_of_a_stream_is_known_and_not_new() -> None:
    streams = AppliedBatches()
    for epoch in range(10):
        assert streams.verdict((epoch << 32 | 7, 0, 2), 1) == "new"
        streams.record((epoch << 32 | 7, 0, 2), 1)
    assert set(streams.counts()) == {8 << 32 | 7, 9 << 32 | 7}
    assert [streams.verdict((epoch << 32 | 7, 0, 2), 1) for epoch in (0, 7, 8, 9)] == ["known"] * 4
    assert streams.count(0 << 32 | 7, 1) == EVERYTHING and streams.count(9 << 32 | 7, 1) == 3
    assert streams.verdict((9 << 32 | 8, 0, 0), 1) == "new", "another lease of the epoch"
    assert streams.verdict((3 << 32 | 8, 0, 0), 0) == "new", "another group, which is not so far yet"


def test_streams_are_kept_as_long_as_a_snapshot_has_to_list_them() -> None:
    streams = AppliedBatches()
    streams.keep_until_closed()
    for epoch in range(10):
        streams.record((epoch << 32 | STATIC | 2, 0, 2))
    assert len(streams.counts()) == 10
    streams.close(6)
    assert {stream >> 32 for stream in streams.counts()} == {6, 7, 8, 9}
