"""The delay of messages in one process."""

import threading
import time

from topotrain.config.topology import Address
from topotrain.core.events import EventSink
from topotrain.core.protocol import Message
from topotrain.core.transport_contract import DeliveryObserver
from topotrain.extensions.slow_deliveries.traveled_messages import traveled


class SlowDeliveries(DeliveryObserver):
    """Reports each message of a step to this process, and holds it for a while.

    It holds one message at a time. No message overtakes another one of its connection, so the process handles what it
    would handle without this, only later.

    Args:
        seconds: for which a message is held.
        sink: gets a `Traveled` event when that begins.
    """

    def __init__(self, seconds: float, sink: EventSink) -> None:
        self._seconds, self._sink = seconds, sink
        self._turn = threading.Lock()

    def on_delivery(self, sender: Address, to: Address, message: Message) -> None:
        event = traveled(sender, to, message)
        if event is None:
            return
        # Messages of several connections come on several threads. Inside the lock, they come one after another.
        with self._turn:
            self._sink.emit(event)
            time.sleep(self._seconds)
