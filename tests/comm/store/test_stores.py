"""The meeting place: every kind of store keeps the same promises."""

import errno
import fcntl
import os
import random
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import pytest
from launch_targets import wait_for
from redis_server import redis_urls as redis_urls  # a fixture

from topotrain.comm.request_reply import RequestChannel
from topotrain.comm.store import StoreError, open_store, serve_store, within
from topotrain.comm.store import file_store as file_module
from topotrain.comm.store import redis_store as redis_module
from topotrain.comm.store import tcp_store as tcp_module
from topotrain.comm.store.discovery.static_addresses import numeric
from topotrain.comm.store.file_store import FileStore
from topotrain.comm.store.memory_store import MemoryTable
from topotrain.comm.store.store_url import parse
from topotrain.comm.store.tcp_store import TcpStore

SECRET = bytes(range(32))
ATTEMPT = TcpStore._attempt


@pytest.fixture(params=["file", "tcp", "redis"])
def url(request, tmp_path, redis_urls, monkeypatch):
    monkeypatch.setenv("TOPOTRAIN_TOKEN", SECRET.hex())
    if request.param == "file":
        yield f"file://{tmp_path}/a%20store"
    elif request.param == "tcp":
        server = serve_store("127.0.0.1", 0, SECRET)
        yield server.url
        server.close()
    else:
        url = redis_urls(request.param)
        with_flush = RedisUrl(url)
        with_flush.flush()
        yield url


class RedisUrl:
    """What a test does to a Redis server behind the store's back."""

    def __init__(self, url):
        import redis

        parts = parse(url)
        tls = {"ssl": True, "ssl_ca_certs": parts.ca} if parts.ca else {}
        self.client = redis.Redis(parts.host, parts.port, password=parts.password, **tls)

    def flush(self):
        with self.client:
            self.client.flushall()


@pytest.fixture
def opened(url):
    """Opens stores and closes them at the end."""
    stores = []

    def open_one(suffix=""):
        whole = url + (("&" if "?" in url else "?") + suffix if suffix else "")
        stores.append(open_store(whole, SECRET))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def store(opened):
    return opened()


KINDS = pytest.mark.parametrize("url", ["file", "tcp", "redis", "rediss"], indirect=True)


VALUES = (b"", b"\0\xff" * 1000, b"1", b"2")
NAMES = ("a", "a/b", "a-b/c.d_e", "ab")


@KINDS
def test_a_store_answers_as_a_dictionary_does(store, opened):
    """Also one that another process has opened. An empty value is not none."""
    held, other, rng = {}, opened(), random.Random(3)
    for _ in range(200):
        name, value, expected = rng.choice(NAMES), rng.choice(VALUES), rng.choice((None, *VALUES))
        match rng.randrange(3):
            case 0:
                store.set(name, value)
                held[name] = value
            case 1:
                assert store.compare_and_set(name, expected, value) == (held.get(name) == expected)
                held |= {name: value} if held.get(name) == expected else {}
            case _:
                store.delete(name)
                held.pop(name, None)
        assert [other.get(each) for each in NAMES] == [held.get(each) for each in NAMES]
        for prefix in ("", "a", "a/", "a-b/c", "zz"):
            assert other.keys(prefix) == sorted(each for each in held if each.startswith(prefix))
    for prefix in ("*", "a*", "/", "a//", ".", "A"):
        with pytest.raises(ValueError, match="prefix = "):
            store.keys(prefix)


def count(open_one, key, times):
    store = open_one()
    for _ in range(times):
        while True:
            seen = store.get(key)
            if store.compare_and_set(key, seen, str(int(seen or b"0") + 1).encode()):
                break


def test_threads_that_count_together_lose_nothing(store, opened):
    with ThreadPoolExecutor(4) as pool:
        own = [pool.submit(count, opened, "n", 20) for _ in range(3)]
        shared = [pool.submit(count, lambda: store, "n", 20) for _ in range(2)]
        for future in own + shared:
            future.result()
    assert store.get("n") == b"100"


