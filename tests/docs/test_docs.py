"""What the documents say is so: links lead somewhere, commands run, code compiles, the README shows the example's diff.

Commands that start with `topotrain` or `python` run in a copy of examples/: the first of each subcommand that trains
nothing, of each tool that launches, and of each example that trains; in the soak all. They train for one epoch,
whatever the page says, and are forked from processes that have imported torch, as is everything in their jobs. What
`make` would do is only looked up in the Makefile.
"""

import ast
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import page_pictures
import pytest
import typer.main
from process_pool import client, shell_environ
from reference_tables import with_tables
from seeds import soaked
from test_imports import ORDER

import topotrain
from topotrain.config.proto_schema import schema
from topotrain.tools.cli.app import app

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "topotrain"
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PAGES = [*(ROOT / name for name in TOP_PAGES), *sorted((ROOT / "docs").glob("*.md"))]
README_WORDS = 900
EXAMPLE_WITHIN = 25  # lines
PROTO = schema()
TIMEOUT_S = 300


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def fences(*languages: str) -> list[Fence]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            if block[1] in languages:
                found.append(Fence(page, text[: block.start()].count("\n") + 2, block[1], block[2]))
    return found


def prose(page: Path) -> str:
    """A page with the tables of the site, without its fenced blocks and its inline code."""
    text = with_tables(page.read_text(encoding="utf-8"))
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`(?!\])", "", text)


NOT_FOR_COMPONENTS = re.compile(r"\b(?:nobody|somebody|everybody|whoever|whomever|whom)\b", re.IGNORECASE)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_pages_name_the_component_that_acts(page: Path) -> None:
    assert not NOT_FOR_COMPONENTS.findall(prose(page))


def test_pages_open_with_their_purpose_and_an_example_soon() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        title, _, opening, *rest = page.read_text(encoding="utf-8").splitlines()
        assert title.startswith("# "), page.name
        assert re.match(r"[A-Z*\"'`\[]", opening), f"{page.name} opens with {opening!r}"
        assert any(line.startswith(("```", "|")) for line in rest[:EXAMPLE_WITHIN]), (
            f"{page.name} has no example at once"
        )


# ---- links -----------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as they stand in links."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {link}"
        assert file.is_relative_to(ROOT), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {link}: no such heading"


def test_the_index_knows_every_page() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert page.name == "index.md" or f"{page.name})" in text, page.name


# ---- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A line of a shell block, the exit code that the page states, and the page."""

    text: str
    code: int
    page: str

    @property
    def trains(self) -> bool:
        """Whether it starts a job, or the example itself."""
        words = self.text.split()
        return words[0] == "python" or (words[1] in TRAINING and self.code == 0)

    @property
    def what(self) -> tuple[str, ...]:
        """What it is an example of: the example that trains, or the subcommand."""
        words = self.text.split()
        if self.trains and (example := re.search(r"examples/\w+\.py", self.text)) and words[1] not in LONG:
            return (example[0],)
        return (*words[1 : 3 if words[1] in ("launch", "jobs") else 2], str(self.code))

    @property
    def to_run(self) -> str:
        """The same, quick: one epoch for every training."""
        if not re.search(r"examples/\w+\.py", self.text) or "examples/trainer.py" in self.text:
            return self.text  # how long that one trains stands in its job file
        if self.text.startswith("topotrain probe"):
            return self.text  # it ends the program itself
        if "--epochs" in self.text:
            return re.sub(r"--epochs \d+", "--epochs 1", self.text)
        return re.sub(r"(examples/\w+\.py)", r"\1 --epochs 1", self.text)


TRAINING = ("run", "compare", "chaos", "check", "probe", "advise", "unit")
LONG = TRAINING[1:]
"""Of which a journey of its own runs each."""


