"""`pull: kLazy`: step() returns at once, and the next forward waits for the values layer by layer.

The servers update the parameters in the order of their definition, which mostly is the order in which a forward needs
them: the first layers compute while the last ones are still on their way (priority by order of use, as in P3:
Jayarajan et al., 2019).

Rule: what waits is a module's own forward, for the module's own parameters. Whoever reads a parameter elsewhere (code
that uses another module's weight without calling that module, or looks at `p` between step() and forward) may see half
of an update; `state_dict()` waits for everything.
"""

from torch import nn

from topotrain.training.worker import Worker


def wait_by_layer(model: nn.Module, worker: Worker) -> None:
    """Let each module's forward wait for its own parameters, and `state_dict()` for all."""
    number = {id(tensor): index for index, tensor in enumerate(worker.parts.tensors)}
    for module in model.modules():
        indices = [number[id(p)] for p in module._parameters.values() if p is not None and id(p) in number]
        buckets = frozenset(
            piece.bucket
            for index in indices
            for segment in worker.map.segments_of_parameter(index)
            for piece in worker.map.pieces_of(segment.id)
        )
        if buckets:
            module.register_forward_pre_hook(lambda *_, wanted=buckets: worker.exchange.wait_for(wanted))
    model.register_state_dict_pre_hook(lambda *_: worker.settle())  # type: ignore[no-untyped-call]
