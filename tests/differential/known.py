"""Block sets that are known to fail, each with its reason. Strict: one that no longer fails is an error."""

from dataclasses import dataclass

from tests.differential.scripts import Script


@dataclass(frozen=True)
class Known:
    """Blocks (`axis=name`) that together fail under a layout, and why."""

    blocks: str
    reason: str
    layout: str = "allreduce"

    @property
    def keys(self) -> frozenset[str]:
        """The blocks."""
        return frozenset(self.blocks.split())


KNOWN: tuple[Known, ...] = ()


def known_part(script: Script) -> Known | None:
    """The known failure that is a part of this script."""
    return next((each for each in KNOWN if each.keys <= set(script.keys)), None)
