"""The hook that watches all servers of the suite: it ends who unpickles, and nobody else."""

import pickle
import re
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import unpickle_audit
from single_client import SERVERS, ClientHarness, applied

HARMLESS = """
import dataclasses, collections, ast, string, fractions, json
@dataclasses.dataclass
class A: x: int
collections.namedtuple("B", "a b")
eval("1 + 1"), exec("x = 1"), json.loads("[1]")
import colorsys, topotrain.config.field_checks
"""


def run(code: str) -> "subprocess.CompletedProcess[str]":
    support = Path(unpickle_audit.__file__).parent
    paths = [str(support), str(support.parents[1])]
    setup = f"import sys; sys.path[:0] = {paths!r}; import unpickle_audit; unpickle_audit.in_servers()\n"
    return subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, timeout=300)


@pytest.mark.journey
@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import pickle; pickle.loads(b'cos\\nsystem\\n.')", "a server unpickled os.system"),
        ("import marshal; marshal.loads(marshal.dumps(3))", "a server loaded marshalled code"),
    ],
)
def test_whoever_unpickles_in_a_server_ends_it_and_what_a_server_does_anyway_is_no_offense(
    code: str, text: str
) -> None:
    done = run(f"{HARMLESS}\nprint('harmless', flush=True)\n{code}")
    assert done.stdout == "harmless\n", done.stderr
    assert done.returncode == unpickle_audit.EXIT
    assert text in done.stderr


def test_the_watched_functions_are_there() -> None:
    for path, name in unpickle_audit._DOORS:
        assert f"def {name}(" in Path(path).read_text(encoding="utf-8"), f"{path} has no function {name}"


def test_a_door_in_this_process_is_watched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = pickle.dumps(Fraction(1, 3))
    pickle.loads(raw)  # the test's own business
    client = ClientHarness().exchange
    check, here = type(client._validator).check, threading.current_thread()

    def check_or_unpickle(*given: Any) -> None:
        # Threads of servers that other tests have left behind check messages, too.
        pickle.loads(raw) if threading.current_thread() is here else check(*given)

    monkeypatch.setattr(type(client._validator), "check", check_or_unpickle)
    with pytest.raises(
        AssertionError, match=f"audit: unpickled fractions.Fraction in handle on {re.escape(here.name)}"
    ):
        client.handle(SERVERS[0], applied(0))
    assert unpickle_audit.FOUND
    unpickle_audit.FOUND.clear()
