"""The program's output in real jobs: whole, at the pace of its reader, who never keeps the launcher from its work."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from job_runner import ALLREDUCE, JobRunner
from wait_limit import ended_after

from topotrain.launch.log_lines import without_stamps

pytestmark = pytest.mark.journey

LINES = 150_000  # 15 MB in each epoch


@contextmanager
def talking(runner: JobRunner, *args: str) -> "Iterator[subprocess.Popen[bytes]]":
    """A job whose main worker prints more than anything keeps."""
    command = replace(runner, warm_at="").command(ALLREDUCE, "talk.py", str(LINES), *args)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=runner.folder, **pipes) as job:
        try:
            yield job
        finally:
            job.kill()


def pid_of_main(job: "subprocess.Popen[bytes]") -> int:
    line = job.stdout.readline().split()
    assert line[0] == b"pid", line
    return int(line[1])


def stop_reading(runner: JobRunner, job: "subprocess.Popen[bytes]", main: int) -> None:
    """Read nothing more; return when the main worker has stood still for a second, or has ended."""
    log, size, looks = runner.folder / "job" / "logs" / "worker-0-0.log", 0, 0
    with ended_after(300):
        while looks < 50 and os.path.exists(f"/proc/{main}"):
            there = int.from_bytes(fcntl.ioctl(job.stdout, termios.FIONREAD, bytes(4)), sys.byteorder)
            before, size = size, log.stat().st_size
            looks = looks + 1 if size == before and there > 1 << 15 else 0
            time.sleep(0.02)


def test_a_slow_reader_gets_every_line(runner: JobRunner):
    with talking(runner) as job, ended_after(300):
        main = pid_of_main(job)
        stop_reading(runner, job, main)
        out, err = job.communicate()
    assert job.returncode == 0, err
    wanted = [f"{number:099d}" for number in range(LINES)]
    found = out.decode().splitlines()
    assert len(found) == 2 * LINES and found == wanted * 2
    log = (runner.folder / "job" / "logs" / "worker-0-0.log").read_bytes()
    assert without_stamps(log).decode().splitlines()[1:] == found


def test_a_death_is_noticed_and_ctrl_c_ends_the_job_while_the_output_is_not_read(runner: JobRunner):
    with talking(runner, "forever") as job, ended_after(300):
        main = pid_of_main(job)
        stop_reading(runner, job, main)
        os.kill(main, signal.SIGKILL)
        heard = ""
        while "was killed by SIGKILL" not in heard:
            heard += job.stderr.readline().decode()
        job.send_signal(signal.SIGINT)
        err = job.stderr.read().decode()
        assert job.wait() == 130
    assert "ended by SIGINT" in err
    assert "bytes of output were not taken by their reader" in err and "/job/logs" in err
