"""Shows what a script can see of its interpreter, as JSON in the file of its first argument, and trains a little.

Further arguments: how the script ends. "fork": a process that it forks ends like a script, too.
"""

import atexit
import json
import os
import signal
import sys
from pathlib import Path

import torch

import topotrain as tt

shown, *how = sys.argv[1:]


class Pickled:
    """A class of the script, for later looks at `__main__`."""


def seen() -> dict[str, object]:
    spec = globals()["__spec__"]
    return {
        "argv": sys.argv,
        "path[0]": sys.path[0],
        "flags": list(sys.flags),
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "names": [__name__, __file__, __package__, repr(spec and spec.name), str(globals()["__cached__"])],
        "loader": type(globals()["__loader__"]).__name__,
        "main": vars(sys.modules["__main__"]) is globals() and Pickled.__module__,
        "hooks": [sys.excepthook is sys.__excepthook__, sys.breakpointhook is sys.__breakpointhook__],
        "executable": sys.executable,
        "debug": __debug__,
        "cwd": os.getcwd(),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith("SHOWN_")},
        "umask": os.umask(0o22),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD)],
        "stdin": [sys.stdin.read(), sys.stdin.errors, sys.stdin.encoding],
    }


def hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
    print("hook:", kind.__name__, error, file=sys.stderr)


def at_end(number: int) -> None:
    alive = vars(sys.modules["__main__"]) is globals()
    with Path(shown).open("a") as file:
        file.write(json.dumps(["at exit", number, alive, os.getpid() == pid]) + "\n")


pid = os.getpid()
Path(shown).write_text(json.dumps(seen()) + "\n")
for number in (1, 2):
    atexit.register(at_end, number)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = tt.prepare(model, optimizer)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
if how[:1] == ["hook"]:
    sys.excepthook = hook
    raise LookupError("lost")
if how[:1] == ["fork"]:
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        with Path(shown).open("a") as file:
            file.write(json.dumps(["child", os.waitstatus_to_exitcode(status)]) + "\n")
    elif how[1:] == ["raise"]:
        raise LookupError("lost in the child")
    elif how[1:]:
        sys.exit(int(how[1]))
if how[:1] == ["exit"]:
    sys.exit(eval(how[1]))
