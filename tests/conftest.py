"""What holds for every test: one compute thread per process (their number changes bits), no deadline by the clock."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch; child processes inherit it

import json
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import process_pool
import pytest
import seeds
import unpickle_audit
from hypothesis import HealthCheck, settings

# A shared machine is slow at times; a failing example is printed in a form that can be run again.
settings.register_profile(
    "topotrain",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=200 if seeds.SOAK else 30,
)
settings.load_profile("topotrain")

unpickle_audit.in_tests()
INTERPRETERS: list[str] = []
"""The command lines of the Python processes that the running test has started."""


def _on_audit_event(event: str, args: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and os.path.basename(os.fsdecode(args[0])).startswith("python"):
        INTERPRETERS.append(str(args[1]))


sys.addaudithook(_on_audit_event)


SECONDS = Path(__file__).with_name("seconds.json")
"""The seconds of the files that take longest, from `make test ARGS=--record-seconds`."""
RECORD = "--record-seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(RECORD, action="store_true", help=f"write the seconds of each long file to {SECONDS.name}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, so that all processes of the run end at about the same time."""
    known = json.loads(SECONDS.read_text())
    items.sort(key=lambda item: -known.get(_file_of(item.nodeid), 0))


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line says what was not tested here, and why."""
    skipped = terminalreporter.stats.get("skipped", ())
    if skipped:
        reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
        named = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"not tested here: {named}", yellow=True)
    if config.getoption(RECORD):
        _record_seconds(terminalreporter)


def _record_seconds(terminalreporter: Any) -> None:
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[_file_of(report.nodeid)] += report.duration
    # Files that did not run keep their seconds.
    known = {
        name: took for name, took in json.loads(SECONDS.read_text()).items() if (SECONDS.parents[1] / name).exists()
    }
    long = {name: round(took) for name, took in {**known, **seconds}.items() if took >= 2}
    SECONDS.write_text(json.dumps(long, indent=0, sort_keys=True) + "\n")


@pytest.fixture(autouse=True)
def nothing_unpickled() -> Iterator[None]:
    """Also where a transport's thread has swallowed the error."""
    yield
    found, unpickle_audit.FOUND[:] = list(unpickle_audit.FOUND), []
    assert not found


@pytest.fixture(autouse=True)
def marked_as_journey(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that starts Python processes has the mark `journey`: `-m "not journey"` stays quick."""
    INTERPRETERS.clear()
    yield
    assert request.node.get_closest_marker("journey") or not INTERPRETERS, f"not marked as journey: {INTERPRETERS}"


@pytest.fixture(autouse=True)
def nothing_prepared() -> Iterator[None]:
    """A test's process is a fresh one for `tt.prepare`."""
    yield
    if (context := sys.modules.get("topotrain.training.context")) is not None:
        context.forget()


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A script that ends with an error ignores SIGTERM from then on: its process ends. A test's process goes on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def nothing_kept_in_stores() -> Iterator[None]:
    """Servers that a test has left behind stop looking after their store, which opens files and may be gone."""
    yield
    for thread in threading.enumerate():
        if thread.name == "kept values" and (look_after := getattr(thread, "_target", None)) is not None:
            look_after.__self__.close()


@pytest.fixture(autouse=True)
def on_one_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of all threads of a simulation one runs at a time: on one core the turn is handed over several times as fast."""
    if not request.node.get_closest_marker("simulated"):
        yield
        return
    from seeded_runs import one_core

    with one_core():
        yield


@pytest.fixture(scope="session")
def warmed() -> Iterator[process_pool.Warm]:
    """What has imported torch once for the processes of all tests."""
    with (
        tempfile.TemporaryDirectory(prefix="tt-") as folder,
        closing(process_pool.start(Path(folder) / "warm")) as running,
    ):
        yield running


@pytest.fixture(scope="session")
def served_at(warmed: process_pool.Warm) -> str:
    """The socket of a forkserver, for jobs."""
    return warmed.served


@pytest.fixture(scope="session")
def warm_at(warmed: process_pool.Warm) -> str:
    """The socket of who makes the processes of users' shells."""
    return warmed.path
