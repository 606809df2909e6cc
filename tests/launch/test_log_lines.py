"""Lines of a log have time and name, and are the program's own without them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wait_limit import ended_after

from topotrain.launch.agent.pipes import log_tail
from topotrain.launch.log_lines import LineStamps, StampedFile, text_stream, without_stamps

AT = 1_800_000_000.25
STAMP = b"2027-01-15T08:00:00.250Z worker 0/1 | "


@pytest.fixture
def log(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield fd
    os.close(fd)


def test_each_line_begins_with_time_and_name() -> None:
    stamps = LineStamps("worker 0/1")
    assert stamps.stamped(b"one\n\ntwo", AT) == STAMP + b"one\n" + STAMP + b"\n" + STAMP + b"two"
    later = b"2027-01-15T08:00:01.999Z worker 0/1 | "
    assert stamps.stamped(b" is longer\n", AT + 1) == b" is longer\n"
    assert stamps.stamped(b"", AT + 1.5) == b""
    assert stamps.stamped(b"three\n", AT + 1.7499) == later + b"three\n"


def test_a_progress_bar_is_one_line() -> None:
    stamps = LineStamps("worker 0/1")
    bar = [b"\r 10%", b"\r 20%", b"\r100%\n"]
    assert b"".join(stamps.stamped(piece, AT) for piece in bar) == STAMP + b"".join(bar)


_PIECES = st.lists(st.one_of(st.binary(max_size=20), st.sampled_from([STAMP, b"\n", b"\r", b"a\nb\n", b"\xff\n\n"])))


@given(_PIECES)
def test_without_its_stamps_a_log_is_what_the_program_wrote(pieces: list[bytes]) -> None:
    stamps = LineStamps("server 10/3")
    log = b"".join(stamps.stamped(piece, AT + number / 7) for number, piece in enumerate(pieces))
    assert without_stamps(log) == b"".join(pieces)
    whole = b"".join(pieces)
    assert log.count(b" server 10/3 | ") == whole.count(b"\n") + bool(whole and not whole.endswith(b"\n"))


def test_the_end_of_a_log_in_an_error_is_the_programs_own(tmp_path: Path) -> None:
    lines = b"".join(f"line {number}\n".encode() for number in range(1000))
    (tmp_path / "log").write_bytes(LineStamps("worker 3/14").stamped(lines, AT))
    tail = log_tail(tmp_path / "log")
    assert lines.decode().endswith(tail.partition("\n")[2]) and "worker 3/14" not in tail.partition("\n")[2]
    assert tail.count("\n") > 50


def test_a_text_stream_writes_each_line_at_once(tmp_path: Path, log: int) -> None:
    stamps = LineStamps("worker 0/1")
    out, err = text_stream(log, stamps), text_stream(log, stamps)
    print("half", end="", file=out)
    assert (tmp_path / "log").read_bytes() == b""
    print(" and half\nä\udcff", file=out)
    assert without_stamps((tmp_path / "log").read_bytes()) == "half and half\nä\\udcff\n".encode()
    print("warned", file=err)
    out.buffer.write(b"\xff\xfe\n")
    subprocess.run(["echo", "from below"], stdout=out, check=True)
    lines = (tmp_path / "log").read_bytes().splitlines()
    assert [line.partition(b" | ")[2] or line for line in lines[2:]] == [b"warned", b"\xff\xfe", b"from below"]
    assert (out.encoding, out.errors, out.line_buffering, out.isatty(), out.fileno()) == (
        *("utf-8", "backslashreplace", True, False),
        log,
    )
    for stream in (out, err):
        stream.close()
    os.fstat(log)


def test_a_signal_handler_may_print_while_the_program_prints(tmp_path: Path, log: int) -> None:
    out = text_stream(log, LineStamps("worker 0/1"))
    told = 0

    def tell(*_: object) -> None:
        nonlocal told
        told += 1
        print("handler", file=out)

    former = signal.signal(signal.SIGVTALRM, tell)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
    printed = 0
    try:
        with ended_after(300):
            while told < 100:
                print("program", file=out)
                printed += 1
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, former)
    text = (tmp_path / "log").read_text()
    assert (text.count("program"), text.count("handler")) == (printed, told)


def test_a_full_disk_loses_lines_and_is_no_error_of_the_script() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with open("/dev/full", "wb", buffering=0) as full:
        assert StampedFile(full.fileno(), LineStamps("worker 0/1")).write(b"text\n") == 5


@pytest.mark.journey
def test_the_log_of_a_process_that_is_killed_has_its_last_line(tmp_path: Path) -> None:
    code = (
        "import os, sys; from topotrain.launch.log_lines import *; "
        "sys.stdout = text_stream(1, LineStamps('worker 0/1')); print('last words'); os.kill(os.getpid(), 9)"
    )
    with (tmp_path / "log").open("wb") as file:
        done = subprocess.run([sys.executable, "-c", code], stdout=file, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -9
    assert log_tail(tmp_path / "log") == "last words\n"
