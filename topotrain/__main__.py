"""The command `topotrain`, also as `python -m topotrain`.

Rule: Ctrl-C ends it in order from its first moment on, also while it still imports what it needs.
"""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """The console script. It always raises SystemExit with the code of the command."""
    _open_closed_streams()
    usual = signal.default_int_handler
    early = signal.getsignal(signal.SIGINT) is usual  # else it is ignored, or handled by another library
    if early:
        signal.signal(signal.SIGINT, _end)
    from topotrain.tools.cli.app import main as command

    if early:
        signal.signal(signal.SIGINT, usual)
    command()


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that the caller has closed."""
    # Before any other file gets the number of one of them.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        name = ("stdin", "stdout", "stderr")[fd]
        stream = open(fd, "w" if fd else "r", closefd=False)  # noqa: SIM115
        os.set_inheritable(fd, True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.close(fd)


def _end(number: int, frame: FrameType | None) -> None:
    """End the process at once."""
    # Without KeyboardInterrupt: a module that is half imported may swallow it, or make another error of it.
    os.write(2, b"topotrain: error: ended by SIGINT, nothing was started\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
