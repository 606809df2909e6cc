"""Files that a script writes with `torch.save` and safetensors, to name those that several workers write."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

SAVERS = ("torch", "save"), ("safetensors.torch", "save_file")
"""Functions whose second argument is a path. They write outside of Python, so that no audit event names the file."""


class WrittenFiles:
    """The files that this worker's script writes.

    Args:
        at_close: gives the libraries their own functions back.
    """

    def __init__(self, at_close: ExitStack) -> None:
        self._paths: dict[str, None] = {}
        for module, name in ((sys.modules[module], name) for module, name in SAVERS):
            original = getattr(module, name)
            at_close.callback(setattr, module, name, original)
            setattr(module, name, self._noting(original))

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            path = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            if isinstance(path, str | os.PathLike):
                self._paths[os.path.abspath(path)] = None
            return original(*args, **kwargs)

        return save

    @property
    def lines(self) -> list[str]:
        """A line "path=1" for each file that is there."""
        return [f"{path}=1" for path in self._paths if path.isprintable() and os.path.isfile(path)]