def commands(*programs: str) -> list[Command]:
    """Each once, in the order of the pages."""
    found: dict[str, Command] = {}
    for fence in fences("sh", "console"):
        for line in fence.text.splitlines():
            text, _, comment = re.sub(r"^\$ ", "", line).partition("#")
            words = text.split()
            if words and words[0] in programs:
                stated = re.search(r"exit code (\d+)", comment)
                key = " ".join(words)
                found.setdefault(key, Command(key, int(stated[1]) if stated else 0, fence.page.name))
    return list(found.values())


SHOWN = commands("topotrain", "python")
FIRST = {command.what: command for command in reversed(SHOWN)}
FIRST_OF_PAGE = {command.page: command for command in reversed(SHOWN) if command.trains}
QUICK = [
    command
    for command in SHOWN
    if command is FIRST[command.what] and (not command.trains or command is FIRST_OF_PAGE[command.page])
    if command.what[0] not in LONG
]
RUNNABLE = soaked(QUICK, [command for command in SHOWN if command not in QUICK])

Ended = Callable[[Command], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, served_at: str, warm_at: str) -> Ended:
    """Runs all of them, two at a time, for each waits for itself much of the time; then tells how each ended."""
    environ = shell_environ(tmp_path_factory.mktemp("bin"), warm_at, served_at)

    def run(command: Command) -> "subprocess.CompletedProcess[str]":
        folder = tmp_path_factory.mktemp("here")
        shutil.copytree(ROOT / "examples", folder / "examples")
        text = command.to_run
        return subprocess.run(
            ["sh", "-c", text], cwd=folder, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S
        )

    with ThreadPoolExecutor(2) as pool:
        runs = {command: pool.submit(run, command) for command in sorted(RUNNABLE, key=heavy, reverse=True)}
    return lambda command: runs[command].result()


def heavy(command: Command) -> tuple[bool, bool]:
    return "compare" in command.text, "examples/digits.py" in command.text


@pytest.mark.journey
@pytest.mark.parametrize("command", RUNNABLE, ids=lambda command: command.text)
def test_every_command_runs(ended: Ended, command: Command) -> None:
    done = ended(command)
    assert done.returncode == command.code, f"{command.to_run}\n{done.stdout}\n{done.stderr}"


def test_every_command_has_options_that_there_are() -> None:
    """Also of those that do not run here."""
    for command in SHOWN:
        for part in re.split(r" && | & ", command.text.partition(" >")[0]):
            if part.startswith("topotrain ") and command.code == 0:
                group, context = typer.main.get_command(app), None
                words = shlex.split(part)[1:]
                while hasattr(group, "commands"):
                    context = group.make_context(group.name, list(words), parent=context)
                    group = group.commands[words.pop(0)]
                group.make_context(group.name, words, parent=context)


def test_the_commands_that_users_need_are_shown() -> None:
    shown = {" ".join(command.text.split()[:2]) for command in SHOWN}
    assert shown >= {"topotrain run", "topotrain plan", "topotrain compare", "python examples/digits.py"}


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    shown = {command.text.split()[1] for command in commands("make")}
    shown |= set(re.findall(r"`make ([\w-]+)", "\n".join(page.read_text(encoding="utf-8") for page in PAGES)))
    assert shown >= {"run", "test"}
    assert shown <= targets


