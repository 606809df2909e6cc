"""A local job that names a store: it meets there, is listed there, and can be stopped from there."""

import threading
from dataclasses import replace

import pytest

from tests.support.launch_targets import CALLS, parts, small_job
from topotrain.comm.store import open_store
from topotrain.comm.store.discovery.job_registry import JobRecord, Registry
from topotrain.config.job import ConfigError
from topotrain.config.topology import layout
from topotrain.core.events import Notice, Saved, Started
from topotrain.launch.local import LocalLauncher

pytestmark = pytest.mark.journey


def launch(folder, url, args=(), on_event=lambda event: None, **settings):
    job = replace(small_job(folder / "work", args, **settings), rendezvous=url)
    return LocalLauncher(CALLS).start(job, layout(job.cluster), on_event)


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setenv("TOPOTRAIN_TOKEN", "11" * 32)
    return (tmp_path / "store").as_uri()


@pytest.mark.parametrize(("act", "code", "state"), [("talk", 0, "done"), ("raises", 1, "failed")])
def test_it_is_listed_with_how_it_ended(tmp_path, url, act, code, state):
    assert launch(tmp_path, url, parts(worker_0_0=act)).code == code
    (record,) = Registry(open_store(url)).list()
    assert record.state == state
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
    assert [record.id for record in Registry(open_store(url)).list()] == ["night"]
    Registry(open_store(url)).add(JobRecord("night", "another"))
    with pytest.raises(ConfigError, match="'night' runs already"):
        launch(tmp_path, f"{url}?job=night")


@pytest.mark.parametrize("wrong", ["ftp://x", "file://relative", "redis://", "tcp://127.0.0.1"])
def test_a_store_that_is_none_is_refused_before_anything_starts(tmp_path, url, wrong):
    with pytest.raises(ConfigError, match="rendezvous"):
        launch(tmp_path, wrong)
