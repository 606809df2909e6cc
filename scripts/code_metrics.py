"""Count what a reader of the package stumbles over: `python scripts/code_metrics.py [FOLDER]`.

Everything is read from the syntax tree of `topotrain/`; nothing is imported. Each row is printed beside the number of
the last release, which `scripts/code_metrics.json` holds, and beside the goal. `--write` makes the numbers of today
those of the last release. Whatever these numbers are, the command ends with code 0.

`--check` compares lines and modules of each part of the repository with its ceiling in `scripts/code_metrics.json`, and
ends with code 1 where a part is too large. `--lower` lowers the ceilings of parts that have become smaller; nothing
raises one. A loan lets the parts that share it exceed their ceilings together by so much, until it is paid back: what
one part has saved, another one may use until then.
"""

import argparse
import ast
import json
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELEASE = Path(__file__).with_suffix(".json")
MOST_METHODS, MOST_PARAMETERS, LONGEST_FIRST_LINE = 25, 8, 80
PEOPLE = re.compile(r"\b(who|whom|whose|whoever|whomever|nobody|somebody|everybody|anybody)\b", re.IGNORECASE)
FREE_RELATIVE = re.compile(
    r"(?:^|[.!?:]\s+|\n\s*\n\s*)(?:What(?:ever)?|Who(?:ever)?|That which|Whichever)\s+[^?]*?[.:]"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Row:
    """One number: what is counted, and what it should be at most (or at least, for a share)."""

    name: str
    goal: str


ROWS: Mapping[str, Row] = {
    "lines": Row("lines of the package", "<= 73,000"),
    "modules": Row("modules", "<= 500"),
    "callables": Row("parameters and fields that are bare callables", "<= 60"),
    "foreign_writes": Row("writes to attributes of other objects", "<= 60"),
    "private_reads": Row("reads of private attributes of other objects", "<= 20"),
    "lone_protocols": Row("Protocols with at most one class that fits", "0"),
    "large_classes": Row(f"classes with more than {MOST_METHODS} methods, without Topology", "0"),
    "long_signatures": Row(f"functions with more than {MOST_PARAMETERS} parameters, without the command line", "0"),
    "people": Row("who, whoever, nobody, … in docstrings and messages", "0"),
    "free_relatives": Row("sentences that begin with What, Who, That which", "<= 20"),
    "semicolons": Row("docstrings with more than one semicolon", "0"),
    "first_lines": Row(f"first lines of docstrings over {LONGEST_FIRST_LINE} characters", "0"),
    "comments": Row("comment lines per 1,000 lines", "40 to 60"),
}


def files(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def parameters(function: Function) -> list[ast.arg]:
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [arg for arg in named if arg.arg not in ("self", "cls")]


def is_callable_type(annotation: ast.expr | None, aliases: frozenset[str]) -> bool:
    """Whether a type is a Callable, or one of these or None, or a name of the package for one."""
    if annotation is None:
        return False
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return bool(re.match(r"\W*Callable\b", annotation.value))
    if isinstance(annotation, ast.BinOp):
        return is_callable_type(annotation.left, aliases) or is_callable_type(annotation.right, aliases)
    if isinstance(annotation, ast.Subscript):
        return is_callable_type(annotation.value, aliases)
    return isinstance(annotation, ast.Name) and annotation.id in aliases


def aliases_of_callable(trees: Iterable[ast.AST]) -> frozenset[str]:
    """Names that modules give to a Callable, such as `OnEvent = Callable[[Event], None]`."""
    found = {"Callable"}
    for tree in trees:
        for node in getattr(tree, "body", []):
            if isinstance(node, ast.Assign) and is_callable_type(node.value, frozenset({"Callable"})):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def callables(trees: list[ast.Module]) -> int:
    aliases = aliases_of_callable(trees)
    count = 0
    for tree in trees:
        count += sum(is_callable_type(arg.annotation, aliases) for f in functions(tree) for arg in parameters(f))
        fields = (node for c in classes(tree) for node in c.body if isinstance(node, ast.AnnAssign))
        count += sum(is_callable_type(node.annotation, aliases) for node in fields)
    return count


def imported_names(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found


def is_other(node: ast.expr) -> bool:
    """Whether it is another object than the one with this method; `super()` is the same object."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
        return False
    return not (isinstance(node, ast.Name) and node.id in ("self", "cls"))


def targets(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else (target,)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target


def foreign_writes(tree: ast.Module) -> int:
    written = (target for node in ast.walk(tree) for target in targets(node))
    return sum(isinstance(target, ast.Attribute) and is_other(target.value) for target in written)


def private_reads(tree: ast.Module) -> int:
    modules = imported_names(tree)
    count = 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load) or not is_other(node.value):
            continue
        of_module = isinstance(node.value, ast.Name) and node.value.id in modules
        count += node.attr.startswith("_") and not node.attr.startswith("__") and not of_module
    return count


def methods(node: ast.ClassDef) -> set[str]:
    return {f.name for f in node.body if isinstance(f, Function)}


def bases(node: ast.ClassDef) -> set[str]:
    names = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return {base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in names}


def lone_protocols(trees: list[ast.Module]) -> list[str]:
    """Protocols whose methods and attributes at most one class of the package has."""
    found = [node for tree in trees for node in classes(tree)]
    by_name = {node.name: node for node in found}

    def members(node: ast.ClassDef, seen: frozenset[str] = frozenset()) -> set[str]:
        own = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
        inherited = [by_name[b] for b in bases(node) if b in by_name and b not in seen and b != node.name]
        return methods(node) | own | {m for base in inherited for m in members(base, seen | {node.name})}

    held = {id(node): members(node) for node in found if "Protocol" not in bases(node)}
    lone = []
    for node in found:
        if "Protocol" in bases(node):
            wanted = {m for m in methods(node) if not m.startswith("__") or m == "__call__"}
            wanted |= {
                n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            }
            if wanted and sum(wanted <= has for has in held.values()) <= 1:
                lone.append(node.name)
    return lone


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            text = ast.get_docstring(node)
            if text:
                yield text


def messages(tree: ast.Module) -> Iterator[str]:
    """Texts with a space in them that are neither docstrings nor f-string parts counted twice."""
    documented = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | Function) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in documented else None
        if isinstance(text, str) and " " in text:
            yield text


def comment_lines(path: Path) -> int:
    with tokenize.open(path) as file:
        return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(file.readline))


def measure(package: Path) -> dict[str, int]:
    """All numbers of the package at `package`."""
    paths = files(package)
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in paths)
    texts = [text for tree in trees for text in docstrings(tree)]
    told = [text for tree in trees for text in messages(tree)]
    no_command = [tree for path, tree in zip(paths, trees) if "cli" not in path.parts]
    return {
        "lines": lines,
        "modules": len(paths),
        "callables": callables(trees),
        "foreign_writes": sum(map(foreign_writes, trees)),
        "private_reads": sum(map(private_reads, trees)),
        "lone_protocols": len(lone_protocols(trees)),
        "large_classes": sum(
            len(methods(c)) > MOST_METHODS and c.name != "Topology" for tree in trees for c in classes(tree)
        ),
        "long_signatures": sum(len(parameters(f)) > MOST_PARAMETERS for tree in no_command for f in functions(tree)),
        "people": sum(len(PEOPLE.findall(text)) for text in (*texts, *told)),
        "free_relatives": sum(len(FREE_RELATIVE.findall(text)) for text in texts),
        "semicolons": sum(text.count(";") > 1 for text in texts),
        "first_lines": sum(len(text.split("\n")[0]) > LONGEST_FIRST_LINE for text in texts),
        "comments": round(1000 * sum(map(comment_lines, paths)) / max(lines, 1)),
    }


def table(now: Mapping[str, int], before: Mapping[str, int]) -> str:
    """One line per number: name, today, last release, goal."""
    head = f"{'':68} {'now':>7} {'before':>7}  goal"
    rows = (f"{row.name:68} {now[key]:>7,} {before.get(key, '–'):>7}  {row.goal}" for key, row in ROWS.items())
    return "\n".join((head, *rows))


PACKAGES = ("config", "core", "comm", "training", "extensions", "parallel", "launch", "compat", "tools")


@dataclass(frozen=True)
class Part:
    """Files of the repository that have a ceiling: all with one of the suffixes in the folders, or right in them."""

    folders: tuple[str, ...]
    loan: str
    suffixes: tuple[str, ...] = (".py",)
    deep: bool = True

    def size(self, root: Path) -> dict[str, int]:
        """The lines of these files, and their number."""
        pattern = "**/*" if self.deep else "*"
        found = [path for folder in self.folders for path in (root / folder).glob(pattern)]
        found = [path for path in found if path.suffix in self.suffixes]
        return {"lines": sum(path.read_text(encoding="utf-8").count("\n") for path in found), "modules": len(found)}


PARTS: Mapping[str, Part] = {
    "topotrain, its root": Part(("topotrain",), "topotrain", deep=False),
    **{f"topotrain/{name}": Part((f"topotrain/{name}",), "topotrain") for name in PACKAGES},
    "the page's own files": Part(("topotrain",), "topotrain", (".js", ".css", ".html")),
    "benchmarks, scripts": Part(("benchmarks", "scripts"), "benchmarks"),
    "tests": Part(("tests",), "tests"),
}

Sizes = Mapping[str, Mapping[str, int]]


def excesses(now: Sizes, ceilings: Sizes, loans: Sizes) -> list[str]:
    """One sentence for each loan that the parts which share it exceed together; none: nothing is too large."""
    found = []
    for loan, most in loans.items():
        for what, allowed in most.items():
            above = {name: now[name][what] - ceilings[name][what] for name, part in PARTS.items() if part.loan == loan}
            if sum(above.values()) > allowed:
                parts = ", ".join(f"{name} by {by:,}" for name, by in above.items() if by > 0)
                found.append(f"{what} above the ceilings: {parts}; the loan of {loan} is {allowed:,}")
    return found


def size_table(now: Sizes, ceilings: Sizes) -> str:
    """One line per part: its lines and modules, each beside the ceiling."""
    head = f"{'':24} {'lines':>8} {'ceiling':>8} {'modules':>8} {'ceiling':>8}"
    cells = {
        name: [n for what in ("lines", "modules") for n in (now[name][what], ceilings[name][what])] for name in now
    }
    return "\n".join((head, *(f"{name:24} " + " ".join(f"{n:>8,}" for n in row) for name, row in cells.items())))


def lowered(now: Sizes, ceilings: Sizes) -> dict[str, dict[str, int]]:
    """The ceilings, those of parts that have become smaller lowered to today's size."""
    return {name: {what: min(now[name][what], most) for what, most in row.items()} for name, row in ceilings.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", type=Path, default=ROOT / "topotrain", help="folder of the package")
    parser.add_argument("--write", action="store_true", help="make today's numbers those of the last release")
    parser.add_argument("--check", action="store_true", help="end with code 1 where a part is above its ceiling")
    parser.add_argument("--lower", action="store_true", help="lower the ceilings of parts that have become smaller")
    options = parser.parse_args()
    kept = json.loads(RELEASE.read_text(encoding="utf-8"))
    if options.check or options.lower:
        sizes = {name: part.size(options.package.parent) for name, part in PARTS.items()}
        if options.lower:
            kept["ceilings"] = lowered(sizes, kept["ceilings"])
            RELEASE.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
        print(size_table(sizes, kept["ceilings"]))
        sys.exit("\n".join(excesses(sizes, kept["ceilings"], kept["loans"])) or None)
    now = measure(options.package)
    if options.write:
        RELEASE.write_text(json.dumps({**kept, "release": now}, indent=2) + "\n", encoding="utf-8")
    print(table(now, kept["release"]))


if __name__ == "__main__":
    main()
