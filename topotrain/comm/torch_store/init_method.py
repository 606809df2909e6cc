"""Register redis:// as an init_method of torch.distributed, without importing it.

`import topotrain` imports nothing of torch, and changes nothing else of it. Where torch is imported already, two names
are added to its table at once. Else a finder waits for the one module that has the table, and then removes itself.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

SCHEMES = ("redis", "rediss")
_TABLE = "torch.distributed.rendezvous"


def announce() -> None:
    """Register redis:// and rediss:// with torch, now or when it is imported."""
    module = sys.modules.get(_TABLE)
    if module is not None and hasattr(module, "register_rendezvous_handler"):
        _register(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(module: ModuleType) -> None:
    for scheme in SCHEMES:
        with suppress(RuntimeError):  # already registered: another package's handler stays
            module.register_rendezvous_handler(scheme, _rendezvous)


def _rendezvous(url: str, **options: Any) -> Iterator[Any]:
    return import_module("topotrain.comm.torch_store.c10d_store").rendezvous(url, **options)  # type: ignore[no-any-return]


class _Finder:
    """An import finder that waits for one module, and lets all others pass."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TABLE:
            return None
        with suppress(ValueError):
            # First, so that the search below does not come here again.
            sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)  # type: ignore[assignment]
        return spec


class _Then:
    """A module's own loader, which registers the schemes once the module is loaded."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Other code compares or pickles a module's loader, and must find the original.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register(module)
