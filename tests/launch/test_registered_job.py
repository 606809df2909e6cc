"""A local job that names a store: it meets there, is listed there, and can be stopped from there."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from tests.support.launch_targets import CALLS, parts, small_job
from topotrain.comm.store import open_store, store_base
from topotrain.comm.store.discovery.job_registry import JobRecord, Registry
from topotrain.config.job import ConfigError
from topotrain.config.topology import layout
from topotrain.core.events import Notice, Saved, Started
from topotrain.launch import JobOutcome
from topotrain.launch.local import LocalLauncher
from topotrain.launch.registered_job import listed

pytestmark = pytest.mark.journey


def launch(folder, url, args=(), on_event=lambda event: None, **settings):
    job = replace(small_job(folder / "work", args, **settings), rendezvous=url)
    return LocalLauncher(CALLS).start(job, layout(job.cluster), on_event)


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setenv("TOPOTRAIN_TOKEN", "11" * 32)
    return (tmp_path / "store").as_uri()


def test_it_is_listed_with_how_it_ended(tmp_path, url):
    assert launch(tmp_path, url, parts(worker_0_0="raises")).code == 1
    (record,) = Registry(open_store(url)).list()
    assert record.state == "failed"
    assert open_store(url).keys("jobs/") == []
    assert "listed" not in [thread.name for thread in threading.enumerate()]


def test_it_can_be_stopped(tmp_path, url):
    heard = []

    def hear(event):
        heard.append(event)
        if isinstance(event, Started) and event.who == "worker 0/0":
            registry = Registry(open_store(url))
            threading.Thread(target=lambda: registry.stop(registry.list()[0].id)).start()

    roles = parts(worker_0_0="stay", worker_0_1="stay", server_0_0="saves")
    outcome = launch(tmp_path, url, roles, hear, grace_s=100.0)
    assert (outcome.code, outcome.cause) == (143, None)
    assert "`topotrain jobs stop`" in next(event.text for event in heard if isinstance(event, Notice))
    assert [event for event in heard if isinstance(event, Saved)], "as after SIGTERM"
    assert Registry(open_store(url)).list()[0].state == "stopped"


def test_its_name_may_be_chosen_and_is_then_taken(tmp_path, url):
    assert launch(tmp_path, f"{url}?job=night").code == 0
    assert [(record.id, record.state) for record in Registry(open_store(url)).list()] == [("night", "done")]
    Registry(open_store(url)).add(JobRecord("night", "another"))
    with pytest.raises(ConfigError, match="'night' runs already"):
        launch(tmp_path, f"{url}?job=night")


SERVED = """
import sys
from topotrain.comm.store import serve_store
print(serve_store("127.0.0.1", 0, bytes.fromhex(sys.argv[1])).url, flush=True)
sys.stdin.read()
"""


def test_a_store_that_is_stopped_holds_up_the_end_of_a_job_for_some_seconds_only(tmp_path, url, monkeypatch, capsys):
    monkeypatch.setattr(store_base, "LEAVE_S", 0.2)
    monkeypatch.setattr(store_base, "QUIET_S", 0.1)
    command, pipe = [sys.executable, "-c", SERVED, "11" * 32], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as served:
        job = replace(small_job(tmp_path), rendezvous=served.stdout.readline().strip())
        with listed(job) as place:
            served.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, served.pid, os.WSTOPPED)
            place.ended(JobOutcome(0, 0.0))
        served.kill()
    waiting = "waiting for the store, for at most 0.2 s; without it the list of jobs does not say how this one ended"
    assert waiting in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["ftp://x", "file://relative", "redis://", "tcp://127.0.0.1"])
def test_a_store_that_is_none_is_refused_before_anything_starts(tmp_path, url, wrong):
    with pytest.raises(ConfigError, match="rendezvous"):
        launch(tmp_path, wrong)
