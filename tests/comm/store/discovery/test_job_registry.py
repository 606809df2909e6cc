"""The registry of jobs, and the commands `topotrain jobs …` and `topotrain store`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lost_write import lose_one
from topotrain.comm.store import StoreError, open_store, serve_store, within
from topotrain.comm.store.discovery.job_registry import SUMMARY_BYTES, JobRecord, Registry, UnknownJob, stop_key
from topotrain.tools.cli import app
from topotrain.tools.cli.jobs import print_record

ROOT = Path(__file__).parents[4]
SECRET = bytes(range(32))
EARLY = JobRecord("early", "digits", started=1000.0, units=3, hosts=("10.0.0.1", "10.0.0.2"))
LATE = JobRecord("late-1", "zahlen\x1b[2J", started=2000.0)


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.delenv("TOPOTRAIN_RENDEZVOUS", raising=False)
    return (tmp_path / "store").as_uri()


@pytest.fixture
def registry(url):
    return Registry(open_store(url))


# ---- the registry ----------------------------------------------------------------------------------------------------


def test_jobs_come_live_and_end(registry, url):
    assert registry.list() == []
    registry.add(EARLY)
    registry.add(LATE, ttl=1000)
    assert [record.id for record in registry.list()] == ["late-1", "early"]
    seen = registry.view("early")
    assert seen.state == "running" and seen.heartbeat > 1e9
    assert seen == JobRecord("early", "digits", "running", 1000.0, 3, ("10.0.0.1", "10.0.0.2"), seen.heartbeat)
    registry.beat("early", ttl=1000)
    assert registry.view("early").heartbeat >= seen.heartbeat
    registry.end("early", "done")
    assert registry.view("early").state == "done" and registry.view("early").heartbeat == 0
    assert open_store(url).keys("alive/") == ["alive/late-1"]


def test_a_job_tells_how_its_training_is(registry, url):
    registry.add(EARLY)
    assert registry.view("early").summary is None
    registry.report("early", {"step": 7, "state": "running"})
    assert registry.view("early").summary == {"step": 7, "state": "running"}
    # What is too large for the store is left out, and the last state stays.
    registry.report("early", {"step": 8, "workers": ["x" * SUMMARY_BYTES]})
    assert registry.view("early").summary["step"] == 7
    # The registry knows better than the job whether it has ended.
    registry.end("early", "failed")
    assert registry.view("early").summary == {"step": 7, "state": "ended"}
    assert [record.summary for record in registry.list()] == [None]
    registry.add(EARLY)
    for raw in (b"", b"[]", b"{"):
        open_store(url).set("summary/early", raw)
        assert registry.view("early").summary is None


def test_a_job_is_alive_before_it_says_that_it_runs(registry, url, monkeypatch):
    """Whoever looked in between would think it lost, and take its ID."""
    store, seen = open_store(url), []
    whole = type(store).compare_and_set

    def looked(self, key, *args):
        done = whole(self, key, *args)
        seen.append(Registry(store).view("early").state)
        return done

    monkeypatch.setattr(type(store), "compare_and_set", looked)
    registry.add(EARLY)
    assert seen == ["running"]


def test_a_job_without_a_sign_of_life_is_lost_and_its_id_free(registry, url):
    registry.add(EARLY, ttl=1000)
    with pytest.raises(StoreError, match="job 'early' runs already"):
        registry.add(EARLY)
    registry.stop("early")
    open_store(url).delete("alive/early")  # as its ttl would
    assert registry.view("early").state == "lost"
    registry.add(JobRecord("early", "again"))
    again = registry.view("early")
    assert (again.name, again.state) == ("again", "running") and again.started > 1e9
    assert open_store(url).get(stop_key("early")) is None  # the stop was for the job before


def test_stop_is_seen_by_the_job_also_after_a_lost_write(registry, url, monkeypatch):
    registry.add(EARLY, ttl=1000)
    lost = [lose_one(monkeypatch, "early/stop")]
    assert registry.stop("early").state == "running"
    assert within(open_store(url), "jobs/early").watch("stop", 0) == b"stop"
    registry.add(LATE)
    lost.append(lose_one(monkeypatch, "registry/late-1"))
    registry.end("late-1", "failed")
    assert registry.stop("late-1").state == "failed" and all(lost)
    assert open_store(url).get(stop_key("late-1")) is None


@pytest.mark.parametrize("id", ["nobody", "../x", "A", ""])
def test_an_unknown_id_names_the_known_ones(registry, id):
    with pytest.raises(UnknownJob, match="no job is registered"):
        registry.view(id)
    registry.add(EARLY)
    registry.add(LATE)
    for call in (registry.view, registry.beat, registry.stop, lambda id: registry.end(id, "done")):
        with pytest.raises(UnknownJob, match="known jobs: late-1, early"):
            call(id)


def test_what_is_no_job_is_refused(registry, url):
    for id in ("a/b", "A", ""):
        with pytest.raises(ValueError, match="id = "):
            registry.add(JobRecord(id, "x"))
    with pytest.raises(ValueError, match="must be done, failed, stopped"):
        registry.end("x", "tired")
    good = {"id": "x", "name": "", "state": "running", "started": 1, "units": 1, "hosts": []}
    registry.add(EARLY)
    changes = [{"id": "y"}, {"state": "odd"}, {"units": "1"}, {"hosts": None}, {"started": None}]
    changes += [{"started": 1e300}, {"started": float("inf")}, {"started": float("nan")}, {"units": -1}]
    raws = [json.dumps({**good, **change, "later": 1}).encode() for change in changes]
    for raw in (*raws, b"", b"[]", b"\xff", b"null", b"[" * 100_000, b'{"units": ' + b"9" * 5000 + b"}"):
        open_store(url).set("registry/x", raw)
        found = registry.list()
        assert [record.id for record in found] == ["early", "x"], "the others are shown"
        assert (found[1].name, found[1].state) == ("its record in the store cannot be read", "lost")
        print_record(url, "x", as_json=False)
    registry.add(JobRecord("x", "new"))  # a job takes the place of such a record
    assert registry.view("x").name == "new"
    open_store(url).set("registry/x", json.dumps({**good, "later": 1}).encode())  # of a later version
    for beat in (b"now", b"1e999", b"nan"):
        open_store(url).set("alive/x", beat)
        assert registry.view("x").state == "running"
        print_record(url, "x", as_json=True)


# ---- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def told(capsys):
    """Runs a command in this process; returns its code and what it wrote."""

    def run(*words):
        with pytest.raises(SystemExit) as caught:
            app.main(words)
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return run


def test_list_view_and_stop(registry, url, told, monkeypatch):
    assert told("jobs", "list", url) == (0, "", "no jobs\n")
    assert told("jobs", "list", url, "--json") == (0, "[]\n", "")
    registry.add(EARLY, ttl=1000)
    registry.add(LATE, ttl=1000)
    registry.end("late-1", "failed")
    monkeypatch.setenv("TOPOTRAIN_RENDEZVOUS", url)
    code, out, _ = told("jobs", "list")
    first, late, early = out.splitlines()
    assert code == 0 and first.split() == ["id", "state", "started", "units", "name"]
    assert late.split()[:2] == ["late-1", "failed"] and "zahlen?[2J" in late  # nobody else steers this terminal
    assert early.split()[:2] == ["early", "running"]
    code, out, _ = told("jobs", "view", "--job", "early")
    assert code == 0 and "hosts         10.0.0.1, 10.0.0.2" in out and "s ago" in out
    code, out, _ = told("jobs", "view", "--job", "early", "--json")
    assert json.loads(out) == registry.view("early").as_data()
    assert [job["id"] for job in json.loads(told("jobs", "list", "--json")[1])] == ["late-1", "early"]
    assert told("jobs", "stop", "--job", "early") == (0, "topotrain: early is asked to stop\n", "")
    assert open_store(url).get("jobs/early/stop") == b"stop"
    assert told("jobs", "stop", "--job", "late-1") == (0, "topotrain: late-1 has ended already: failed\n", "")


def test_what_the_user_gave_wrongly_is_told_with_code_2(registry, url, told, monkeypatch):
    registry.add(EARLY)
    for verb in ("view", "stop"):
        code, out, err = told("jobs", verb, url, "--job", "no")
        assert (code, out, err) == (2, "", "topotrain: error: no job 'no', known jobs: early\n")
    code, _, err = told("jobs", "list")
    assert code == 2 and "no store: give its URL, or set TOPOTRAIN_RENDEZVOUS" in err
    code, _, err = told("jobs", "list", "what://x")
    assert code == 2 and "unknown kind 'what', accepted: file:///" in err
    monkeypatch.setenv("TOPOTRAIN_TOKEN", "x")
    code, _, err = told("jobs", "list", "tcp://127.0.0.1:1")
    assert code == 2 and "TOPOTRAIN_TOKEN: must be 64 hexadecimal digits" in err


def test_a_store_that_is_away_is_code_1(told, monkeypatch):
    monkeypatch.setenv("TOPOTRAIN_TOKEN", SECRET.hex())
    monkeypatch.setattr("topotrain.tools.cli.jobs.PATIENCE", 0.0)
    code, _, err = told("jobs", "list", "tcp://127.0.0.1:1")
    assert code == 1 and err.startswith("topotrain: error: store tcp://127.0.0.1:1 cannot be reached: ")


@pytest.mark.journey
def test_a_store_is_served_until_a_signal():
    environ = {**os.environ, "TOPOTRAIN_TOKEN": SECRET.hex(), "PYTHONPATH": str(ROOT)}
    probe = serve_store("127.0.0.1", 0, SECRET)
    url = probe.url
    probe.close()
    words = [sys.executable, "-m", "topotrain", "store", url]
    with subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr.readline() == f"{url} is served until Ctrl-C\n"
            store = open_store(url, SECRET)
            Registry(store).add(EARLY, ttl=1000)
            store.close()
            code = "import sys; from topotrain.tools.cli import app as cli; import atexit; atexit.register(lambda: "
            code += "print('torch' in sys.modules)); cli.main(['jobs', 'list', sys.argv[1]])"
            listed = subprocess.run(
                [sys.executable, "-c", code, url], env=environ, capture_output=True, text=True, timeout=300
            )
            assert "early" in listed.stdout and listed.stdout.endswith("False\n")  # without torch
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 128 + signal.SIGINT
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_what_cannot_be_served_is_code_2(told, monkeypatch):
    monkeypatch.setenv("TOPOTRAIN_TOKEN", SECRET.hex())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        served = serve_store("127.0.0.1", 0, SECRET)
        code, _, err = told("store", served.url)
        assert code == 2 and err == f"topotrain: error: store {served.url}: Address already in use\n"
        served.close()
        for url in ("redis://127.0.0.1", "tcp://127.0.0.1:1?job=x", "file:///x"):
            code, _, err = told("store", url)
            assert code == 2 and "must be tcp://ADDRESS:PORT: only such a store can be served" in err
        code, _, err = told("store", "tcp://0.0.0.0:29400")
        assert code == 2 and "name one address" in err
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
