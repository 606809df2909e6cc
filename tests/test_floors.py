"""Imports go downward only; the lower floors think and do not do; third-party packages stay on their shelf.

Read from the syntax tree, so that an import inside a function counts as well. The tables below are the whole rule:
there is no list of exceptions.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "topotrain"
TOP = "topotrain"

FLOORS = (
    "private checks job protofile singanet textproto events spans",
    "topology asynchrony regrouping seats slices flatfile statetable tablefile rhythm",
    "message handling codecs finite compression bitmaps canonical accord samples reduction given collective "
    "consistency schedule kernels update neighbor leases deposits runs position shard encoding windows model snapshot "
    "backup readers ending membership snapshotbook crosscut snapshotting "
    "tables tablerows tablerules tablemodes tablecopy tablebook manners opening server gateway views comparison "
    "replication transfer",
    "jitter wire torchdist rendezvous torchurl",
    "waiting deskdoor statedoor exchange tabledoor engine ferry mirror buffers gradients worker lazy optimizer split "
    "dice sampling feeds streams repeats data checkpoint roads checkpointwriter lifelines copies host",
    "faults rehearsal witness archive lives trial elastic simulate launch plan",
    "watch front cli",
)
PLACES = {place: (floor, step) for floor, row in enumerate(FLOORS) for step, place in enumerate(row.split())}
ROOF = ("__init__", "__main__")  # above every floor: may import all, and nobody imports them

WORLD = """
    socket socketserver ssl select selectors asyncio http urllib
    threading _thread multiprocessing concurrent subprocess signal os.fork torch.distributed torch.multiprocessing
    time datetime random secrets uuid os.urandom numpy.random os.environ os.environb os.getenv
"""
PURE_FLOORS = 3
HEAVY = frozenset({"torch", "numpy"})
LIGHT_FLOORS = 2

SHELVES = {
    "torch": ("*",),
    "numpy": ("*",),
    "typer": ("cli.py", "front/commands_*.py", "watch/*"),
    "rich": ("cli.py", "watch/*"),
    "google.protobuf": ("protofile.py", "textproto.py"),
    "yaml": ("textproto.py", "launch/kubernetes.py"),
    "matplotlib": ("watch/plot.py", "watch/cutplot.py"),
    "safetensors": ("*",),
    "redis": ("rendezvous/redis.py",),
    "cryptography": ("wire/tls.py",),
    "submitit": ("launch/submitit.py",),
    "transformers": ("front/transformers.py",),
    "accelerate": ("front/accelerate.py",),
    "pytorch_lightning": ("front/lightning.py",),
    "lightning_utilities": ("front/lightning.py",),
    "ray": ("launch/ray.py",),
}
# optional extras: imported inside the function that needs them
LAZY = frozenset({"yaml", "matplotlib", "redis", "cryptography", "submitit", "ray"})
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


def place_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


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


def complaints(root: Path) -> list[str]:
    """What is wrong in the package at `root`, one text per finding: file, line, import, and the rule it breaks."""
    readers = list(read(root))
    modules = {module_of(reader.file) for reader in readers}
    found = [f"{TOP}/{r.file}: has no floor" for r in readers if place_of(r.file) not in {*PLACES, *ROOF}]
    readers = [reader for reader in readers if place_of(reader.file) in {*PLACES, *ROOF}]
    for reader in readers:
        found += [text for use in reader.imports for text in (*wrong_way(use, modules), *wrong_shelf(use))]
        found += [text for use in (*reader.imports, *reader.touched) for text in not_pure(use)]
    return found + circles(readers, modules) + several_files(readers)


def target_of(use: Use, modules: set[str]) -> str | None:
    """The module of ours that `use` imports: `from topotrain.wire import tcp` means the module, if there is one."""
    names = (use.name, use.name.rpartition(".")[0])
    ours = (name for name in names if name == TOP or name.startswith(f"{TOP}."))
    return next((name for name in ours if name in modules), next((n for n in names if n.startswith(f"{TOP}.")), None))


def wrong_way(use: Use, modules: set[str]) -> Iterator[str]:
    target, here = target_of(use, modules), place_of(use.file)
    if target is None or here in ROOF:
        return
    there = target.split(".")[1] if "." in target else "__init__"
    if there == here:
        return
    if there not in PLACES:
        yield use.complain(f"{there} is on no floor below {here}")
    elif PLACES[there] > PLACES[here]:
        yield use.complain(
            f"goes up: {here} is on floor {PLACES[here][0]}, {there} on floor {PLACES[there][0]} above it"
        )


def not_pure(use: Use) -> Iterator[str]:
    floor = PLACES.get(place_of(use.file), (99, 0))[0]
    if floor < PURE_FLOORS and within(use.name, frozenset(WORLD.split())):
        yield use.complain(f"floor {floor} has no socket, thread, clock, environment or randomness")
    if floor < LIGHT_FLOORS and within(use.name, HEAVY):
        yield use.complain(f"floor {floor} does without torch and numpy")


def wrong_shelf(use: Use) -> Iterator[str]:
    top = use.name.split(".")[0]
    if top == TOP or top in sys.stdlib_module_names:
        return
    package = next((name for name in SHELVES if within(use.name, frozenset({name}))), None)
    if package is None:
        yield use.complain(f"{top} is on no shelf: the table SHELVES of this test says which file may import what")
    elif not any(fnmatch(use.file, pattern) for pattern in SHELVES[package]):
        yield use.complain(f"only {', '.join(SHELVES[package])} may import {package}")
    elif package in LAZY and not use.lazy:
        yield use.complain(f"{package} is optional: import it inside the function that needs it")


def circles(readers: list[Reader], modules: set[str]) -> list[str]:
    """Inside a folder a file may import the folder's __init__ and earlier siblings: some order must exist."""
    uses: dict[tuple[str, str], Use] = {}
    for reader in readers:
        here = module_of(reader.file)
        for use in reader.imports:
            target = target_of(use, modules)
            if target and target != here and target.split(".")[1:2] == here.split(".")[1:2] != []:
                uses.setdefault((here, target), use)
    try:
        TopologicalSorter({here: [t for h, t in uses if h == here] for here, _ in uses}).prepare()
    except CycleError as error:
        # graphlib lists a circle from the imported to the importing side.
        circle = [uses[here, target].complain("") for target, here in zip(error.args[1], error.args[1][1:])]
        return ["siblings import one another in a circle: " + " and ".join(circle)]
    return []


