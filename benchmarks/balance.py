"""P10: how evenly parameters lie on the servers, for the shapes of three well-known models. Nothing is started."""

import argparse
from collections.abc import Callable, Mapping, Sequence

from benchmarks.harness import Row, row
from benchmarks.record import run_table
from topotrain.config.sharding import ALIGN, Parameter, SliceMap, cut

NAME, TITLE, GOALS = "balance", "Balance of the servers", ("P10",)

Shapes = list[tuple[int, ...]]
SERVERS = (2, 3, 4, 8, 16, 32, 64)
_ITEM = 4


def gpt2_small() -> Shapes:
    """124 M: 12 blocks of width 768 (Radford et al., 2019); the head is the embedding."""
    width = 768
    block: Shapes = [
        *((width,), (width,)),
        *((width, 3 * width), (3 * width,), (width, width), (width,)),
        *((width,), (width,)),
        *((width, 4 * width), (4 * width,), (4 * width, width), (width,)),
    ]
    return [(50257, width), (1024, width), *(block * 12), (width,), (width,)]


def resnet50() -> Shapes:
    """25.6 M (He et al., 2016): bottlenecks 3, 4, 6, 3."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        after = 4 * width
        for number in range(count):
            shapes += [(width, before, 1, 1), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            shapes += [(after, width, 1, 1), (after,), (after,)]
            shapes += [(after, before, 1, 1), (after,), (after,)] if number == 0 else []
            before = after
    return [*shapes, (1000, 2048), (1000,)]


def vgg16() -> Shapes:
    """138 M (Simonyan and Zisserman, 2015); three quarters of it in one matrix."""
    shapes: Shapes = []
    before = 3
    for width in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        shapes += [(width, before, 3, 3), (width,)]
        before = width
    return [*shapes, (4096, 25088), (4096,), (4096, 4096), (4096,), (1000, 4096), (1000,)]


MODELS: Mapping[str, Callable[[], Shapes]] = {"GPT-2-small": gpt2_small, "ResNet-50": resnet50, "VGG-16": vgg16}


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


def mapped(shapes: Shapes, servers: int) -> SliceMap:
    """The slice map of a model for so many servers."""
    parameters = [
        Parameter(f"p{number}", shape, _strides(shape), "float32", True) for number, shape in enumerate(shapes)
    ]
    return cut(parameters, servers)


def held(slice_map: SliceMap) -> list[int]:
    """Bytes of each server's part, with the padding that keeps parameters aligned: what it holds and sends."""
    spaces = slice_map.spaces
    return [
        sum((ranges[shard][1] - ranges[shard][0]) * spaces[n].itemsize for n, ranges in enumerate(slice_map.ranges))
        for shard in range(slice_map.shards)
    ]


def measure(options: argparse.Namespace) -> Sequence[Row]:
    rows: list[Row] = []
    for name, make in MODELS.items():
        shapes = make()
        total = mapped(shapes, 1).shard_bytes[0]
        what = f"{name} ({total / _ITEM / 1e6:.1f} M parameters), {SERVERS[0]}–{SERVERS[-1]} servers"
        maps = [mapped(shapes, servers) for servers in SERVERS]
        spread = max(max(held(found)) - min(held(found)) for found in maps)
        rows.append(row("P10", f"{what}: max − min", spread / _ITEM, "elements", f"<= {ALIGN}", "the largest"))
        percent = max((max(found.shard_bytes) - min(found.shard_bytes)) / (total / found.shards) for found in maps)
        note = "of a fair share, without padding; the largest"
        rows.append(row("P10", f"{what}: max − min", 100 * percent, "%", "<= 1", note))
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure)
