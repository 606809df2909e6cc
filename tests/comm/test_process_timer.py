"""The clock of a process: one copy of a server is woken by it, and the other one is not."""

import threading
import time

from topotrain.comm.process_timer import ProcessTimer, ServerClock
from topotrain.core.protocol import Message
from topotrain.extensions.outer_optimizer.grace.window_messages import WindowOver


class Endpoint:
    def __init__(self) -> None:
        self.handled: list[Message] = []
        self.threads: list[threading.Thread] = []
        self.all_here = threading.Event()

    def handle_own(self, message: Message) -> None:
        self.handled.append(message)
        self.threads.append(threading.current_thread())
        if len(self.handled) == 2:
            self.all_here.set()


def test_messages_come_in_the_order_of_their_times() -> None:
    endpoint = Endpoint()
    timer = ProcessTimer(endpoint)
    timer.wake(0.2, WindowOver(0, 2))
    timer.wake(0.0, WindowOver(0, 1))
    assert endpoint.all_here.wait(20)
    assert [message.number for message in endpoint.handled if isinstance(message, WindowOver)] == [1, 2]
    # Not on the thread that asked, which may hold the lock of the server. No thread keeps a process alive.
    assert all(thread is not threading.current_thread() and thread.daemon for thread in endpoint.threads)


def test_a_second_copy_has_the_time_and_is_not_woken() -> None:
    clock = ServerClock()
    before = threading.active_count()
    clock.wake(0.0, WindowOver(0, 1))
    assert threading.active_count() == before
    assert abs(clock.now() - time.monotonic()) < 60