def test_watch_sees_what_comes_and_what_changes(store, opened, monkeypatch):
    monkeypatch.setattr(redis_module, "LOOK", 1000.0)  # whoever must look again would not see it in time
    store.set("k", b"1")
    assert store.watch("k", 0) == b"1"
    for known, value in ((b"1", b"2"), (b"2", b"3")):
        thread = threading.Thread(target=partial(opened().set, "k", value))
        thread.start()
        assert store.watch("k", 10, known) == value
        thread.join()


@KINDS
def test_many_watch_one_key_and_all_wake(opened, monkeypatch):
    monkeypatch.setattr(redis_module, "LOOK", 1000.0)
    store, other = opened(), opened()
    with ThreadPoolExecutor(6) as pool:
        watches = [pool.submit(which.watch, "k", 20, b"0") for which in (store, other) for _ in range(3)]
        store.set("other", b"1")
        store.delete("k")
        store.set("k", b"0")
        assert other.compare_and_set("k", b"0", b"1")
        assert [watch.result() for watch in watches] == [b"1"] * 6


def test_closing_ends_a_watch_of_another_thread(opened, monkeypatch):
    """No connection is torn from under it: it ends with StoreError."""
    watched, asked = opened(), threading.Event()
    get = type(watched).get
    monkeypatch.setattr(type(watched), "get", lambda self, key: (asked.set(), get(self, key))[1])
    if isinstance(watched, TcpStore):
        monkeypatch.setattr(TcpStore, "_attempt", lambda *words: (asked.set(), ATTEMPT(*words))[1])
    with ThreadPoolExecutor(4) as pool:
        watches = [pool.submit(watched.watch, f"k{number}", 60) for number in range(4)]
        assert asked.wait(20)
        watched.close()
        for watch in watches:
            with pytest.raises(StoreError, match="closed"):
                watch.result(20)


def test_watch_ends_at_its_deadline(store):
    with pytest.raises(TimeoutError, match="nothing new under 'k'"):
        store.watch("k", 0.01)
    store.set("k", b"1")
    with pytest.raises(TimeoutError):
        store.watch("k", 0, known=b"1")


def test_bad_keys_are_refused(store):
    for key in ("", "/a", "a/", "a//b", "..", "a/../b", ".a", "A", "a b", "a+b", "a\n", "x" * 201):
        for call in (store.get, partial(store.set, value=b""), partial(store.watch, timeout=0)):
            with pytest.raises(ValueError, match="key = "):
                call(key)


def test_a_value_may_have_1_mib_and_no_more(store):
    whole = os.urandom(1 << 20)
    assert store.compare_and_set("k", None, whole)
    assert store.compare_and_set("k", whole, whole[::-1])
    assert store.get("k") == whole[::-1]
    for call in (store.set, partial(store.compare_and_set, expected=None)):
        with pytest.raises(ValueError, match="at most 1048576"):
            call("k", value=bytes((1 << 20) + 1))


def test_a_value_with_a_ttl_goes(store, opened):
    store.set("a", b"1", ttl=0.2)
    assert store.compare_and_set("b", None, b"1", ttl=0.2)
    store.set("stays", b"1", ttl=1000)
    wait_for(lambda: store.get("a") is None and store.get("b") is None)
    assert opened().keys() == ["stays"]
    assert store.compare_and_set("a", None, b"2")  # what is gone is none
    assert not store.compare_and_set("b", b"1", b"2")
    with pytest.raises(TimeoutError):
        store.watch("b", 0.01)
    store.set("stays", b"2", ttl=0.2)
    store.set("stays", b"3")  # a write without a ttl ends the old one
    store.set("goes", b"1", ttl=0.2)
    wait_for(lambda: store.get("goes") is None)
    assert store.get("stays") == b"3"


def test_a_ttl_that_is_none_is_refused(store):
    for ttl in (0, -1, float("nan"), float("inf")):
        for call in (store.set, partial(store.compare_and_set, expected=None)):
            with pytest.raises(ValueError, match="ttl = "):
                call("k", value=b"", ttl=ttl)


