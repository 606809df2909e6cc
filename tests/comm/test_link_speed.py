"""The speed of a link is that at which its bytes arrive."""

import socket
import threading
import time

from topotrain.comm.link_speed import loopback_mbit, receive_for_measurement, send_for_measurement


def test_a_loopback_is_faster_than_most_networks() -> None:
    assert loopback_mbit() > 100


def test_a_slow_receiver_makes_a_slow_link() -> None:
    ours, theirs = socket.socketpair()
    rate, piece = 4e6, 1 << 16  # bytes per second

    def receive_slowly() -> None:
        began, received = time.monotonic(), 0
        while data := theirs.recv(piece):
            received += len(data)
            # Never ahead of the rate, however long the steps of this loop take.
            time.sleep(max(0.0, began + received / rate - time.monotonic()))
        theirs.send(b"!")

    with ours, theirs:
        thread = threading.Thread(target=receive_slowly)
        thread.start()
        found = send_for_measurement(ours, nbytes=1 << 20)
        thread.join()
    assert 0 < found <= rate * 8e-6 * 1.01


def test_the_time_is_bounded_where_the_link_is_very_slow() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=receive_for_measurement, args=(theirs,))
        thread.start()
        assert send_for_measurement(ours, nbytes=1 << 40, limit_s=0.05) > 0
        thread.join()
