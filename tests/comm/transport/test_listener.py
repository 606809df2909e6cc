"""The listener: the end of its threads."""

import socket
import threading

from topotrain.comm.transport.listener import Listener
from topotrain.comm.transport.tcp_socket import bind, resolve

WAIT = 20


class Lingering(threading.Thread):
    """Goes on after its connection has been handled, until somebody waits for its end."""

    joined = threading.Event()
    handled = threading.Event()

    def run(self):
        super().run()
        self.handled.set()
        self.joined.wait(WAIT)

    def join(self, timeout=None):
        self.joined.set()
        super().join(timeout)


def test_a_thread_that_is_done_with_its_connection_is_waited_for():
    family, address = resolve("127.0.0.1", 0)
    sock = bind(family, address, 0)
    port = sock.getsockname()[1]
    listener = Listener(sock, lambda sock: None, "test", thread=Lingering)
    listener.start()
    with socket.create_connection(("127.0.0.1", port), WAIT) as client:
        assert client.recv(1) == b""
        assert Lingering.handled.wait(WAIT)
        listener.stop()
        listener.join(WAIT)
    assert Lingering.joined.is_set()
    assert not [thread for thread in threading.enumerate() if isinstance(thread, Lingering)]
