"""What a process reports of its connections and servers: changes only, once a second, with bounded lists."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from topotrain.config.sharding import Parameter, cut
from topotrain.config.topology import Address, Role
from topotrain.core.events import Rounds, ServerLoad, Slices, Traffic
from topotrain.launch.runtime.host_reports import COUNTS_S, INTERVAL_S, MOST_SLICES, HostReports, slices

COORDINATOR = Address(Role.SERVER, 0, 0)
SERVER, WORKER = Address(Role.SERVER, 0, 1), Address(Role.WORKER, 0, 0)
PLACE: Any = None  # only of the coordinator is it asked


class Router:
    def __init__(self) -> None:
        self.sent: dict[Address, int] = {}

    def sent_by(self, me: Address) -> Mapping[Address, int]:
        return self.sent


def parameters(count: int) -> list[Parameter]:
    return [Parameter(f"w{number}", (100,), (1,), "float32", True) for number in range(count)]


def server(version: int, busy_s: float, model: Any = None, began: int = 0) -> Any:
    state = SimpleNamespace(model=model, version=version, start=SimpleNamespace(version=began))
    return SimpleNamespace(server=SimpleNamespace(state=state), busy_s=busy_s)


def test_the_slices_of_all_servers_are_the_model() -> None:
    made = cut(parameters(7), shards=3)
    found: dict[str, list[tuple[int, int]]] = {}
    for index in range(3):
        event = slices(Address(Role.SERVER, 0, index), made)
        assert (event.who, event.left_out) == (f"server 0/{index}", 0)
        for name, first, count in zip(event.names, event.first, event.count, strict=True):
            found.setdefault(name, []).append((first, count))
    assert found.keys() == {f"w{number}" for number in range(7)}
    for parts in found.values():
        at = 0
        for first, count in sorted(parts):
            assert first == at
            at += count
        assert at == 100


def test_a_long_list_of_slices_is_cut_and_says_so() -> None:
    event = slices(Address(Role.SERVER, 0, 0), cut(parameters(MOST_SLICES + 20), shards=1))
    assert len(event.names) == len(event.first) == len(event.count) == MOST_SLICES and event.left_out == 20


def test_only_changes_are_reported() -> None:
    reports, router = HostReports(PLACE), Router()
    host = {SERVER: server(0, 0.0)}
    assert list(reports.servers(host, router)) == [ServerLoad("server 0/1", 0, 0, 0.0)]  # type: ignore[arg-type]
    assert list(reports.servers(host, router)) == []  # type: ignore[arg-type]
    host[SERVER] = server(12, 0.5, SimpleNamespace(map=cut(parameters(2), shards=2)), began=10)
    router.sent[WORKER] = 70
    first, load, traffic = reports.servers(host, router)  # type: ignore[arg-type]
    assert isinstance(first, Slices)
    assert load == ServerLoad("server 0/1", 2, 12, 0.5)
    assert traffic == Traffic("server 0/1", {"worker 0/0": 70})
    router.sent[WORKER] = 71
    assert list(reports.servers(host, router)) == [Traffic("server 0/1", {"worker 0/0": 71})]  # type: ignore[arg-type]


def test_extensions_of_coordinators_tell_changed_counts_in_good_time() -> None:
    said, reports = [Rounds("server 0/0", {"2": 1}, 0.0, 0, ())], HostReports(PLACE)
    hooks = SimpleNamespace(interim=[SimpleNamespace(interim_events=lambda: tuple(said))])
    both = {address: SimpleNamespace(server=SimpleNamespace(hooks=hooks)) for address in (COORDINATOR, SERVER)}
    found = [list(reports.counts(both, now)) for now in (5.0, 5.0 + COUNTS_S / 2, 5.0 + COUNTS_S)]  # type: ignore[arg-type]
    assert found == [said, [], []]
    said[:] = [Rounds("server 0/0", {"2": 2}, 0.0, 0, ())]
    assert list(reports.counts(both, 5.0 + 2 * COUNTS_S)) == said  # type: ignore[arg-type]


def test_a_report_is_due_once_a_second_and_at_the_end() -> None:
    reports = HostReports(PLACE)
    assert [reports.due(at) for at in (5.0, 5.0 + INTERVAL_S / 2, 5.0 + INTERVAL_S)] == [True, False, True]
    assert reports.due(5.0 + INTERVAL_S, last=True)


@pytest.mark.parametrize("count", [0, 1])
def test_a_model_may_be_small(count: int) -> None:
    assert len(slices(SERVER, cut(parameters(count), shards=2)).names) <= 1
