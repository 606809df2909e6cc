"""The speed of a link is that at which its bytes arrive."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from topotrain.comm.link_speed import LIMIT_S, loopback_mbit, receive_for_measurement, send_for_measurement
from topotrain.comm.request_reply import RequestChannel
from topotrain.comm.transport import ConnectionLost


def test_a_loopback_is_faster_than_most_networks() -> None:
    assert loopback_mbit() > 100


@contextmanager
def link(rate: float) -> Iterator[RequestChannel]:
    """The sending end of a link of so many bytes per second, with a receiver at its other end."""
    ours, relay_in = socket.socketpair()
    relay_out, theirs = socket.socketpair()

    def forward() -> None:
        due = 0.0
        with suppress(OSError):
            while data := relay_in.recv(1 << 12):
                # Never ahead of the rate, however long the link was idle before.
                due = max(due, time.monotonic()) + len(data) / rate
                time.sleep(max(0.0, due - time.monotonic()))
                relay_out.sendall(data)

    def answer() -> None:
        with suppress(OSError):
            while data := relay_out.recv(1 << 12):
                relay_in.sendall(data)

    def receive() -> None:
        with suppress(ConnectionLost):
            receive_for_measurement(RequestChannel(theirs))

    threads = [threading.Thread(target=each, daemon=True) for each in (forward, answer, receive)]
    for thread in threads:
        thread.start()
    with ours, relay_in, relay_out, theirs:
        try:
            yield RequestChannel(ours)
        finally:
            for sock in (ours, relay_in, relay_out, theirs):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(10)


def test_a_slow_link_is_not_taken_for_a_faster_one() -> None:
    rate = 4e6
    with link(rate) as channel:
        found = send_for_measurement(channel)
    assert 0 < found <= 2 * rate * 8e-6  # half of a short round may be the way of its answer


def test_a_fast_link_is_faster_than_a_slow_one() -> None:
    with link(1e12) as fast, link(1e5) as slow:
        assert send_for_measurement(fast, nbytes=1 << 15) > 2 * send_for_measurement(slow, nbytes=1 << 15)


def test_a_link_that_passes_nothing_in_time_is_slow_and_not_unknown() -> None:
    """Of 16 kB, at 8 kbit/s, nothing comes within the limit. The round without bytes has come."""
    with link(1e12) as channel:
        channel.send(1.0, 2)
        assert channel.receive(5.0, 5.0) is not None  # the link is up
    with link(2e3) as channel:
        began = time.monotonic()
        assert 0 < send_for_measurement(channel, limit_s=1.0) < 1.0
        assert time.monotonic() - began < 10  # and not the 8 s of the first round, or the hour of the last one


def test_a_peer_that_is_silent_or_gone_cannot_be_measured() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ConnectionLost):
        send_for_measurement(RequestChannel(ours), limit_s=LIMIT_S / 10)
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(ConnectionLost):
        send_for_measurement(RequestChannel(ours))
