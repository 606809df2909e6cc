"""A process that unpickles, or runs code that came as bytes, where nothing of the kind has any business, ends at once.

Python tells an audit hook of each class that a pickle names, of marshalled code and of what is compiled (PEP 578). A
module that is imported is marshalled code, too; who asks for it then is Python's own importer.
"""

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

OURS = str(Path(__file__).parents[2] / "topotrain") + os.sep
_IMPORTER = "<frozen importlib"
EXIT = 97
"""Of a process in which it happened."""

# Where words of others are dealt with: what happens below is done at their bidding.
_DOORS = {
    (OURS + "core/server/server.py", "handle"),
    (OURS + "core/server/server.py", "place"),
    (OURS + "core/client/client.py", "handle"),
    (OURS + "core/client/client.py", "place"),
    (OURS + "comm/transport/connection.py", "_read"),
    (OURS + "comm/transport/listener.py", "_handle"),
    (OURS + "extensions/checkpointing/checkpoint_reader.py", "open"),
    (OURS + "core/protocol/codec.py", "decode"),
}


def in_servers() -> None:
    """From here on this process serves: no pickle at all, and nothing of ours compiles."""
    sys.addaudithook(_ends_a_server)


def in_tests() -> None:
    """In a process that tests servers beside much else: nothing of the kind while words of others are dealt with."""
    sys.addaudithook(_fails_a_test)


def what(event: str, args: tuple[Any, ...], frame: FrameType | None) -> str:
    """In words what happened, if it must not; else "". `frame`: who did it."""
    if event == "pickle.find_class":
        return f"unpickled {args[0]}.{args[1]}"
    if frame is None or frame.f_code.co_filename.startswith(_IMPORTER):
        return ""
    if event == "marshal.loads":
        return "loaded marshalled code"
    if event in ("compile", "exec") and frame.f_code.co_filename.startswith(OURS):
        return f"{event} of {str(args[0])[:80]!r}"
    return ""


_EVENTS = frozenset({"pickle.find_class", "marshal.loads", "compile", "exec"})


def _ends_a_server(event: str, args: tuple[Any, ...]) -> None:
    if event in _EVENTS and (text := what(event, args, sys._getframe(1))):
        os.write(2, f"audit: a server {text}\n".encode())
        os._exit(EXIT)


def _fails_a_test(event: str, args: tuple[Any, ...]) -> None:
    if event not in _EVENTS:
        return
    text, frame = what(event, args, sys._getframe(1)), sys._getframe(1)
    while text and frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) in _DOORS:
            words = f"audit: {text} in {frame.f_code.co_name} on {threading.current_thread().name}"
            FOUND.append(words)
            raise AssertionError(words)
        frame = frame.f_back  # type: ignore[assignment]


FOUND: list[str] = []
"""What has happened in this process; a thread of a transport may have swallowed the error."""
