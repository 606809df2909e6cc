"""Imports go one way: each package imports only those above it in ORDER; rules are pure; libraries have their files.

Read from the syntax tree, so that an import inside a function counts as well. UPWARD is the only list of exceptions. It
may only shrink: an entry that no import needs any more fails the test as an import that is not listed does.
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "topotrain"
TOP = "topotrain"

ORDER = ("config", "core", "comm", "training", "extensions", "parallel", "launch", "compat", "tools")
ROOF = ("__init__.py", "__main__.py")  # above every package: they may import all, and no module imports them
LARGEST_FOLDER = 15

UPWARD = """
"""
"""What still imports a later package, as importing>imported."""

WORLD = """
    socket socketserver ssl select selectors asyncio http urllib
    threading _thread multiprocessing concurrent subprocess signal os.fork torch.distributed torch.multiprocessing
    time datetime random secrets uuid os.urandom numpy.random os.environ os.environb os.getenv
"""
PURE = """
    config/* core/* *_messages.py training/data/batch_ranges.py training/data/lease_queue.py
    extensions/backup_workers/backup_rules.py extensions/backup_workers/quorum.py
    extensions/checkpointing/cross_group_cut.py
    extensions/checkpointing/averaging_cut.py extensions/checkpointing/group_cut.py extensions/group_averaging/*
    extensions/checkpointing/checkpoint_extension.py extensions/checkpointing/data_position.py
    core/model/safetensors_layout.py
    extensions/checkpointing/server_snapshots.py extensions/checkpointing/shard_snapshot.py
    extensions/checkpointing/snapshot_coordinator.py extensions/collectives/algorithms.py
    extensions/collectives/collective_rules.py
    extensions/collectives/collective_server.py extensions/collectives/precomputed_gradients.py
    extensions/backup_workers/quorum_pushes.py
    extensions/compression/* extensions/elastic/eligibility.py extensions/elastic/membership.py
    extensions/elastic/group_departure.py
    extensions/replication/buffer_views.py
    extensions/replication/replica_checksum.py extensions/replication/replica_placement.py
    extensions/replication/replicated_server.py
    extensions/replication/replication_rules.py
    extensions/replication/state_codec.py extensions/replication/state_machine.py
    extensions/replication/state_transfer.py
    extensions/resume/worker_state_store.py extensions/tables/push_modes.py extensions/tables/row_optimizers.py
    extensions/tables/row_storage.py extensions/tables/table_*.py parallel/split_rules.py
"""
NOT_PURE = ("extensions/tables/table_client.py",)
"""Inside PURE: it waits for rows."""
HEAVY = frozenset({"torch", "numpy"})
LIGHT = """
    config/* core/events.py core/profiling/spans.py extensions/backup_workers/backup_rules.py
    extensions/collectives/collective_rules.py extensions/compression/compression_rules.py parallel/split_rules.py
    extensions/group_averaging/averaging_rules.py tools/advice/auto_rules.py
    core/optim/state_table.py extensions/elastic/eligibility.py
    extensions/replication/replica_placement.py extensions/replication/replication_rules.py
    core/model/safetensors_layout.py extensions/checkpointing/table_file_layout.py
    extensions/compression/encoded_sizes.py extensions/outer_optimizer/rounds.py launch/runtime/round_traffic.py
"""
"""Read by the command line before torch is imported."""

LIBRARIES = {
    "torch": ("*",),
    "numpy": ("*",),
    "typer": ("tools/cli/*", "tools/monitor/*", "tools/replay/replay_command.py"),
    "rich": ("tools/cli/run.py", "tools/monitor/*", "launch/console_output.py"),
    "google.protobuf": ("config/proto_schema.py", "config/job_file.py"),
    "yaml": ("config/job_file.py", "launch/launchers/kubernetes.py"),
    "matplotlib": ("tools/monitor/loss_curves.py", "tools/plan/graph_plot.py"),
    "safetensors": ("*",),
    "redis": ("comm/store/redis_store.py",),
    "cryptography": ("comm/security/tls.py",),
    "submitit": ("launch/launchers/submitit.py",),
    "transformers": ("compat/integrations/transformers.py",),
    "accelerate": ("compat/integrations/accelerate.py",),
    "pytorch_lightning": ("compat/integrations/lightning.py",),
    "lightning_utilities": ("compat/integrations/lightning.py",),
    "ray": ("launch/launchers/ray.py",),
    "prometheus_client": ("tools/exporters/metrics.py",),
    "tensorboard": ("tools/exporters/curve_exports.py",),
}
# optional extras: imported inside the function that needs them
LAZY = frozenset({"yaml", "matplotlib", "redis", "cryptography", "submitit", "ray", "prometheus_client", "tensorboard"})
ONE_FILE = frozenset({"safetensors"})


@dataclass(frozen=True)
class Use:
    """One import, or one use of a module's attribute, on a line of a file (path relative to the package)."""

    file: str
    line: int
    name: str
    lazy: bool

    def complain(self, why: str) -> str:
        return f"{TOP}/{self.file}:{self.line}: {self.name}: {why}"


def package_of(file: str) -> str:
    return file.split("/")[0]


def is_one_of(file: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


def module_of(file: str) -> str:
    return ".".join((TOP, *file.removesuffix(".py").split("/"))).removesuffix(".__init__")


def within(name: str, names: frozenset[str]) -> bool:
    """`name` is one of `names`, or inside one of them."""
    parts = name.split(".")
    return any(".".join(parts[:n]) in names for n in range(1, len(parts) + 1))


class Reader(ast.NodeVisitor):
    """Collects imports (relative ones resolved, import_module with a literal too) and dotted uses of modules."""

    def __init__(self, file: str) -> None:
        self.file, self.depth = file, 0
        self.package = module_of(file).split(".")[: None if file.endswith("__init__.py") else -1]
        self.aliases: dict[str, str] = {}
        self.imports: list[Use] = []
        self.touched: list[Use] = []

    def note(self, uses: list[Use], node: ast.AST, name: str) -> None:
        uses.append(Use(self.file, getattr(node, "lineno", 0), name, self.depth > 0))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.aliases[alias.asname or alias.name.split(".")[0]] = (
                alias.name if alias.asname else alias.name.split(".")[0]
            )
            self.note(self.imports, node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            self.aliases[alias.asname or alias.name] = f"{module}.{alias.name}"
            self.note(self.imports, node, f"{module}.{alias.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.dotted(node)
        if name:
            self.note(self.touched, node, name)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self.dotted(node.func)
        if called in ("importlib.import_module", "__import__") and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                self.note(self.imports, node, target.value)
        self.generic_visit(node)

    def dotted(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id if node.id == "__import__" else "")
        base = self.dotted(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else ""


def read(root: Path) -> Iterator[Reader]:
    for path in sorted(root.rglob("*.py")):
        reader = Reader(path.relative_to(root).as_posix())
        reader.visit(ast.parse(path.read_text(), str(path)))
        yield reader


def complaints(root: Path, upward: frozenset[str] = frozenset()) -> list[str]:
    """What is wrong in the package at `root`, one text per finding: file, line, import, and the rule it breaks."""
    readers = list(read(root))
    modules = {module_of(reader.file) for reader in readers}
    homeless = [r.file for r in readers if package_of(r.file) not in ORDER and r.file not in ROOF]
    found = [f"{TOP}/{file}: stands in none of the packages {', '.join(ORDER)}" for file in homeless]
    readers = [reader for reader in readers if reader.file not in homeless]
    used: set[str] = set()
    for reader in readers:
        for use in reader.imports:
            edge = upward_edge(use, modules)
            used |= {edge} if edge else set()
            if edge and edge not in upward:
                found.append(use.complain(f"goes up: {edge.replace('>', ' is in an earlier package than ')}"))
            found += wrong_library(use)
        found += [text for use in (*reader.imports, *reader.touched) for text in not_pure(use)]
    found += [f"{edge}: listed as an upward import, and no import needs it" for edge in sorted(upward - used)]
    return found + circles(readers, modules, upward) + several_files(readers) + crowds(readers)


def target_of(use: Use, modules: set[str]) -> str | None:
    """The module of ours that `use` imports: `from topotrain.wire import tcp` means the module, if there is one."""
    names = (use.name, use.name.rpartition(".")[0])
    ours = (name for name in names if name == TOP or name.startswith(f"{TOP}."))
    return next((name for name in ours if name in modules), next((n for n in names if n.startswith(f"{TOP}.")), None))


def upward_edge(use: Use, modules: set[str]) -> str:
    """importing>imported, where the imported module is in a later package or above them all; else ""."""
    target = target_of(use, modules)
    if target is None or use.file in ROOF:
        return ""
    here, there = module_of(use.file).removeprefix(f"{TOP}."), target.removeprefix(TOP).removeprefix(".")
    later = not there or there.split(".")[0] not in ORDER or rank(there.split(".")[0]) > rank(package_of(use.file))
    return f"{here}>{there or TOP}" if later else ""


def rank(package: str) -> int:
    return ORDER.index(package)


def not_pure(use: Use) -> Iterator[str]:
    if is_one_of(use.file, PURE.split()) and use.file not in NOT_PURE and within(use.name, frozenset(WORLD.split())):
        yield use.complain("a rule has no socket, thread, clock, environment or randomness")
    if is_one_of(use.file, LIGHT.split()) and within(use.name, HEAVY):
        yield use.complain("the command line reads this file without torch and numpy")


def wrong_library(use: Use) -> Iterator[str]:
    top = use.name.split(".")[0]
    if top == TOP or top in sys.stdlib_module_names:
        return
    package = next((name for name in LIBRARIES if within(use.name, frozenset({name}))), None)
    if package is None:
        yield use.complain(f"{top} is not in the table LIBRARIES of this test, which says what file may import what")
    elif not is_one_of(use.file, LIBRARIES[package]):
        yield use.complain(f"only {', '.join(LIBRARIES[package])} may import {package}")
    elif package in LAZY and not use.lazy:
        yield use.complain(f"{package} is optional: import it inside the function that needs it")


def circles(readers: list[Reader], modules: set[str], upward: frozenset[str]) -> list[str]:
    """Some order of all modules must exist in which each imports only earlier ones."""
    uses: dict[tuple[str, str], Use] = {}
    for reader in readers:
        here = module_of(reader.file)
        for use in reader.imports:
            target = target_of(use, modules)
            if target and target != here and upward_edge(use, modules) not in upward:
                uses.setdefault((here, target), use)
    try:
        TopologicalSorter({here: [t for h, t in uses if h == here] for here, _ in uses}).prepare()
    except CycleError as error:
        # graphlib lists a circle from the imported to the importing side.
        circle = [uses[here, target].complain("") for target, here in zip(error.args[1], error.args[1][1:])]
        return ["modules import one another in a circle: " + " and ".join(circle)]
    return []


def crowds(readers: list[Reader]) -> list[str]:
    """Folders that are too full to be looked over, and names of modules that occur more than once."""
    files = [Path(reader.file) for reader in readers if not reader.file.endswith("__init__.py")]
    folders, names = Counter(file.parent for file in files), Counter(file.stem for file in files)
    found = [f"{TOP}/{folder}: {count} files" for folder, count in folders.items() if count > LARGEST_FOLDER]
    return found + [
        f"{TOP}/{file}: another module is called {file.stem}, too" for file in files if names[file.stem] > 1
    ]


def several_files(readers: list[Reader]) -> list[str]:
    found = []
    for package in ONE_FILE:
        uses = [use for reader in readers for use in reader.imports if within(use.name, frozenset({package}))]
        if len({use.file for use in uses}) > 1:
            found += [use.complain(f"{package} belongs to one file") for use in uses]
    return found


def test_every_import_goes_to_an_earlier_package_and_libraries_stay_in_their_files():
    found = complaints(PACKAGE, frozenset(UPWARD.split()))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.journey
def test_the_layout_of_a_job_is_read_without_torch():
    code = "import sys, topotrain.config.topology, topotrain.config.sharding as s; sys.exit('torch' in sys.modules or "
    code += "'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, timeout=300, check=False).returncode == 0


GOOD = {
    "__init__.py": "from topotrain.tools.cli.app import main\n",
    "config/job.py": "import json\n",
    "config/job_file.py": "import os\nfrom google.protobuf import text_format\nfrom topotrain.config.job import Job\n",
    "config/topology.py": "from topotrain.config import job\n",
    "core/server/server.py": "import torch\nfrom topotrain.config.topology import layout\n",
    "comm/transport/__init__.py": "import socket\n",
    "comm/transport/tcp.py": "from topotrain.comm.transport import T\nfrom ..security import tokens\n"
    "from ...core.server.server import Server\n",
    "comm/security/tokens.py": "import secrets\n",
    "tools/monitor/loss_curves.py": "def plot():\n    import matplotlib.pyplot as plt\n",
    "tools/cli/app.py": "import typer\nimport safetensors\nfrom topotrain.tools.monitor.loss_curves import plot\n",
}


def build(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / TOP / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / TOP


def test_the_guard_accepts_a_clean_tree(tmp_path):
    assert complaints(build(tmp_path, GOOD)) == []


SERVER, JOB = "core/server/server.py", "config/job.py"


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (JOB, "\nfrom topotrain.core.server.server import S\n", "job.py:2: topotrain.core.server.server.S: goes up"),
        (JOB, "from ..core.server import server\n", "job.py:1: topotrain.core.server.server: goes up"),
        (
            "config/x.py",
            "def f():\n    import topotrain.comm.transport.tcp\n",
            "x.py:2: topotrain.comm.transport.tcp: go",
        ),
        (SERVER, "from topotrain import prepare\n", "server.py:1: topotrain.prepare"),
        (SERVER, "import importlib\nimportlib.import_module('topotrain.tools.cli.app')\n", "py:2: topotrain.tools.cli"),
        (SERVER, "import torch.distributed as dist\n", "server.py:1: torch.distributed: a rule has no socket"),
        (SERVER, "import torch\ntorch.multiprocessing.Queue()\n", "server.py:2: torch.multiprocessing"),
        (SERVER, "from time import monotonic\n", "server.py:1: time.monotonic: a rule has no"),
        ("core/events.py", "import os as o\nx = o.environ['A']\n", "events.py:2: os.environ: a rule has no"),
        ("extensions/tables/table_server.py", "from os import environ\n", "table_server.py:1: os.environ: a rule has"),
        ("config/sharding.py", "import torch\n", "sharding.py:1: torch: the command line reads"),
        ("config/job_file.py", "import yaml\n", "job_file.py:1: yaml: yaml is optional"),
        (SERVER, "import pandas\n", "server.py:1: pandas: pandas is not in the table LIBRARIES"),
        (SERVER, "from rich.table import Table\n", "server.py:1: rich.table.Table: only tools/cli/run.py, tools/mon"),
        ("launch/host.py", "import safetensors.torch\n", "host.py:1: safetensors.torch: safetensors belongs to one"),
        ("comm/security/tokens.py", "from topotrain.comm.transport.tcp import Tcp\n", "in a circle"),
        ("config/sub/job.py", "", "topotrain/config/job.py: another module is called job, too"),
        ("utils.py", "", "topotrain/utils.py: stands in none of the packages"),
    ],
)
def test_the_guard_catches(tmp_path, file, text, expected):
    found = complaints(build(tmp_path, GOOD | {file: text}))
    assert any(expected in line for line in found), found


def test_the_guard_catches_a_folder_that_is_too_full_and_the_list_of_upward_imports_can_only_shrink(tmp_path):
    root = build(tmp_path, GOOD | {"config/x.py": "from topotrain.core.server.server import S\n"})
    edge = "config.x>core.server.server"
    assert complaints(root, frozenset({edge})) == []
    crowd = {f"comm/store/module_{n}.py": "" for n in range(LARGEST_FOLDER + 1)}
    found = complaints(build(tmp_path, {"config/x.py": "", **crowd}), frozenset({edge}))
    assert found == [f"{edge}: listed as an upward import, and no import needs it", "topotrain/comm/store: 16 files"]
