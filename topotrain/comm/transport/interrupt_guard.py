"""Delay Ctrl-C to the end of a frame that is being sent.

A script sends on its main thread, where Python raises KeyboardInterrupt between any two instructions. A frame that was
numbered and never sent, or sent by half, would make the peer refuse the script's last messages, which report the stop.
So a connection that is sending raises when it has sent.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType

from topotrain.comm.transport.connection import Connection
from topotrain.comm.transport.frame_writer import FrameWriter

AGAIN_S = 0.05
"""A frame is sent within microseconds: a connection that has not raised by then had finished sending already."""


def between_frames() -> Callable[[], None]:
    """Make Ctrl-C wait for the frame that is being sent.

    Returns a function that restores the old handler.
    """
    usual = signal.default_int_handler
    # Python sets handlers on the main thread only. A handler of the script's own decides what Ctrl-C does.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        return lambda: None
    signal.signal(signal.SIGINT, _interrupt)

    def restore() -> None:
        # A handler that the script has set meanwhile stays.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, usual)

    return restore


def _interrupt(number: int, frame: FrameType | None) -> None:
    connection = sender(frame)
    if connection is None:
        raise KeyboardInterrupt
    # Not raised here, in the middle of a frame: `Connection.send` raises once the frame is complete.
    connection.interrupt()
    # `send` may have looked at the flag a moment ago. Then no code raises, and Ctrl-C would be lost.
    again = threading.Timer(AGAIN_S, _once_more, (connection, number))
    again.daemon = True
    again.start()


def _once_more(connection: Connection, number: int) -> None:
    main = threading.main_thread().ident
    if connection.clear_interrupt() and main is not None:
        # To the main thread: a blocking call there must be interrupted, and not only a flag be set.
        signal.pthread_kill(main, number)


def sender(frame: FrameType | None) -> Connection | None:
    """Return the connection that is sending a frame in this code, or None."""
    while frame is not None:
        # A connection that waits for space in its queue has not numbered the frame, and may be interrupted.
        if frame.f_code is FrameWriter.wait_for_room.__code__:
            return None
        if frame.f_code is Connection.send.__code__:
            found = frame.f_locals["self"]
            return found if isinstance(found, Connection) else None
        # The frame may be inside `encode` or a lock that `send` uses.
        frame = frame.f_back
    return None
