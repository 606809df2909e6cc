"""Without an extension the core and the transports import, and servers train.

A test masks the modules of one extension, as if its folder or file were deleted, in a process that has imported torch
and forgets the package. Modules that the rest imports still are in STILL_NEEDED. That table may only shrink: a module
in it that is not imported fails the test.
"""

import json

import pytest
from process_pool import run_without_package

pytestmark = pytest.mark.journey

STILL_NEEDED = {
    "extensions.checkpointing": ("shard_snapshot", "table_file_layout"),
    "extensions.elastic": ("eligibility",),
}
"""By extension: modules that the protocol or another extension imports still."""

PROGRAM = """
import importlib, json, pkgutil, sys
from pathlib import Path

root, package, needed, simulated = Path.cwd(), *map(json.loads, sys.argv[1:])
masked = f"topotrain.{package}"
stays = {f"{masked}.{name}" for name in needed}
at = root / masked.replace(".", "/")
assert at.is_dir() or at.with_suffix(".py").is_file(), at
found = {".".join(path.relative_to(root).with_suffix("").parts) for path in at.rglob("*.py")} | {masked}
gone = {name.removesuffix(".__init__") for name in found} - stays - ({masked} if stays else set())
sys.modules.update(dict.fromkeys(gone))

for top in ("core", "comm") if simulated == "all" else ("core.server", "comm"):
    base = importlib.import_module(f"topotrain.{top}")
    for module in pkgutil.walk_packages(base.__path__, f"topotrain.{top}."):
        importlib.import_module(module.name)

from topotrain.launch.runtime import server_composition
if stays:  # the package is there, for these modules
    installed = server_composition.installed
    server_composition.installed = lambda name: name != package and installed(name)

from benchmarks.core import Core
core = Core()
core.steps(3)
assert core.server.state.version == 3
if simulated:
    sys.path[:0] = [str(root / "tests" / folder) for folder in ("support", "core/server")]
    import test_server
    test_server.test_groups_are_staged_apart_and_applied_one_after_the_other()
if simulated == "all":
    import test_sim_commit
    test_sim_commit.test_pushes_of_a_dead_step_do_not_reach_the_next_one()
unused = sorted(name for name in stays if name not in sys.modules)
print(f"{len(gone)} modules masked; not needed any more: {unused}")
"""


@pytest.mark.parametrize(
    ("extension", "simulated"),
    [
        ("extensions.assignment", "server"),  # the workers of a simulation assign values, too
        ("extensions.tables", "all"),
        ("extensions.backup_workers", "all"),
        ("extensions.collectives", "all"),
        ("extensions.outer_optimizer", "all"),
        ("extensions.group_averaging", "server"),  # a simulation checks the sums over elastic groups
        ("extensions.compression", "all"),
        ("extensions.host_sums", ""),  # a simulation has its links between workers
        ("extensions.checkpointing", "server"),  # the process of a simulated server imports the writer of snapshots
        ("extensions.elastic", "server"),  # the process of a simulated server imports it for its launcher's questions
        ("extensions.decision_record", "all"),
        ("extensions.resume", ""),  # the client, which a simulation needs, imports its messages' layout
        ("extensions.worker_values", "server"),  # the client, which a simulation needs, has its part of it
        ("training.data.lease_queue", ""),  # the client, which a simulation needs, imports a constant of it
    ],
)
def test_the_rest_trains_without(extension: str, simulated: str, warm_at: str) -> None:
    words = map(json.dumps, (extension, STILL_NEEDED.get(extension, ()), simulated))
    code, out = run_without_package(warm_at, PROGRAM, *words)
    assert code == 0, out
    assert out.endswith("not needed any more: []\n") and not out.startswith("0 "), out