def test_a_job_and_a_prefix_are_a_view(store, opened):
    job = opened("job=night-1")
    view = within(store, "jobs/night-1")
    job.set("host/0", b"here")
    assert store.get("jobs/night-1/host/0") == view.get("host/0") == b"here"
    assert job.keys() == view.keys("ho") == ["host/0"]
    assert within(job, "host").keys() == ["0"]
    assert view.watch("host/0", 0) == b"here"
    assert view.compare_and_set("host/0", b"here", b"there", ttl=1000)
    store.set("host/0", b"another")
    view.delete("host/0")
    assert job.keys() == []
    assert store.get("host/0") == b"another"
    with pytest.raises(ValueError, match=r"key = '../x'"):
        view.get("../x")
    view.close()
    assert store.get("host/0") == b"another"  # closing a view leaves the store open


def test_it_works_again_in_a_forked_process(store):
    store.set("k", b"1")
    child = os.fork()
    if not child:
        code = 1
        try:
            store.set("k", b"2")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("k") == b"2"


def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent(monkeypatch):
    waits, closing, forked = threading.Event(), threading.Event(), threading.Event()
    receive, shutdown = tcp_module.receive_reply, RequestChannel.shutdown

    def waiting(channel, seconds):
        waits.set()
        return receive(channel, seconds)

    def shutting(channel):
        closing.set()
        assert forked.wait(60)
        shutdown(channel)

    monkeypatch.setattr(tcp_module, "receive_reply", waiting)
    monkeypatch.setattr(RequestChannel, "shutdown", shutting)
    server = serve_store("127.0.0.1", 0, SECRET)
    store = open_store(server.url, SECRET)
    with ThreadPoolExecutor(2) as pool:
        watch = pool.submit(store.watch, "k", 60)
        assert waits.wait(20)
        closed = pool.submit(store.close)
        assert closing.wait(60)
        child = os.fork()
        if not child:
            code = 1
            signal.alarm(20)
            try:
                store.get("k")
            except StoreError:
                code = 0
            finally:
                os._exit(code)
        forked.set()
        assert os.waitpid(child, 0)[1] == 0
        closed.result(20)
        assert isinstance(watch.exception(20), StoreError)
    server.close()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/tmp/x", "unknown kind '', accepted: file:///ABSOLUTE/DIRECTORY, tcp://HOST:PORT, redis://"),
        ("", "env://; each may end with ?job=NAME"),
        ("http://host", "unknown kind 'http'"),
        ("file://host/x", "must be file:///ABSOLUTE/DIRECTORY"),
        ("file:///x?y=1", "after the question mark only job can be given"),
        ("file:///x?job=", "job can be given"),
        ("file:///x?job=a/b", "must not contain a slash"),
        ("file:///x?job=A", "job = 'A': must be parts of"),
        ("tcp://host", "must be tcp://HOST:PORT"),
        ("tcp://host:99999", "Port out of range"),
        ("tcp://host:1/x", "must be tcp://HOST:PORT"),
        ("redis://host/x", "must be redis://"),
        ("redis://me:hid/den@host/x", r"'redis://me:\*\*\*@host/x'"),
        ("rediss://me:hidden@host?cert=x", "after the question mark only ca and job can be given"),
        ("env://host", "must be env://"),
    ],
)
def test_other_addresses_are_refused_with_what_is_accepted(url, expected):
    with pytest.raises(StoreError, match=expected.replace("?", "[?]")) as caught:
        open_store(url, SECRET)
    assert "hid" not in str(caught.value)


def test_a_host_of_a_list_of_addresses_is_numeric():
    assert [numeric(host) for host in ("localhost", "::1")] == ["127.0.0.1", "::1"]
    with pytest.raises(StoreError, match="is not a host name"):
        numeric("a" * 64 + ".org")


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


def test_values_of_a_directory_outlive_what_is_no_value(tmp_path):
    store = FileStore(tmp_path / "s")
    (tmp_path / "s" / "short").write_bytes(b"1")
    with pytest.raises(StoreError, match="was not written by a store of this version"):
        store.get("short")
    store.set("short", b"whole")
    assert store.get("short") == b"whole"


