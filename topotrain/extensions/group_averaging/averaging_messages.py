"""Messages of server groups that average with partners by chance."""

from dataclasses import dataclass

from topotrain.core.protocol.message import MOST, Condition, Message, Receiver, Route, Sender, message


@message(39, Route(Sender.SAME_SHARD, Receiver.SERVER, Condition.SERVER_GROUPS), handled="agree")
@dataclass(frozen=True, slots=True)
class PairTaken(Message):
    """Server -> server of another group: the reply to offer `sync` has arrived.

    The receiver need not keep that reply for a repeated offer.
    """

    bucket: int
    sync: int

    def is_valid(self) -> bool:
        return 0 <= self.sync < MOST
