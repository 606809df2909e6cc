"""Find the layers that a SINGA job file divides among the workers of a group.

Only that is read from the `neuralnet` block: the model is the program's PyTorch module.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_TOKEN = re.compile(
    r"""\#[^\n]*|(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<word>(?:-\s*)?\w+)|(?P<mark>[{}<>:])"""
)
_FIELDS = ("name", "partition_dim")
# Without 0, by samples: that is what every worker does with an undivided model.
_DIMS = {"1": "by features", "-1": "as whole layers"}
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class DividedLayer:
    """A layer, and its `partition_dim` in SINGA."""

    layer: str
    partition_dim: str

    def words(self) -> str:
        """Return the layer with its field, for a message."""
        return f"{self.layer} (partition_dim: {self.partition_dim}, {_DIMS[self.partition_dim]})"


def divided_in_text(block: str) -> tuple[DividedLayer, ...]:
    """Return the divided layers of the text inside `neuralnet { … }`."""
    # The caller has checked that the braces are balanced.
    net: dict[str, str] = {}
    layers: list[dict[str, str]] = []
    outer: list[dict[str, str] | None] = [net]  # of each open block: the target of its fields, or None to drop them
    name = last = ""
    for found in _TOKEN.finditer(block):
        token = found.group()
        if token.startswith("#"):
            continue
        if found["mark"] in ("{", "<"):
            # Only blocks `layer` of the net itself count. Fields of other blocks may have the same names.
            fields: dict[str, str] | None = None
            if name == "layer" and len(outer) == 1:
                layers.append(fields := {})
            outer.append(fields)
        elif found["mark"] in ("}", ">"):
            outer.pop()
        elif last == ":":
            if (into := outer[-1]) is not None and name in _FIELDS:
                into[name] = re.sub(r"\s", "", token).strip("\"'")
        elif found["word"]:
            name = token
        last = token
    return tuple(_divided(net, layers))


def divided_in_data(block: Any) -> tuple[DividedLayer, ...]:
    """Return the divided layers of a mapping, as YAML has it; () for other data."""
    if not isinstance(block, Mapping):
        return ()
    layers = block.get("layer")
    many = layers if isinstance(layers, list | tuple) else [layers]
    return tuple(_divided(_fields(block), [_fields(layer) for layer in many if isinstance(layer, Mapping)]))


def _fields(block: Mapping[Any, Any]) -> dict[str, str]:
    return {name: str(block[name]) for name in _FIELDS if block.get(name) is not None}


def _divided(net: Mapping[str, str], layers: list[dict[str, str]]) -> Iterator[DividedLayer]:
    """Yield the divided layers; a layer without a `partition_dim` has that of its net."""
    for number, layer in enumerate(layers):
        dim = layer.get("partition_dim", net.get("partition_dim", "0"))
        if dim in _DIMS:
            yield DividedLayer(layer.get("name", f"number {number}"), dim)


def warning(divided: tuple[DividedLayer, ...], workers: int) -> str:
    """Return the warning that a group's `workers` do not divide these layers here."""
    shown = ", ".join(one.words() for one in divided[:_SHOWN])
    more = f" and {len(divided) - _SHOWN} more" if len(divided) > _SHOWN else ""
    first = divided[0]
    location = " location: 0" if first.partition_dim == "-1" else ""
    return (
        f"neuralnet divides layers among the {workers} workers of a group, which is not done here: {shown}{more}. "
        f"Every worker has the whole model and trains it on its part of the batch (data-parallel). To divide the "
        f"program's model, name its modules in `partition` blocks, such as "
        f'partition {{ match: "^{re.escape(first.layer)}$" partition_dim: {first.partition_dim}{location} }}'
    )