def test_the_age_of_a_file_is_judged_by_the_file_system_alone(tmp_path, monkeypatch):
    store = FileStore(tmp_path / "s")
    store.set("k", b"1", ttl=100)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 1 << 62)
    assert store.get("k") == b"1"
    written = (tmp_path / "s" / "k").stat().st_mtime_ns
    os.utime(tmp_path / "s" / "k", ns=(written, written - 101 * 10**9))
    assert store.get("k") is None
    assert store.keys() == [] and not (tmp_path / "s" / "k").exists()


def test_a_directory_may_be_removed_while_a_writer_waits_for_its_lock(tmp_path, monkeypatch):
    store, waits = FileStore(tmp_path / "s"), threading.Event()
    store.set("a", b"0")
    monkeypatch.setattr(file_module, "spread", lambda pause: (waits.set(), pause)[1])
    with ThreadPoolExecutor(1) as pool, open(tmp_path / "s" / "LOCK") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        written = pool.submit(store.set, "k", b"1")
        assert waits.wait(20)
        shutil.rmtree(tmp_path / "s")
        assert store.keys() == []
        held.close()
        written.result(20)
    assert store.keys() == ["k"]


def test_a_file_system_without_locks_is_an_error_of_the_store(tmp_path, monkeypatch):
    def refused(descriptor, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    store = FileStore(tmp_path / "s")
    monkeypatch.setattr(file_module.fcntl, "flock", refused)
    with pytest.raises(StoreError, match=r"cannot lock .*/s: .*No locks available"):
        store.set("k", b"1")


def test_a_directory_that_is_removed_is_made_again_unless_another_process_was_faster(tmp_path):
    store = FileStore(tmp_path / "s")
    store.set("k", b"1")
    shutil.rmtree(tmp_path / "s")
    assert store.get("k") is None
    assert store.compare_and_set("k", None, b"2")
    assert store.get("k") == b"2"
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "s").symlink_to("/nowhere")
    with pytest.raises(StoreError, match="rendezvous directory"):
        store.set("k", b"3")


def test_a_table_forgets_what_is_over_and_has_an_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("topotrain.comm.store.memory_store.time.monotonic", lambda: now[0])
    monkeypatch.setattr("topotrain.comm.store.memory_store.MAX_TOTAL", 1000)
    table = MemoryTable()
    for number in range(500):
        table.set("beat", bytes(400), 1000, number.to_bytes(16, "big"))
    assert len(table._ends) < 200
    with pytest.raises(StoreError, match="the store is full"):
        table.set("more", bytes(600), 0, b"a")
    now[0] = 1.0
    assert table.set("more", bytes(600), 0, b"b")
    assert table.keys("") == ["more"] and table._total == 604
    table.delete("more", b"c")
    assert table._total == 0 and not table._watchers


def test_a_write_that_is_asked_for_twice_is_done_once():
    table = MemoryTable()
    assert table.compare_and_set("k", None, b"1", 0, b"first") and table.compare_and_set("k", None, b"1", 0, b"first")
    assert table.set("k", b"2", 0, b"second") and table.set("k", b"3", 0, b"third")
    table.set("k", b"2", 0, b"second")
    assert table.get("k") == b"3"
    assert not table.compare_and_set("k", None, b"1", 0, b"fourth")
    table.delete("k", b"fifth")
    assert not table.compare_and_set("k", None, b"1", 0, b"fourth")


# ---- Redis alone -----------------------------------------------------------------------------------------------------


@pytest.fixture
def redis_url(redis_urls):
    url = redis_urls("redis")
    RedisUrl(url).flush()
    return url


def test_redis_is_left_as_it_was_but_for_our_keys(redis_url):
    other, store = RedisUrl(redis_url), open_store(redis_url)
    with other.client as client:
        client.set("n", b"theirs")
        store.set("n", b"ours")
        assert client.get("n") == b"theirs" and store.keys() == ["n"]
        once = [key for key in client.scan_iter() if b"once" in key]
        assert len(once) == 1 and 0 < client.pttl(once[0]) <= 60_000
    store.close()


