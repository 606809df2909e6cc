"""The numbered lists of functions on the pages that follow one thing through the package (docs/journey*.md)."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import topotrain

PACKAGE = Path(topotrain.__file__).parent


class Tracer:
    """Notes the package's functions that are called for one thing while `watching`, each once, with its file.

    A subclass decides in `concerns` whether a call is for this thing.
    """

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}
        self.watching = False
        self._of_thread = threading.local()

    def concerns(self, frame: FrameType, caller: Any, first: bool) -> Any:
        """caller: the same of its caller, or False. first: it is called by no other function of the package."""
        raise NotImplementedError

    def is_noted(self, concern: Any) -> bool:
        """Whether a call with this `concerns` is for the thing."""
        return bool(concern)

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Trace this thread, and every thread that starts inside."""
        before = threading.getprofile()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(before)

    def calls(self) -> list[Any]:
        """`concerns` of every function that this thread is in."""
        return self._of_thread.__dict__.setdefault("stack", [False])  # type: ignore[no-any-return]

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(str(PACKAGE)):
            return
        stack = self.calls()
        if event == "return":
            if len(stack) > 1:
                stack.pop()
            return
        stack.append(self.concerns(frame, stack[-1], len(stack) == 1))
        if self.watching and self.is_noted(stack[-1]):
            name = f"{Path(path).stem}.{frame.f_code.co_qualname}"
            self.seen.setdefault(name, str(Path(path).relative_to(PACKAGE)))


def stops_in(text: str) -> list[str]:
    """The functions that a list names, such as "gradient_staging.GradientStaging.push", one per stop."""
    return re.findall(r"^\d+\. `([\w./]+)`", text, re.MULTILINE)


def check_is_function(stop: str, page: Path) -> None:
    """Raises AssertionError if the package has no such function."""
    module, _, names = stop.partition(".")
    (path,) = PACKAGE.rglob(f"{module}.py")
    found: Any = import_module(".".join(("topotrain", *path.relative_to(PACKAGE).with_suffix("").parts)))
    for name in names.split("."):
        assert hasattr(found, name), f"docs/{page.name} names {stop}, and there is no {name}"
        found = getattr(found, name)
    assert callable(found), stop


def check_order(stops: list[str], passed: list[str], page: Path) -> None:
    """Raises AssertionError unless a run has passed all stops of a page, first calls in the order of the page."""
    missing = [stop for stop in stops if stop not in passed]
    assert not missing, f"docs/{page.name} names {missing}; the run passed:\n" + "\n".join(passed)
    assert [function for function in passed if function in stops] == stops


def own_files(passed: list[str]) -> set[str]:
    """The files of these functions in the packages that do the work: core, training and launch."""
    files = {path.stem: path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    entered = {files[function.partition(".")[0]] for function in passed}
    return {file for file in entered if file.split("/")[0] in ("core", "training", "launch")}
