"""Connections that are read by the thread that waits."""

import socket

import pytest

from topotrain.comm.transport.inline_reader import InlineReader


class Interrupted:
    """A connection in which Ctrl-C ends a turn."""

    def __init__(self) -> None:
        self.mine, self.theirs = socket.socketpair()
        self.ended = self.started = 0

    def fileno(self) -> int:
        return self.mine.fileno()

    def turn(self) -> bool:
        raise KeyboardInterrupt

    def end(self) -> None:
        self.ended += 1
        self.mine.close()

    def start(self) -> None:
        self.started += 1


def test_a_connection_in_which_the_script_is_interrupted_has_ended_once_and_is_read_no_more() -> None:
    reader, connection = InlineReader(), Interrupted()
    reader.add(connection)  # type: ignore[arg-type]
    connection.theirs.send(b"x")
    with pytest.raises(KeyboardInterrupt):
        reader.turn(1.0)
    reader.release()
    assert (connection.ended, connection.started) == (1, 0)
    connection.theirs.close()
