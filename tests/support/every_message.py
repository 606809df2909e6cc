"""All messages of the package: those of the core, and those of every module of messages of an extension."""

from importlib import import_module
from pathlib import Path

from topotrain.core.protocol import KINDS, Message

PACKAGE = Path(__file__).parents[2] / "topotrain"


def every_message() -> tuple[type[Message], ...]:
    for path in sorted(PACKAGE.rglob("*_messages.py")):
        import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    return tuple(cls for _, cls in sorted(KINDS.items()))
