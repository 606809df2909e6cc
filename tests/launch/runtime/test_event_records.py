"""Events as records of Python's logging: levels, names, and the log of a process."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from topotrain.core.events import (
    Exited,
    Failed,
    Final,
    Finished,
    Incident,
    Notice,
    Output,
    Recovered,
    Skipped,
    Started,
    StepDone,
)
from topotrain.launch.log_lines import without_stamps
from topotrain.launch.runtime.event_records import LOGGER, LogFileHandler, append, is_silenced, log_to, record, words

NOTICE = Notice("worker 0/1", "the loss is rising")
STEP = StepDone("worker 0/1", 1.0, 7, 70, 0.25, 0.0, 0, 1, 1)


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    level, handlers = LOGGER.level, LOGGER.handlers[:]
    yield LOGGER
    LOGGER.setLevel(level)
    LOGGER.handlers[:] = handlers


@pytest.mark.parametrize(
    ("event", "level", "text"),
    [
        (NOTICE, logging.WARNING, "the loss is rising"),
        (Skipped("worker 0/1", 3, 1, "", "a"), logging.WARNING, "step 3 is skipped"),
        (Incident(0, "worker 0/1", "worker 0/1 was killed", "it restarts", 1.0), logging.WARNING, "it restarts"),
        (Failed("worker 0/1", "died", "was killed", ""), logging.ERROR, "was killed"),
        (Recovered(0, 1.25, 0.0), logging.INFO, "after 1.2 s"),
        (Started("worker 0/1", 77), logging.INFO, "pid 77"),
        (Exited("worker 0/1", 77, 0), logging.INFO, "exit code 0"),
        (Final("final.safetensors", 2.0), logging.INFO, "final.safetensors"),
        (STEP, logging.DEBUG, "step 7, loss 0.2500"),
    ],
)
def test_the_level_of_an_event(event, level, text):
    found = words(event)
    assert found is not None and found.level == level and text in found.text


def test_output_and_ends_of_servers_are_no_news():
    assert words(Output("worker 0/0", "stdout", "x")) is None
    assert words(Finished("server 0/0", 0, 0, 0.0, 0, 0, 0)) is None


def test_the_level_of_the_logger_decides(caplog):
    for event in (NOTICE, STEP):
        record(event)
    assert [(each.name, each.levelname, each.getMessage()) for each in caplog.records] == [
        ("topotrain", "WARNING", "worker 0/1: the loss is rising")
    ]
    caplog.clear()
    LOGGER.setLevel(logging.DEBUG)
    record(STEP, own="worker 0/1")
    assert [each.getMessage() for each in caplog.records] == ["step 7, loss 0.2500"]


def test_its_own_level_alone_silences_notices():
    assert not is_silenced(NOTICE)
    LOGGER.setLevel(logging.ERROR)
    assert is_silenced(NOTICE)
    assert not is_silenced(Failed("worker 0/1", "died", "x", ""))
    LOGGER.setLevel(logging.NOTSET)
    former = logging.getLogger().level
    logging.getLogger().setLevel(logging.CRITICAL)
    try:
        assert not is_silenced(NOTICE)
    finally:
        logging.getLogger().setLevel(former)


def test_nothing_is_printed_where_no_handler_is(capsys):
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        record(NOTICE)
    finally:
        root.handlers = handlers
    assert capsys.readouterr() == ("", "")


def test_records_are_in_the_log_of_the_process(tmp_path: Path):
    log_to(tmp_path / "log", "worker 0/1")
    record(NOTICE, own="worker 0/1")
    record(Failed("worker 0/1", "program", "ValueError: x", "traceback"), own="worker 0/1")
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z worker 0/1 \| topotrain WARNING: the loss is rising", line)


def test_a_record_of_several_lines_has_stamps_on_all(tmp_path: Path):
    LOGGER.addHandler(LogFileHandler(tmp_path / "log", "server 0/0"))
    try:
        raise ValueError("odd")
    except ValueError:
        LOGGER.exception("that failed")
    log = (tmp_path / "log").read_bytes()
    assert log.count(b"Z server 0/0 | ") == log.count(b"\n") > 3
    assert without_stamps(log).startswith(b"topotrain ERROR: that failed\nTraceback")


def test_a_record_begins_a_line_of_its_own(tmp_path: Path):
    log = tmp_path / "log"
    log.write_bytes(b"\r 10%")
    append(log, b"record\n")
    assert log.read_bytes() == b"\r 10%\nrecord\n"
    append(log, b"other\n")
    assert log.read_bytes() == b"\r 10%\nrecord\nother\n"


def test_a_log_that_cannot_be_written_is_no_error(tmp_path: Path):
    log_to(tmp_path, "worker 0/1")  # a folder
    record(NOTICE)
