"""Signals by which a user ends a job, delivered to a socket."""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

SignalHandler = Callable[[int, FrameType | None], None]


@dataclass(slots=True)
class StopSignals:
    """The received stop signals, and a socket that becomes readable at each.

    waker: the other end of that socket. seen: so many of them were there at the last `clear_wakeup`.
    """

    came: list[int]
    woken: socket.socket
    waker: socket.socket
    seen: int = 0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Note a signal. The wakeup descriptor wakes the loop."""
        self.came.append(number)

    def clear_wakeup(self) -> bool:
        """Clear `woken` until the next signal; return whether a stop signal has come.

        Also a signal that ends no job wakes, if it has a handler in Python: SIGCHLD has one as soon as a DataLoader had
        processes.
        """
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(64)
        before, self.seen = self.seen, len(self.came)
        return self.seen > before

    def ask(self, number: int) -> None:
        """Act as if this signal had come; no handler of the main thread is needed."""
        self.came.append(number)
        # A full socket is readable already.
        with contextlib.suppress(BlockingIOError):
            self.waker.send(b"!")


@contextlib.contextmanager
def handled(handler: SignalHandler) -> Iterator[None]:
    """Let `handler` handle the signals that end a job for the length of the block.

    Ignored signals stay ignored, and handlers of C libraries stay. Off the main thread nothing is changed.
    """
    # Python allows signal handlers on the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    # `nohup` ignores SIGHUP, and the job must go on after it. None: Python could not restore the handler.
    taken = {number: old for number, old in former.items() if old not in (signal.SIG_IGN, None)}

    def hang_up(number: int, frame: FrameType | None) -> None:
        # The kernel and the shell both send it when a terminal closes. The second one is no wish to end at once.
        signal.signal(number, signal.SIG_IGN)
        handler(number, frame)

    try:
        for number in taken:
            signal.signal(number, hang_up if number == signal.SIGHUP else handler)
        yield
    finally:
        for number, old in taken.items():
            signal.signal(number, old)


@contextlib.contextmanager
def signals() -> Iterator[StopSignals]:
    """Handle the signals that end a job for the length of the block, as `handled`."""
    woken, waker = socket.socketpair()
    received = StopSignals([], woken, waker)
    with woken, waker:
        # Python requires it of a wakeup descriptor: a signal handler must not block.
        for end in (woken, waker):
            end.setblocking(False)
        # Python allows signal handlers on the main thread only.
        if threading.current_thread() is not threading.main_thread():
            yield received
            return
        former_fd = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        try:
            with handled(received.on_signal):
                yield received
        finally:
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
        try:
            yield woken
        finally:
            # Otherwise the next signal would be written to another file that has the number of the closed socket.
            signal.set_wakeup_fd(-1)
