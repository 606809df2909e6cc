"""The command in the process of a test."""

from collections.abc import Callable

import pytest

from topotrain.tools.cli import app


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command: (exit code, stdout, stderr)."""

    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            app.main(argv)
        printed = capsys.readouterr()
        return int(left.value.code or 0), printed.out, printed.err

    return run
