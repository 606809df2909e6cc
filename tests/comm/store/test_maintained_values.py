"""What a process keeps in a store is written again where it is missing, and nothing else is touched."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folder_wipe import block, wipe

from tests.support.launch_targets import wait_for
from topotrain.comm.store import StoreError, maintained_values, open_store
from topotrain.comm.store.discovery.job_registry import JobRecord, Registry
from topotrain.comm.store.maintained_values import MaintainedValues
from topotrain.comm.store.store_base import KEEP_S, Store, within


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintained_values, "LOOK_S", 0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Store:
    return open_store(folder.as_uri())


def test_values_come_back_into_a_store_that_was_wiped(store: Store, folder: Path) -> None:
    values = MaintainedValues(store)
    store.set("b", b"2")
    values.set("a", b"1")
    values.keep("b", b"2")
    for _ in range(3):
        wipe(folder)
        assert (store.watch("a", 20), store.watch("b", 20)) == (b"1", b"2")
    values.close()


def test_what_another_process_has_written_stays(store: Store) -> None:
    values = MaintainedValues(store)
    values.set("a", b"old")
    values.set("b", b"ours")
    store.set("a", b"new")
    for _ in range(3):
        store.delete("b")
        assert store.watch("b", 20) == b"ours"
    assert store.get("a") == b"new"
    values.close()


class Kept:
    """Records for how long a store keeps what is written."""

    def __init__(self) -> None:
        self.written: list[tuple[str, bytes | None, float | None]] = []

    def get(self, key: str) -> bytes:
        return b"1"

    def set(self, key: str, value: bytes, ttl: float | None = None) -> None:
        self.written.append((key, None, ttl))

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes, ttl: float | None = None) -> bool:
        self.written.append((key, expected, ttl))
        return True


def test_no_value_of_a_job_stays_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody removes what a killed job has written, as in Redis."""
    kept: Any = Kept()
    job = within(kept, "jobs/j")
    job.set("a", b"1")
    job.compare_and_set("b", None, b"1")
    job.set("c", b"1", 3.0)
    assert kept.written == [("jobs/j/a", None, KEEP_S), ("jobs/j/b", None, KEEP_S), ("jobs/j/c", None, 3.0)]
    kept.written.clear()
    monkeypatch.setattr(maintained_values, "RENEW_S", 0.0)
    values = MaintainedValues(kept)
    values.set("d", b"1")
    wait_for(lambda: ("d", b"1", KEEP_S) in kept.written)  # renewed while the process runs
    values.close()
    assert kept.written[0] == ("d", None, KEEP_S)


def test_after_closing_nothing_is_written_and_no_thread_is_left(store: Store) -> None:
    before = set(threading.enumerate())
    values = MaintainedValues(store)
    values.close()  # without a value there is no thread either
    values = MaintainedValues(store)
    values.set("a", b"1")
    values.drop("b")
    values.set("b", b"2")
    values.drop("b")
    store.delete("b")
    store.delete("a")
    store.watch("a", 20)
    values.close()
    assert store.get("b") is None
    assert set(threading.enumerate()) <= before
    values.keep("c", b"3")
    assert set(threading.enumerate()) <= before


def test_values_may_be_closed_while_their_thread_is_being_started(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, failed = MaintainedValues(store), []
    closing = threading.Thread(target=values.close)
    start = threading.Thread.start
    monkeypatch.setattr(threading, "excepthook", failed.append)

    def slow_start(thread: threading.Thread) -> None:
        start(closing)
        closing.join(0.1)  # it waits here, or tries to join what has not been started
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow_start)
    values.keep("a", b"1")
    closing.join(20)
    assert not failed and not closing.is_alive()


def test_a_store_that_is_away_is_asked_again(store: Store, folder: Path) -> None:
    values = MaintainedValues(store)
    values.set("a", b"1")
    block(folder)
    with pytest.raises(StoreError):
        values.set("b", b"2")
    folder.unlink()
    assert store.watch("a", 20) == b"1"
    assert store.get("b") is None
    values.close()


def test_what_was_written_first_is_written_again_last(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes after a wipe, and finds the value that leads to the others, finds the others, too."""
    monkeypatch.setattr(maintained_values, "LOOK_S", 1000)
    seen: list[str] = []
    values = MaintainedValues(store)
    values.keep("first", b"1")
    values.keep("second", b"2")
    write = store.compare_and_set
    monkeypatch.setattr(store, "compare_and_set", lambda key, *rest: (seen.append(key), write(key, *rest))[1])
    values._check(renews=False)
    values._check(renews=False)
    assert seen == ["second", "first"]
    values.close()


def test_a_job_whose_record_is_gone_is_entered_again(store: Store, folder: Path) -> None:
    registry, record = Registry(store), JobRecord("j", "night", started=12.0, units=2, hosts=("a", "b"))
    registry.add(record)
    wipe(folder)
    registry.keep(record)
    (found,) = registry.list()
    assert replace(found, heartbeat=0.0) == record
    registry.end("j", "done")
    registry.keep(record)
    assert registry.view("j").state == "done"
