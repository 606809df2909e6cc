"""Memory and processor time of a process, as another one reads them."""

import mmap
import os
import shutil
import subprocess
import time
from pathlib import Path

from topotrain.launch.runtime.process_resources import INTERVAL_S, ResourceReader, resources


def test_this_process() -> None:
    found = resources("worker 0/0", os.getpid())
    assert found is not None and (found.who, found.pid) == ("worker 0/0", os.getpid())
    assert 10 << 20 < found.memory_bytes < 100 << 30
    # A mapping of its own: malloc may hand out again what earlier tests have freed, which is resident already.
    with mmap.mmap(-1, 50 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        until = time.process_time() + 0.1
        while time.process_time() < until:
            held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
        more = resources("worker 0/0", os.getpid())
    assert more is not None and more.memory_bytes - found.memory_bytes > 30 << 20
    assert 0.05 < more.cpu_s - found.cpu_s < 10


def test_a_name_with_parentheses_and_spaces_is_no_field(tmp_path: Path) -> None:
    named = tmp_path / "a) S 1 (b"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", named)
    with subprocess.Popen([named, "60"]) as process:
        try:
            found = resources("x", process.pid)
            assert found is not None and found.memory_bytes < 100 << 20 and found.cpu_s < 60
        finally:
            process.kill()


def test_a_process_that_is_gone_has_none() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert resources("x", process.pid) is None  # it has ended, and was not reaped
    process.wait()
    assert resources("x", process.pid) is None


def test_processes_are_read_once_a_second() -> None:
    reader = ResourceReader()
    assert [reader.due(at) for at in (7.0, 7.0 + INTERVAL_S / 2, 7.0 + INTERVAL_S)] == [True, False, True]
    found = list(reader.read([("a", os.getpid()), ("b", 2**22 + 1)]))
    assert [each.who for each in found] == ["a"]
