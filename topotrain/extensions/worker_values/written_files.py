"""Files that a script saves, to name those that several workers write."""

import os
import sys
from contextlib import ExitStack
from functools import wraps
from typing import Any

SAVERS = ("torch", "save"), ("safetensors.torch", "save_file")
"""Functions with a path as second argument. Their writers are native code, so that no audit event names the file."""


def watch_saves(at_close: ExitStack) -> set[str]:
    """Return a set that gets the paths of the script's saves, until `at_close`."""
    paths: set[str] = set()
    for module, name in SAVERS:
        original = getattr(sys.modules[module], name)

        @wraps(original)
        def save(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            path = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            if isinstance(path, str | os.PathLike):
                paths.add(os.path.abspath(path))
            return original(*args, **kwargs)

        at_close.callback(setattr, sys.modules[module], name, original)
        setattr(sys.modules[module], name, save)
    return paths
