"""Packages that nothing else imports can be deleted: automatic placement, TensorFlow's client session."""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "topotrain"
USERS = {
    "parallel/auto_placement": {"parallel/api/automatic_placement.py"},
    "compat/tensorflow/session": {"compat/tensorflow/train_api.py", "__init__.py"},
}
"""By package: the files that may name its modules."""


@pytest.mark.parametrize("package", USERS)
def test_one_place_leads_there_when_it_is_used(package: str) -> None:
    name = f"topotrain.{package.replace('/', '.')}."
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    named = {file for file, text in texts.items() if name in text and not file.startswith(package)}
    assert named == USERS[package]
    for file in named:
        # Inside a function, or for type checkers: importing the file imports nothing of the package.
        assert not re.search(rf"^(?:from|import) {re.escape(name)}", texts[file], re.MULTILINE), file
