"""Every message that a page quotes is one that the package has.

A quoted line is compared clause by clause with the texts of the package, and with the system's for a failed call. A
hole of an f-string, or of a text for `format`, stands for any text.
"""

import ast
import errno
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "topotrain"
HOLE = "\0"
SEPARATORS = re.compile(r"[:;,.]\s|\n|`|\(|\)")
QUOTED_LINE = re.compile(r"topotrain: |  snapshot ")
WORDS = re.compile(r"\w+://\S+|[\w']+")
SENTENCE = re.compile(r"(?:[a-zA-Z']+ ){2}[a-zA-Z']+")


def texts(source: str) -> Iterator[str]:
    """All texts of a module; each expression in an f-string is a HOLE."""
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value.replace("{}", HOLE)


def clauses(text: str) -> Iterator[str]:
    return (clause.strip().rstrip(".") for clause in SEPARATORS.split(text))


@cache
def known() -> dict[str, frozenset[str]]:
    """The clauses of all texts of the package, with their words."""
    found = {clause for path in PACKAGE.rglob("*.py") for text in texts(path.read_text()) for clause in clauses(text)}
    found |= {*map(os.strerror, errno.errorcode)}
    return {clause: frozenset(WORDS.findall(clause.replace(HOLE, " "))) for clause in found}


def is_known(clause: str) -> bool:
    """A text of the package has this clause, and at least half of its words outside its holes."""
    words = WORDS.findall(clause)
    return any(
        2 * len(constant & set(words)) >= len(set(words))
        and re.fullmatch(f" ?{'.*?'.join(map(re.escape, text.split(HOLE)))} ?", f" {clause} ") is not None
        for text, constant in known().items()
        if not constant.isdisjoint(words)
    )


def quoted(page: str) -> Iterator[str]:
    """The clauses of at least three words in the quoted lines of a page."""
    for block in re.finditer(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        for line in filter(QUOTED_LINE.match, block[1].splitlines()):
            yield from filter(SENTENCE.search, clauses(line))


def test_every_quoted_message_is_one_of_the_package() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    found = {clause: page.name for page in pages for clause in quoted(page.read_text(encoding="utf-8"))}
    assert len(found) >= 10
    unknown = {clause: page for clause, page in found.items() if not is_known(clause)}
    assert not unknown


def test_a_message_with_another_word_is_not_known() -> None:
    (line,) = quoted("```text\ntopotrain: unit 1 is gone, the job waits 60 s for another `topotrain unit`\n```\n")
    assert is_known("the job waits 60 s for another")
    assert not is_known(line.replace("waits", "pauses"))
