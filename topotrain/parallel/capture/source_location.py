"""Source lines of the user's code during a capture, and modules that are one node."""

import inspect
import os
import sys
import traceback
from pathlib import Path

import torch
from torch import nn

from topotrain.parallel.capture import device_scopes

FIELD = "model.forward"
ADVICE = "place the module that does it on one worker with tt.place, or write it without"
_OURS = str(Path(__file__).resolve().parents[2])  # the folder topotrain/
_NOT_USER = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, _OURS + os.sep)


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module is one node: a layer of torch.nn, or placed as a whole."""
    if getattr(module, device_scopes.WHOLE, False):
        return True
    forward = type(module).forward
    if forward is nn.Module.forward:
        return False  # a container without a forward, such as nn.ModuleList
    home = getattr(forward, "__module__", "")
    return home.startswith(("torch.nn.", "torch.ao.nn.")) and not isinstance(module, nn.Sequential)


def signature(model: nn.Module) -> inspect.Signature:
    """Return the signature of a model's forward, without self."""
    whole = inspect.signature(type(model).forward)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def user_line() -> str:
    """Return "file:line" of the user's code that runs now."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USER):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def line_of(error: BaseException) -> str:
    """Return "file:line" of the innermost user code in a traceback."""
    lines = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
    return next((line for line in reversed(lines) if not line.startswith(_NOT_USER)), "")


def definition(model: nn.Module) -> str:
    """Return "file:line" of the definition of a model's forward."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
