"""The rule of `benchmarks.endurance`: which growth of a process counts."""

import subprocess
import sys

import pytest

from benchmarks.endurance import LEAST, MEMORY, Found, Look, ProcessHistory, grown, look

MB = 1_000_000

FORKED = f"""
import os, sys

inherited = bytearray(os.urandom(20 * {MB}))
pid = os.fork()
if pid:
    print(pid, flush=True)
    os.waitpid(pid, 0)
    os._exit(0)
for line in sys.stdin:
    if line == "copy\\n":
        inherited[::4096] = bytes(len(inherited[::4096]))
    else:
        kept = bytearray(os.urandom(20 * {MB}))
    print("done", flush=True)
"""


@pytest.mark.journey
def test_memory_is_what_is_new_in_a_process_and_no_copy_of_an_inherited_page() -> None:
    with subprocess.Popen([sys.executable, "-c", FORKED], stdin=-1, stdout=-1, text=True, bufsize=1) as process:
        assert process.stdin is not None and process.stdout is not None
        pid = int(process.stdout.readline())

        def memory_after(words: str) -> int:
            process.stdin.write(f"{words}\n")
            assert process.stdout.readline() == "done\n"
            seen = look(pid)
            assert seen is not None
            return seen.memory

        first = look(pid)
        assert first is not None
        copied = memory_after("copy") - first.memory
        assert copied < 2 * MB
        assert memory_after("keep") - first.memory >= copied + 20 * MB
        process.stdin.close()
    assert look(pid) is None


def test_a_process_that_grows_in_a_straight_line_is_named() -> None:
    def found(step: int) -> list[str]:
        job = Found(
            "job",
            histories={7: ProcessHistory("server 0/0", [Look(100 * MB + at * step, 9, 9) for at in range(4 * LEAST)])},
        )
        return grown(job)

    assert not found(0)
    assert not found(MEMORY // (2 * LEAST))
    assert "server 0/0 grew" in found(MEMORY // (2 * LEAST) + 1)[0]
