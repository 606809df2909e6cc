"""What a launcher prints waits for its reader, and the launcher does not; nothing is lost without a word."""

import fcntl
import io
import os
import select
import threading
from contextlib import suppress

import pytest
from rich.console import Console
from wait_limit import ended_after

from tests.support.recorded_jobs import report_of
from topotrain.core.events import Output, StepDone
from topotrain.launch import console_output
from topotrain.launch.agent.pipes import OutputReader
from topotrain.launch.console_output import FULL_BYTES, ConsoleOutput, out_of, outlet
from topotrain.tools.monitor.progress_display import LiveTable

TEXT = "".join(f"{number:09d}\n" for number in range(FULL_BYTES // 5))


@pytest.fixture
def pipe():
    """(file to print to, descriptor to read from)."""
    theirs, ours = os.pipe()
    fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, 4096)
    with open(ours, "w") as file:
        yield file, theirs


def _is_full(file) -> bool:
    ready = select.poll()
    ready.register(file, select.POLLOUT)
    return not ready.poll(0)


def read_all(fd: int) -> str:
    with open(fd, "rb") as file:
        return file.read().decode()


def test_printing_never_waits_and_every_byte_arrives_in_order(pipe):
    file, theirs = pipe
    made = ConsoleOutput()
    with ended_after(300):
        writer, same = made.writer(file), made.writer(os.fdopen(os.dup(file.fileno()), "w"))
        writer.write(TEXT)
        assert made.full and same.behind
        same.write("the end\n")
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.append(read_all(theirs)))
        reader.start()
        made.finish("logs")
        assert not made.full
        for each in (file, same):
            each.close()
        reader.join()
    assert found == [TEXT + "the end\n"]


def test_output_without_a_reader_is_dropped_and_counted(pipe, capsys):
    """A reader that has left, and a full disk: neither is an error of the job."""
    file, theirs = pipe
    os.close(theirs)
    made = ConsoleOutput()
    with open("/dev/full", "w") as full, ended_after(300):
        for each in (file, full):
            writer = made.writer(each)
            for channel in made._channels.values():
                channel.put(b"12345\n")
                channel.empty(None)
            writer.write("123\n")
        made.finish("W/logs")
    assert "topotrain: 26 bytes of output were not taken by their reader" in capsys.readouterr().err


def test_a_reader_that_has_stopped_does_not_keep_the_job(pipe, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(console_output, "STOPPED_S", 0.2)
    file, theirs = pipe
    made = ConsoleOutput()
    with ended_after(300):
        writer = made.writer(file)
        writer.write(TEXT)
        while made.full:  # the program goes on
            os.sched_yield()
        writer.write("dropped\n")
        made.finish("W/logs")
    os.set_blocking(theirs, False)
    left = len(TEXT) + len("dropped\n") - len(os.read(theirs, 1 << 20))
    assert f"topotrain: {left:,} bytes of output were not taken by their reader" in capsys.readouterr().err
    os.close(theirs)


def test_what_is_given_up_after_a_signal_is_counted_and_told(pipe, capsys):
    file, theirs = pipe
    made = ConsoleOutput()
    with ended_after(300):
        made.writer(file).write(TEXT)
        made.hurry()
        made.finish("W/logs")
    os.set_blocking(theirs, False)
    taken = len(os.read(theirs, 1 << 20))
    left = len(TEXT) - taken
    assert f"topotrain: {left:,} bytes of output were not taken by their reader" in capsys.readouterr().err
    os.close(theirs)


def test_a_file_without_a_descriptor_is_printed_to_as_it_is():
    file = io.StringIO()
    assert ConsoleOutput().writer(file) is file


def test_a_live_table_is_not_drawn_for_a_terminal_that_takes_nothing(pipe):
    from topotrain.config.topology import Cluster, layout

    file, theirs = pipe
    terminal = Console(file=file, force_terminal=True, width=80)
    with ended_after(300):
        try:
            with outlet(terminal, "logs") as made:
                window = LiveTable(report_of(layout(Cluster())), terminal, out_of(made, False))
                window(Output("worker 0/0", "stdout", TEXT[:20_000]))
                (channel,) = made._channels.values()
                while not _is_full(file):  # until its thread can write no more
                    os.sched_yield()
                before = channel.waiting
                for step in range(100):
                    window(StepDone("worker 0/0", 1.0, step, step, 0.5, 0.0, 0, 0, 0))
                    window._live.refresh()
                assert channel.waiting == before > 0
                raise InterruptedError
        except InterruptedError:
            pass
    assert terminal.file is file
    os.close(theirs)


def test_what_a_dead_process_has_left_running_does_not_keep_its_unit():
    """It writes on and on, and only what is there now is read."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)

    def write() -> None:
        with suppress(BrokenPipeError):
            while True:
                os.write(theirs, bytes(4096))

    writer = threading.Thread(target=write)
    writer.start()
    with ended_after(20):
        assert sum(map(len, OutputReader(ours).drain())) <= 1 << 20
    os.close(ours)
    writer.join()
    os.close(theirs)
