"""The worked example of CONTRIBUTING is written into a folder, and a server runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import topotrain.extensions

topotrain.extensions.__path__.append(sys.argv[1])  # as if the folder were in topotrain/extensions
sys.path.insert(0, "tests/support")

import server_core
from server_core import Core
from topotrain.core import protocol as m
from topotrain.extensions.update_counter.counter_messages import UpdateCount, UpdateCountRequest
from topotrain.extensions.update_counter.update_counter import UpdateCounter


def composed():
    COMPOSITION


TEST

test_a_server_counts_its_updates()

# The lines for the composition make the extension, and a server has it beside all others.
(extension,) = composed()
assert type(extension) is UpdateCounter
usual = server_core.server_extensions
server_core.server_extensions = lambda *args: (extension, *usual(*args))
core = Core()
core.steps(2)
worker = core.workers[1]
assert core.server.handle(worker, UpdateCountRequest(0)) == [(worker, UpdateCount(0, 2))]

# Another copy of the server goes on counting.
copy = UpdateCounter()
copy.load_state_dict(extension.state_dict())
copy.apply_step(0, 2, {}, 1.0)
assert copy.handle(worker, UpdateCountRequest(0)) == [(worker, UpdateCount(0, 3))]

# Its messages travel as bytes, and a peer's impossible numbers are refused.
assert m.decode(*m.encode(UpdateCountRequest(7))) == UpdateCountRequest(7)
try:
    core.server.handle(worker, UpdateCountRequest(-1))
except m.ProtocolError as error:
    assert "impossible numbers" in str(error)
else:
    raise AssertionError("a group below 0 was accepted")
print("done")
"""


def blocks() -> list[str]:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Add a feature to the servers\n")
    section, _, _ = section.partition("\n## ")
    return re.findall(r"^```(?:python|text)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


@pytest.mark.journey
def test_the_example_extension_of_contributing_runs(tmp_path: Path) -> None:
    messages, feature, composition, test = blocks()
    folder = tmp_path / "update_counter"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "counter_messages.py").write_text(messages)
    (folder / "update_counter.py").write_text(feature)
    program = PROGRAM.replace("COMPOSITION", composition.replace("\n", "\n    ").rstrip()).replace("TEST", test)
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
