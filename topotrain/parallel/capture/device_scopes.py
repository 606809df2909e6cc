"""Devices by TensorFlow's names, such as "/job:worker/task:1", and their scopes.

A scope records its device on the modules and parameters that are made inside it. While a forward is captured, it
records its device also on the values that are computed inside it. It moves nothing: a plain process runs the same
script unchanged.

Names as in TensorFlow's `tf.device` and `DeviceSpec` (Abadi et al., 2016).
"""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from topotrain.config.job import ConfigError
from topotrain.training.parameters.flat_parameters import HOME

PLACE = "topotrain_place"
"""Attribute of a module or parameter: the name of its device."""
WHOLE = "topotrain_whole"
"""Attribute of a module that was placed as a whole: a capture does not look into it."""

JOBS = ("worker", "ps")
TYPES = ("CPU", "GPU")
_FORM = "must be like /job:worker/task:1 or /job:ps/task:0/device:CPU:0"
_PART = re.compile(
    r"/job:(?P<job>[a-z][a-z0-9_]*)|/replica:(?P<replica>\d+|\*)|/task:(?P<task>\d+|\*)"
    r"|/(?:device:)?(?P<type>[cg]pu):(?P<index>\d+|\*)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class DeviceScope:
    """A set of devices; None leaves a part open. `task`: the number in its group."""

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    device_type: str | None = None
    device_index: int | None = None

    def within(self, outer: "DeviceScope") -> "DeviceScope":
        """Return this name with its open parts taken from an outer scope."""
        return DeviceScope(
            outer.job if self.job is None else self.job,
            outer.replica if self.replica is None else self.replica,
            outer.task if self.task is None else self.task,
            outer.device_type if self.device_type is None else self.device_type,
            outer.device_index if self.device_index is None else self.device_index,
        )

    def __str__(self) -> str:
        parts = [("job", self.job), ("replica", self.replica), ("task", self.task)]
        text = "".join(f"/{name}:{value}" for name, value in parts if value is not None)
        if self.device_type is None:
            return text
        return f"{text}/device:{self.device_type}:{'*' if self.device_index is None else self.device_index}"


def parse(text: str) -> DeviceScope:
    """Read the name of a device.

    A name has any of the parts /job:NAME, /replica:I, /task:I and /device:TYPE:I (or /cpu:I, /gpu:I). An asterisk
    leaves a part open.

    Raises:
        ConfigError: `text` has another form.
    """
    if not isinstance(text, str):
        raise ConfigError("device", text, _FORM)
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None or not (part.end() == len(text) or text[part.end()] == "/"):
            raise ConfigError("device", text, f"{_FORM}; it has no such part as {text[at:]!r}")
        for name, value in part.groupdict().items():
            if value is not None:
                if name in found:
                    raise ConfigError("device", text, f"{_FORM}; it has two parts /{name}")
                found[name] = value
        at = part.end()
    kind = found.get("type")
    return DeviceScope(
        found.get("job"),
        _number(found.get("replica")),
        _number(found.get("task")),
        None if kind is None else kind.upper(),
        _number(found.get("index")),
    )


def _number(text: str | None) -> int | None:
    return None if text is None or text == "*" else int(text)


def complete(device: DeviceScope, workers: int, servers: int, types: Collection[str] = ("CPU",)) -> DeviceScope:
    """Fill in the open parts of a name and check that the device exists.

    Open parts become job worker, replica 0 and the first of `types`. An open task stays open.

    Args:
        workers: workers of a group, the tasks of /job:worker.
        servers: servers of a group, the tasks of /job:ps.
        types: the device types of a worker. A worker has one device of each type, number 0.

    Raises:
        ConfigError: the device does not exist. The error lists the devices that do.
    """
    counts = {"worker": workers, "ps": servers}
    job = device.job or "worker"
    kinds = types if job == "worker" else ("CPU",)
    whole = DeviceScope(job, device.replica or 0, device.task, device.device_type or next(iter(kinds)))
    exists = (
        job in counts
        and whole.replica == 0
        and (device.task or 0) < counts[job]
        and whole.device_type in kinds
        and not device.device_index
    )
    if not exists:
        there = ", ".join(f"/job:{name}/{_tasks(count)}" for name, count in counts.items() if count)
        accepted = f"no such device; there are {there}, each with {' and '.join(f'{kind}:0' for kind in kinds)}"
        raise ConfigError("device", str(device), accepted)
    return DeviceScope(whole.job, 0, whole.task, whole.device_type, 0)


def _tasks(count: int) -> str:
    return "task:0" if count == 1 else f"task:0 to task:{count - 1}"


_SCOPE: ContextVar[DeviceScope | None] = ContextVar("topotrain_device", default=None)


def current() -> DeviceScope | None:
    """Return the device of the scopes around the calling code, or None outside all."""
    return _SCOPE.get()


@contextmanager
def scope(text: str | None) -> Iterator[None]:
    """Give modules that are made and values that are computed inside this device.

    Nested scopes are merged. With `text` None, the block is outside all scopes. A parameter that is made inside
    "/job:ps/task:1" is stored on that server.

    Raises:
        ConfigError: `text` is not the name of a device.
    """
    outer = current()
    merged = None if text is None else parse(text).within(outer or DeviceScope())
    token = _SCOPE.set(merged)
    hooks = (
        register_module_module_registration_hook(lambda parent, name, module: _note_module(module)),
        register_module_parameter_registration_hook(_note_parameter),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _SCOPE.reset(token)


def _note_module(module: nn.Module | None) -> None:
    here = current()
    # A module of an inner scope is registered by its parent in the outer one, and keeps its own device.
    if module is not None and here is not None and here.job != "ps" and PLACE not in module.__dict__:
        setattr(module, PLACE, str(here))


def _note_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    here = current()
    if parameter is None or here is None:
        return
    if here.job == "ps":
        _send_home(parameter, here)
    elif not hasattr(parameter, PLACE):
        setattr(parameter, PLACE, str(here))
        if type(module).__module__.startswith("torch.nn."):
            # The layer may not be a child of another module yet. The attribute of a module survives deepcopy, the
            # attribute of a parameter does not.
            _note_module(module)


def _send_home(parameter: nn.Parameter, device: DeviceScope) -> None:
    # The first server counts, also for a parameter that is registered a second time.
    if device.task is not None and not hasattr(parameter, HOME):
        setattr(parameter, HOME, device.task)


def place(module: nn.Module, text: str) -> nn.Module:
    """Place a whole module on a device and return the module.

    On a worker the module is one node: its forward is not captured and may contain any Python code. On a server
    ("/job:ps/task:1") its parameters are stored.

    Raises:
        ConfigError: `module` is not a module, `text` is not the name of a device, or it leaves the task open.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError("tt.place", type(module).__name__, "must be a torch.nn.Module")
    device = parse(text)
    if device.task is None:
        raise ConfigError("tt.place", text, "must name a task, like /job:worker/task:1")
    if device.job == "ps":
        for parameter in module.parameters():
            setattr(parameter, HOME, device.task)
    else:
        setattr(module, PLACE, str(device))
        setattr(module, WHOLE, True)
    return module
