"""Lazy pulls (`pull: kLazy`): step() returns at once, and layers wait for values.

The servers update the parameters in definition order, which is mostly the order in which a forward needs them. So the
first layers compute while the last values are still in flight (priority by order of use, as in P3: Jayarajan et al.,
2019).

A module's own forward waits for the module's own parameters; `state_dict()` and the end of a pass over the loader wait
for all parameters. Code that reads a parameter elsewhere may see half of an update: code that uses another module's
weight without calling that module, or reads `p` between step() and forward.
"""

from torch import nn

from topotrain.training.worker import Worker


def wait_by_layer(model: nn.Module, worker: Worker) -> None:
    """Let each module's forward wait for its parameters, and `state_dict()` for all."""
    number = {id(tensor): index for index, tensor in enumerate(worker.parts.tensors)}
    for module in model.modules():
        indices = [number[id(p)] for p in module.parameters(recurse=False) if id(p) in number]
        buckets = frozenset(
            piece.bucket
            for index in indices
            for segment in worker.map.segments_of_parameter(index)
            for piece in worker.map.pieces_of(segment.id)
        )
        # `wanted` as a default: a closure would see the buckets of the last module of the loop.
        if buckets:
            module.register_forward_pre_hook(lambda *_, wanted=buckets: worker.client.values.wait_for(wanted))
    # Also of the children: a model may be one of several that are trained together.
    for module in (model, *model.children()):
        module.register_state_dict_pre_hook(lambda *_: worker.client.values.settle())  # type: ignore[no-untyped-call]