def several_files(readers: list[Reader]) -> list[str]:
    found = []
    for package in ONE_FILE:
        uses = [use for reader in readers for use in reader.imports if within(use.name, frozenset({package}))]
        if len({use.file for use in uses}) > 1:
            found += [use.complain(f"{package} belongs to one file") for use in uses]
    return found


def test_every_import_goes_downward_and_stays_on_its_shelf():
    found = complaints(PACKAGE)
    assert not found, "\n" + "\n".join(found)


def test_the_map_is_read_without_torch():
    code = (
        "import sys, topotrain.topology, topotrain.slices; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, timeout=60, check=False).returncode == 0


GOOD = {
    "__init__.py": "from topotrain.cli import main\n",
    "job.py": "import json\n",
    "textproto.py": "import os\nfrom google.protobuf import text_format\nfrom topotrain.job import Job\n",
    "topology.py": "from topotrain import job\n",
    "server.py": "import torch\nfrom topotrain.topology import layout\n",
    "wire/__init__.py": "import socket\n",
    "wire/tcp.py": "from topotrain.wire import Wire\nfrom . import auth\nfrom ..server import Server\n",
    "wire/auth.py": "import secrets\n",
    "watch/plot.py": "def plot():\n    import matplotlib.pyplot as plt\n",
    "cli.py": "import typer\nimport safetensors\nfrom topotrain.watch.plot import plot\n",
}


def build(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / TOP / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / TOP


def test_the_guard_accepts_a_clean_tree(tmp_path):
    assert complaints(build(tmp_path, GOOD)) == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("job.py", "\nfrom topotrain.server import Server\n", "topotrain/job.py:2: topotrain.server.Server: goes up"),
        ("job.py", "from .topology import layout\n", "topotrain/job.py:1: topotrain.topology.layout: goes up"),
        ("slices.py", "def f():\n    import topotrain.wire.tcp\n", "slices.py:2: topotrain.wire.tcp: goes up"),
        ("topology.py", "from topotrain import slices\n", "topotrain.slices"),
        ("server.py", "from topotrain import prepare\n", "server.py:1: topotrain.prepare"),
        ("server.py", "import importlib\nimportlib.import_module('topotrain.cli')\n", "server.py:2: topotrain.cli"),
        ("server.py", "import torch.distributed as dist\n", "server.py:1: torch.distributed: floor 2 has no socket"),
        ("server.py", "import torch\ntorch.multiprocessing.Queue()\n", "server.py:2: torch.multiprocessing"),
        ("server.py", "from time import monotonic\n", "server.py:1: time.monotonic: floor 2 has no"),
        ("events.py", "import os as o\nx = o.environ['A']\n", "events.py:2: os.environ: floor 0 has no"),
        ("leases.py", "from os import environ\n", "leases.py:1: os.environ: floor 2 has no"),
        ("slices.py", "import torch\n", "slices.py:1: torch: floor 1 does without"),
        ("textproto.py", "import yaml\n", "textproto.py:1: yaml: yaml is optional"),
        ("server.py", "import pandas\n", "server.py:1: pandas: pandas is on no shelf"),
        ("server.py", "from rich.table import Table\n", "server.py:1: rich.table.Table: only cli.py, watch/* may"),
        ("host.py", "import safetensors.torch\n", "host.py:1: safetensors.torch: safetensors belongs to one file"),
        ("wire/auth.py", "from topotrain.wire.tcp import Tcp\n", "wire/auth.py:1: topotrain.wire.tcp.Tcp"),
        ("utils.py", "", "topotrain/utils.py: has no floor"),
    ],
)
def test_the_guard_catches(tmp_path, file, text, expected):
    found = complaints(build(tmp_path, GOOD | {"slices.py": ""} | {file: text}))
    assert any(expected in line for line in found), found
