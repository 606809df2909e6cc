"""The meeting place: every kind of store keeps the same promises."""

import os
import threading
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topotrain.rendezvous import StoreError, open_store
from topotrain.rendezvous import file as file_module
from topotrain.rendezvous.file import FileStore
from topotrain.rendezvous.keys import check_key


@pytest.fixture(params=["file"])
def url(request, tmp_path):
    return f"{request.param}://{tmp_path}/a%20store"


@pytest.fixture
def store(url):
    return open_store(url)


def test_values_are_kept_whole(store, url):
    assert store.get("a") is None
    for value in (b"", b"\0\xff" * 1000, b"short"):
        store.set("a", value)
        store.set("a/b", b"another")
        assert open_store(url).get("a") == value
    assert store.get("a/b") == b"another"


def test_compare_and_set(store):
    assert not store.compare_and_set("k", b"x", b"1")
    assert store.get("k") is None
    assert store.compare_and_set("k", None, b"1")
    assert not store.compare_and_set("k", None, b"2")
    assert store.compare_and_set("k", b"1", b"2")
    assert store.get("k") == b"2"


def test_counting_together_loses_nothing(url):
    def count():
        store = open_store(url)
        for _ in range(20):
            while True:
                seen = store.get("n")
                if store.compare_and_set("n", seen, str(int(seen or b"0") + 1).encode()):
                    break

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert open_store(url).get("n") == b"80"


def test_watch_sees_what_comes_and_what_changes(store, url):
    store.set("k", b"1")
    assert store.watch("k", 0) == b"1"
    for known, value in ((b"1", b"2"), (b"2", b"3")):
        thread = threading.Thread(target=partial(open_store(url).set, "k", value))
        thread.start()
        assert store.watch("k", 10, known) == value
        thread.join()


def test_watch_ends_at_its_deadline(store):
    with pytest.raises(TimeoutError, match="nothing new under 'k'"):
        store.watch("k", 0.01)
    store.set("k", b"1")
    with pytest.raises(TimeoutError):
        store.watch("k", 0, known=b"1")


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "..", "a/../b", ".a", "A", "a b", "a+b", "a\n", "x" * 201])
def test_bad_keys_are_refused(store, key):
    for call in (store.get, partial(store.set, value=b""), partial(store.watch, timeout=0)):
        with pytest.raises(ValueError, match="key = "):
            call(key)


@given(st.text(alphabet="ab.-_/+\0A ", max_size=12))
def test_a_key_is_one_file_in_the_directory(key):
    try:
        check_key(key)
    except ValueError:
        return
    name = key.replace("/", "+")
    assert os.path.basename(name) == name and not name.startswith(".")


def test_a_value_too_big_is_refused(store):
    with pytest.raises(ValueError, match="at most 1048576"):
        store.set("k", bytes((1 << 20) + 1))


@pytest.mark.parametrize(
    "url", ["redis://host", "tcp://127.0.0.1:1", "/tmp/x", "", "file://host/x", "file:x", "file:///x?y"]
)
def test_other_addresses_are_refused_with_what_is_accepted(url):
    with pytest.raises(StoreError, match="file:///ABSOLUTE/DIRECTORY"):
        open_store(url)


def test_the_directory_is_closed_to_others(tmp_path):
    FileStore(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(StoreError, match="0700"):
        FileStore(tmp_path / "open")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        FileStore(tmp_path / "file")


def test_a_stopped_holder_of_the_lock_does_not_stop_others_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(file_module, "LOCK_SECONDS", 0.01)
    first, second = FileStore(tmp_path / "s"), FileStore(tmp_path / "s")
    with first._locked(), pytest.raises(StoreError, match="is its holder stopped"):
        second.set("k", b"1")
    second.set("k", b"1")
    assert first.get("k") == b"1"
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == ["LOCK", "k"]