# ---- code ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", fences("python"), ids=str)
def test_python_compiles_and_names_what_there_is(fence: Fence) -> None:
    tree = ast.parse(fence.text, str(fence))
    compile(tree, str(fence), "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tt":
            assert node.attr in topotrain.__all__, f"{fence}: tt.{node.attr}"


def test_the_python_page_names_every_function() -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    for name in topotrain.__all__:
        assert f"tt.{name}" in text or f"import Cluster, {name}" in text, name


@pytest.mark.journey
def test_the_objects_of_the_python_page_are_as_it_says(tmp_path: Path, warm_at: str) -> None:
    (code,) = (fence.text for fence in fences("python") if fence.page.name == "python.md" and "dumps" in fence.text)
    words = [*client(warm_at), "-c", code.replace('"digits.conf"', repr(str(tmp_path / "digits.conf")))]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (expected, *_) = re.findall(r"# (cluster\..+)$", code, re.MULTILINE)
    assert expected in done.stdout


def test_the_readme_shows_the_diff_of_the_example() -> None:
    (diff,) = fences("diff")
    shown = [(line[:1], line[1:].partition("#")[0].rstrip()) for line in diff.text.splitlines() if line.strip()]
    example = (ROOT / "examples" / "digits.py").read_text(encoding="utf-8").splitlines()
    after = [line.partition("#")[0].rstrip() for line in example]
    added = [line.partition("#")[0].rstrip() for line in example if "  # topotrain" in line]
    assert [line for sign, line in shown if sign == "+"] == added
    assert [line for sign, line in shown if sign == "-"] == ["    for _ in range(options.epochs):"]
    at = 0
    for sign, line in shown:
        if sign != "-" and line.strip() != "...":
            assert line in after[at:], f"examples/digits.py has no line {line!r} here"
            at += after[at:].index(line) + 1


# ---- packages and paths ----------------------------------------------------------------------------------------------


def test_the_page_of_architecture_names_every_package_and_no_other() -> None:
    section = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(ORDER)
    root = {path.name for path in (ROOT / "topotrain").iterdir() if not path.name.startswith("__pycache__")}
    assert root == {*ORDER, "__init__.py", "__main__.py", "py.typed"}


def test_the_readme_is_one_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= README_WORDS


FOLDERS = (*ORDER, "benchmarks", "tests", "topotrain", "examples", "scripts", "docs")
NAMED_PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`")


def named_paths(page: Path) -> set[str]:
    """The files and folders that a page names in inline code, relative to the repository or to `topotrain/`."""
    return set(NAMED_PATH.findall(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    for name in named_paths(page):
        assert (ROOT / name).exists() or (PACKAGE / name).exists(), f"{page.name} names {name}"


def test_paths_in_pages_are_found() -> None:
    assert "topotrain/core/optim/adapter.py" in named_paths(ROOT / "CONTRIBUTING.md")
    assert "core/server/server.py" in named_paths(ROOT / "README.md")


def test_the_page_of_modes_has_every_switch_with_a_figure_or_none() -> None:
    text = (ROOT / "docs" / "modes.md").read_text(encoding="utf-8")
    for message in PROTO.message_type:
        if message.name in ("JobProto", "ClusterProto"):
            for switch in message.field:
                if switch.type in (switch.TYPE_ENUM, switch.TYPE_BOOL):
                    assert f"`{switch.name}" in text, switch.name
    rows = re.findall(r"^\| (`.+) \|$", text, re.MULTILINE)
    assert rows
    for row in rows:
        name, _, gain, price, origin = row.split(" | ")
        assert origin, name
        assert re.search(r"no figure|figures|RESULTS\.md|#measured", gain + price), name


def test_the_picture_is_there_and_small() -> None:
    picture = ROOT / "docs" / "pictures" / "frameworks.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.stat().st_size < 120_000


def test_each_picture_is_there_small_and_shown() -> None:
    assert len(page_pictures.NAMES) <= 5
    shown = {name for page in PAGES for name in re.findall(r"pictures/(page-[\w-]+)\.png\)", page.read_text("utf-8"))}
    there = {path.stem for path in page_pictures.PICTURES.glob("page-*.png")}
    assert shown == there == set(page_pictures.NAMES)
    for name in page_pictures.NAMES:
        path = page_pictures.PICTURES / f"{name}.png"
        assert path.read_bytes()[:4] == b"\x89PNG"
        assert path.stat().st_size <= page_pictures.LIMIT_BYTES


def test_no_page_tells_of_one_machine() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"/(home|root|work|tmp|usr)/\w", text), page.name