def test_redis_connections_that_are_lost_are_made_again(redis_url):
    store, other = open_store(redis_url), RedisUrl(redis_url)
    store.set("k", b"1")
    with other.client as client, ThreadPoolExecutor(1) as pool:
        watch = pool.submit(store.watch, "k", 20, b"1")
        wait_for(lambda: client.pubsub_numsub("topotrain/k")[0][1] == 1)
        client.client_kill_filter(_type="normal", skipme=True)
        client.client_kill_filter(_type="pubsub", skipme=True)
        assert store.get("k") == b"1"
        store.set("k", b"2")
        assert watch.result() == b"2"
    store.close()


@pytest.mark.parametrize("text", ["redis://:hidden@127.0.0.1:{port}", "redis://user:hidden@127.0.0.1:{port}"])
def test_a_wrong_password_is_told_without_it(redis_url, text):
    store = open_store(text.format(port=parse(redis_url).port))
    with pytest.raises(StoreError, match=r"^store redis://127.0.0.1:") as caught:
        store.get("k")
    assert "hidden" not in str(caught.value) and caught.value.__cause__ is None
    store.close()


def test_a_redis_that_is_not_there_or_not_trusted(redis_urls):
    store = open_store("redis://:hidden@127.0.0.1:1")
    for call in (partial(store.get, "k"), partial(store.set, "k", b""), partial(store.watch, "k", 1), store.keys):
        with pytest.raises(StoreError, match=r"store redis://127.0.0.1:1: .*refused"):
            call()
    store.close()
    parts = parse(redis_urls("rediss"))
    store = open_store(f"rediss://127.0.0.1:{parts.port}")  # our certificate authority is none that the system knows
    with pytest.raises(StoreError, match=f"store rediss://127.0.0.1:{parts.port}: .*CERTIFICATE_VERIFY_FAILED"):
        store.get("k")
    store.close()


def test_without_redis_py_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(StoreError, match="pip install 'topotrain\\[redis\\]'"):
        open_store("redis://127.0.0.1")


# ---- values of strangers ---------------------------------------------------------------------------------------------


@pytest.fixture
def server(redis_urls, monkeypatch):
    """A Redis server with values of a job, and a client of it without the job's secret."""
    monkeypatch.setenv("TOPOTRAIN_TOKEN", SECRET.hex())
    url = redis_urls("redis")
    stranger = RedisUrl(url)
    stranger.flush()
    with closing(open_store(url, SECRET)) as store:
        yield store, stranger.client, url
    stranger.client.close()


def test_a_value_without_the_seal_of_its_key_and_secret_counts_as_none(server):
    store, stranger, url = server
    store.set("jobs/j.1/job", b"program: 'mine'")
    real = stranger.get("topotrain/jobs/j.1/job")
    with closing(open_store(url, bytes(31) + b"x")) as other:
        assert other.get("jobs/j.1/job") is None
    forged = [b"program: 'theirs'", real + b"args: 'x'", real[:40], b"", bytes(32) + b"program"]
    for key, values in {"jobs/j.1/job": forged, "jobs/j.2/job": [real], "jobs/j.1/run": [real]}.items():
        for value in values:
            stranger.set(f"topotrain/{key}", value)
            assert store.get(key) is None
            with pytest.raises(TimeoutError, match="its value is not of this process's secret"):
                store.watch(key, 0.01)
            assert not store.compare_and_set(key, value, b"new")
            # It is replaced as if there was none.
            assert store.compare_and_set(key, None, b"new")
            assert store.get(key) == b"new"


def test_keys_that_no_store_writes_are_not_listed(server):
    store, stranger, _ = server
    store.set("jobs/a", b"")
    for name in (b"\x1b]0;x", b"jobs/\xff", b"jobs/.a", b"jobs/A b", b"jobs/" + b"a" * 300):
        stranger.set(b"topotrain/" + name, b"")
    assert store.keys() == store.keys("jobs/") == ["jobs/a"]
