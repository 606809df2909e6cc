"""Block sets that are known to fail, each with its reason. Strict: one that no longer fails is an error."""

from dataclasses import dataclass

from tests.differential.scripts import Script


@dataclass(frozen=True)
class Known:
    """Blocks (`axis=name`) that together fail under a layout, and why."""

    blocks: str
    reason: str
    layout: str = "allreduce"
    racy: bool = False
    """Workers race: it may also pass."""

    @property
    def keys(self) -> frozenset[str]:
        """The blocks."""
        return frozenset(self.blocks.split())


SHARED = "values written beside tt.assign are shared by the workers of a host"
RACY = ("writes=data", "writes=data_step", "writes=numpy", "writes=numpy_step", "average=swa", "end=scale", "end=best")
KNOWN: tuple[Known, ...] = (
    *(Known(blocks, SHARED, racy=True) for blocks in RACY),
    Known("flow=no_graph", "a worker without a backward sees no mean in p.grad before step()"),
    Known("flow=no_backward", "a worker without a backward sees no mean in p.grad before step()"),
    Known("gradients=autograd", "p.grad that no backward made is the share's until step(), also where it is clipped"),
    Known("gradients=vmap", "p.grad that no backward made is the share's until step(), also where it is clipped"),
    Known("gradients=func", "p.grad that no backward made is the share's until step(), also where it is clipped"),
    Known("gradients=create_graph", "a mean in p.grad has no graph"),
    Known("gradients=set", "p.grad that no backward made is the share's until step(), also where it is clipped"),
)


def known_part(script: Script) -> Known | None:
    """The known failure that is a part of this script."""
    return next((each for each in KNOWN if each.keys <= set(script.keys)), None)
