"""`ProcessExitHook` and `exit` of a C library."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes

from topotrain.launch.runtime.process_exit import ProcessExitHook


class Mallinfo(ctypes.Structure):
    _fields_ = [(f"field_{number}", ctypes.c_size_t) for number in range(10)]

    @property
    def in_use(self):
        return self.field_7


class Part:
    def is_complete(self):
        return True

    def end(self):
        print("the work ends", flush=True)
        return 0


libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo
of_a_library = ctypes.CFUNCTYPE(None)(lambda: print("a library ends", flush=True))
hook = ProcessExitHook(Part())
hook.watch()
hook.loop_ended()
before = libc.mallinfo2().in_use
for _ in range(5000):
    hook.loop_ended()
print(libc.mallinfo2().in_use - before, flush=True)
libc["__cxa_atexit"](of_a_library, None, None)
hook.loop_ended()
libc.exit(CODE)
"""


def run(code: int) -> tuple[int, list[str], int]:
    """Leave a process after 5000 loops; return the bytes that these took, what was printed then, and the exit code."""
    command = [sys.executable, "-c", PROGRAM.replace("CODE", str(code))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not ended.stderr
    taken, *rest = ended.stdout.splitlines()
    return int(taken), rest, ended.returncode


@pytest.mark.journey
def test_the_work_ends_once_and_before_what_a_library_registered_in_an_earlier_loop() -> None:
    taken, *ended = run(0)
    assert ended == [["the work ends", "a library ends"], 0]
    assert taken < 1000, "a process of thousands of loops takes no memory for them"


@pytest.mark.journey
def test_an_exit_code_of_an_error_ends_no_work() -> None:
    assert run(3)[1:] == (["a library ends"], 3)
