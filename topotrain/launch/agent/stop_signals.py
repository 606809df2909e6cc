"""Signals by which a user ends a job, delivered to a socket."""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class StopSignals:
    """The received stop signals, and a socket that becomes readable at each."""

    came: list[int]
    woken: socket.socket


@contextlib.contextmanager
def signals() -> Iterator[StopSignals]:
    """Handle the signals that end a job for the length of the block.

    Ignored signals stay ignored. Off the main thread nothing is changed.
    """
    woken, waker = socket.socketpair()
    came: list[int] = []
    with woken, waker:
        # Python requires it of a wakeup descriptor: a signal handler must not block.
        waker.setblocking(False)
        # Python allows signal handlers on the main thread only.
        if threading.current_thread() is not threading.main_thread():
            yield StopSignals(came, woken)
            return
        former = {number: signal.getsignal(number) for number in _SIGNALS}
        # `nohup` ignores SIGHUP, and the job must go on after it.
        taken = {number: handler for number, handler in former.items() if handler is not signal.SIG_IGN}
        former_fd = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        try:
            for number in taken:
                # The handler counts the signals; the descriptor wakes the loop.
                signal.signal(number, lambda number, _: came.append(number))
            yield StopSignals(came, woken)
        finally:
            for number, handler in taken.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(former_fd)


@contextlib.contextmanager
def stop_signals() -> Iterator[socket.socket]:
    """Yield a socket that becomes readable at SIGTERM and SIGINT."""
    woken, waker = socket.socketpair()
    with woken, waker:
        waker.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT):
            # The handler does nothing: the descriptor below wakes the loop.
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno())
        yield woken
        signal.set_wakeup_fd(-1)
