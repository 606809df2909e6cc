"""A server's part: compare what workers have of the parameters with its values."""

from topotrain.config.topology import Address
from topotrain.core.model.tensor_bits import bit_sum
from topotrain.core.protocol import Message, ProtocolError
from topotrain.core.server.gradients.gradient_source import StepError
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import Outbox, ServerExtension
from topotrain.extensions.drift.drift_messages import CopySums


class DriftServer(ServerExtension):
    """Ends the job where a worker's copy of a parameter is not the server's value."""

    messages = (CopySums,)

    def __init__(self, server: Server) -> None:
        self._server = server

    def handle(self, sender: Address, message: Message) -> Outbox:
        """Compare the sums. The step is not committed, so the values are those before it."""
        assert isinstance(message, CopySums)
        model, me = self._server.state.known, self._server.me
        pieces = [(bucket, piece) for bucket in model.buckets for piece in bucket.pieces]
        # On a transport that reorders, the step may be over.
        current = message.step == model.staging[sender.group].step
        for number, theirs in zip(message.sums[::2], message.sums[1::2], strict=True) if current else ():
            if not 0 <= number < len(pieces):
                raise ProtocolError(f"{sender}: the sum of piece {number}, of {len(pieces)}")
            bucket, piece = pieces[number]
            if theirs != bit_sum(model.values(bucket.id)[bucket.place(piece)]):
                name = model.parameter(model.map.segments[piece.segment].parameter)
                raise StepError(
                    f"{sender} has other bits in parameter {name} than {me}, after {message.step} steps: memory, a card"
                    f" or a link has lost some. Look at these hosts; the job can go on from its last snapshot"
                )
        return ()
