"""A training program that is named as for `python -m`: "-m package.module".

The search imports nothing: a package's own code runs in the workers only. This module runs no program.
"""

import difflib
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec

from topotrain.config.job import ConfigError

_FLAG = "-m "


def module_of(program: str) -> str | None:
    """Return the module that a job's program names; None for a script."""
    return program.removeprefix(_FLAG).strip() if program.startswith(_FLAG) else None


def as_program(module: str) -> str:
    """Return the program of a job that runs a module."""
    return _FLAG + module


def find_module(module: str, where: str = "") -> str:
    """Return the file that `python -m MODULE` would run in the working folder.

    Args:
        module: the name after -m.
        where: for the error: the place of the search.

    Raises:
        ConfigError: there is no such module, or it cannot be run.
    """
    if not all(module.split(".")) and os.sep not in module:
        raise _refusal(module, "must be the full name of a module, such as package.module")
    # Files that were made a moment ago must be found.
    importlib.invalidate_caches()
    # As in a worker: the working folder replaces the folder of the command.
    path: Sequence[str] | None = [os.getcwd(), *sys.path[1:]]
    name, spec = "", None
    for part in module.split("."):
        if path is None:
            raise _refusal(module, f"{name} is a module and no package, so it contains no {part}{_ending(module)}")
        name, parent, folders = f"{name}.{part}" if name else part, name, path
        spec = _spec(name, folders)
        if spec is None:
            raise _refusal(module, f"there is no module {name}{where}{_hint(module, parent, part, folders)}")
        path = _folders(spec, folders)
    if path is not None:
        spec = _spec(f"{name}.__main__", path)
        if spec is None:
            inside = [f"-m {name}.{found.name}" for found in pkgutil.iter_modules(path) if not found.ispkg]
            named = f", or name a module of it: {', '.join(inside[:5])}" if inside else ""
            raise _refusal(module, f"is a package without __main__.py: add one{named}")
    assert spec is not None
    if spec.origin == "built-in" or isinstance(spec.loader, ExtensionFileLoader):
        raise _refusal(module, "is not written in Python, so it cannot be run")
    return spec.origin or ""


def _refusal(module: str, accepted: str) -> ConfigError:
    return ConfigError("program", as_program(module), accepted)


def _spec(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Return the spec of a module without an import of its parents."""
    tail = name.rpartition(".")[2]
    # `importlib.util.find_spec` would run the package's `__init__.py`, which may take long or start threads.
    for finder in sys.meta_path if tail else ():
        try:
            found = finder.find_spec(name, path)
        # A package without `__init__.py` in another one: importlib asks for the parent, which is not imported.
        except KeyError:
            found = ModuleSpec(name, None, is_package=True)
        if found is not None:
            return found
    return None


def _folders(spec: ModuleSpec, path: Sequence[str]) -> Sequence[str] | None:
    """Return the folders of a package; None for a module."""
    if spec.submodule_search_locations is None:
        return None
    if spec.origin is not None:
        return list(spec.submodule_search_locations)
    # Without `__init__.py` the package is all folders of this name.
    tail = spec.name.rpartition(".")[2]
    return [found for folder in path if os.path.isdir(found := os.path.join(folder, tail))]


def _ending(module: str) -> str:
    return f"; a module is named without .py: -m {module[:-3]}" if module.endswith(".py") else ""


def _hint(module: str, parent: str, part: str, path: Sequence[str]) -> str:
    """Return what the user may have meant by a part of a name that does not exist."""
    if os.sep in module:
        dotted = module.removesuffix(".py").strip("./").replace(os.sep, ".")
        return f"; a module is named with dots: -m {dotted}, a script without -m"
    if _ending(module):
        return _ending(module)
    # Of top-level modules only those of the working folder are the user's.
    names = [found.name for found in pkgutil.iter_modules(path if parent else path[:1])]
    near = [f"{parent}.{name}" if parent else name for name in difflib.get_close_matches(part, names, 1)]
    if near:
        return f"; did you mean {near[0]}?"
    return "" if parent else "; a module is looked for in the working folder and on PYTHONPATH"
