"""Jobs with an outer optimizer end with the bits of a program in plain PyTorch."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_job import Cnn, Transformer, images, run_hosted, run_local, tokens, vectors
from island_jobs import OUTER, Islands, adamw, assert_near, assert_same_bits, building, job, script
from pairwise import case_id
from torch import nn

from topotrain.config.job import Compression, ConfigError, Keep, Slicing, TransportChoice, Weigh

EXAMPLE = Path(__file__).parents[3] / "examples" / "islands_by_hand.py"


@pytest.mark.parametrize(("groups", "outer"), [(1, "nesterov"), (2, "mean"), (3, "adam")])
def test_a_job_has_the_bits_of_the_example(groups: int, outer: str) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40
    spec = importlib.util.spec_from_file_location("islands_by_hand", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    islands, batches = Islands(groups, outer=outer), vectors(groups * 13)
    made = OUTER[outer][1](islands.agreed.parameters())
    parts = [batches[group::groups] for group in range(groups)]
    example.train(islands.agreed, adamw, made, nn.functional.cross_entropy, parts, 4)
    found = run_local(job(groups, outer=outer), building(), script(batches, groups))
    assert_same_bits(found.values, islands.values)
    assert [server.state.version for server in found.servers] == [3 + 1], "one more for the steps that are left"


class DoubleCnn(Cnn):
    def __init__(self) -> None:
        super().__init__()
        self.double()


def double_images(count: int) -> Any:
    return [(x.double(), y) for x, y in images(count)]


def unequal(count: int) -> Any:
    """Batches that no two workers can divide into parts of one size."""
    return vectors(count, size=11)


def fragmented(sync_freq: int, fragments: int, overlap: int, keep: Keep = Keep.kAdd, **more: Any) -> dict[str, Any]:
    return {"sync_freq": sync_freq, "fragments": fragments, "overlap": overlap, "keep": keep} | more


DEALT = fragmented(6, 3, 1)
BLENDED = fragmented(6, 2, 2, Keep.kBlend)
DROPPED = fragmented(6, 2, 1, Keep.kDrop)
PAIRS: dict[str, Any] = {"groups": 2, "workers": 2}
TURNS = fragmented(4, 2, 1)
ALONE: dict[str, Any] = {"groups": 2, "sync_freq": 3}
TWO: dict[str, Any] = {"nservers_per_group": 2}

ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # What is computed, and over which layout.
    ({}, {"nservers_per_group": 3}),
    ({}, {**TWO, "slicing": Slicing.kTensor}),
    ({}, {"nworkers_per_procs": 3, "server_worker_separate": False}),
    ({}, {"weigh": Weigh.kEqual}),
    ({"sync_freq": 100}, {}),
    # Also optimizers that no server could run on a part of a tensor.
    (ALONE | {"inner": torch.optim.Rprop}, TWO),
    (ALONE | {"inner": torch.optim.Adafactor}, TWO),
    (ALONE | {"model": DoubleCnn, "batches": double_images}, {}),
    (BLENDED, {}),
    (DROPPED, {}),
    (fragmented(4, 4, 0), {}),
    (PAIRS, {}),
    (PAIRS | DEALT, {}),
    (PAIRS | fragmented(6, 1, 2), {}),
    (PAIRS | TURNS, {**TWO, "slicing": Slicing.kTensor}),
    (PAIRS | TURNS | {"groups": 1}, {**TWO, "server_worker_separate": False}),
    (PAIRS | TURNS | {"groups": 3}, {}),
    (PAIRS | {"batches": unequal}, {}),
    ({"outer": "delay 2"}, {"nservers_per_group": 3}),
    ({"outer": "linear", "sync_freq": 3, "groups": 1}, TWO),
    ({"outer": "inverse t", "sync_freq": 3, "groups": 2}, TWO),
    ({"outer": "linear", "groups": 2, "sync_freq": 3, "fragments": 3}, TWO),
    ({"radial": True, "groups": 2}, {}),
    ({"radial": True}, {"weigh": Weigh.kEqual}),
    # Embeddings are merged by their mean, also where one is the output layer, too.
    (ALONE | {"radial": True, "model": Transformer, "batches": tokens}, {}),
    # Transports.
    (PAIRS, {**TWO, "transport": TransportChoice.kShm}),
    (PAIRS | DEALT, {**TWO, "transport": TransportChoice.kTcp}),
]


def run_row(row: dict[str, Any], layout: dict[str, Any], steps: int, folder: Path) -> None:
    options = dict(row)
    make = options.pop("batches", vectors)
    islands = Islands(**options)
    batches, wanted = make(islands.groups * steps), islands.job(**layout)
    read = script(batches, islands.groups)
    if "transport" in layout:
        found = run_hosted(wanted, islands.building(), read, folder)
    else:
        found = run_local(wanted, islands.building(), read)
    assert_same_bits(found.values, islands.train(batches))


@pytest.mark.parametrize(("row", "layout"), ROWS, ids=case_id)
def test_a_job_has_the_bits_of_plain_pytorch(row: dict[str, Any], layout: dict[str, Any], tmp_path: Path) -> None:
    """The last round has fewer steps."""
    run_row(row, layout, 9 if "transport" in layout else 13, tmp_path)


@pytest.mark.parametrize("row", [DEALT, PAIRS], ids=case_id)
@pytest.mark.parametrize("steps", [1, 24])
def test_rounds_that_begin_and_end_anywhere(row: dict[str, Any], steps: int, tmp_path: Path) -> None:
    run_row(row, {}, steps, tmp_path)


# --- fragments -------------------------------------------------------------------------------------------------------


def test_a_fragment_travels_alone() -> None:
    """An exchange of one of four parameters costs less than one of all."""

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 512), nn.Tanh(), nn.Linear(512, 5))

    def bytes_of(fragments: int) -> int:
        return sum(run_local(job(fragments=fragments), building(wide), script(vectors(3 * 16), 3)).traffic)

    whole, parts = bytes_of(1), bytes_of(4)
    assert parts < 1.4 * whole, (whole, parts)


def test_more_fragments_than_parameters() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.fragments = 5: must be at most 4, the number of parameters"):
        run_local(job(sync_freq=5, fragments=5), building(), script(vectors(3), 3))


@pytest.mark.parametrize(
    ("kind", "overlap", "near", "most"),
    # A round moves the values by 1 % of their norm and more. With kTopK only pushes are short.
    [(Compression.kE3M0, 1, 0.02, 0.5), (Compression.kTopK, 0, 0.02, 0.9)],
)
def test_compression_changes_little(kind: Compression, overlap: int, near: float, most: float) -> None:
    batches, cluster = vectors(3 * 24), {"fragments": 2, "overlap": overlap, "outer": "mean"}
    exact = run_local(job(**cluster), building(), script(batches, 3))
    ratio = {"compression_ratio": 0.3} if kind is Compression.kTopK else {}
    short = run_local(job(**cluster, compression=kind, **ratio), building(), script(batches, 3))
    assert short.distance(exact) < near
    assert sum(short.traffic) < most * sum(exact.traffic)


# --- radial merging over servers that divide a tensor ----------------------------------------------------------------

DIVIDED = {"nservers_per_group": 3}


def test_a_tensor_on_several_servers_is_merged_as_a_whole(tmp_path: Path) -> None:
    """Neither the transport nor the order of arrival changes a bit."""
    islands, batches = Islands(radial=True), vectors(3 * 13)
    found = run_local(islands.job(**DIVIDED), building(), script(batches, 3)).values
    by_tcp = islands.job(transport=TransportChoice.kTcp, **DIVIDED)
    assert_same_bits(run_hosted(by_tcp, building(), script(batches, 3), tmp_path).values, found)
    assert_near(found, islands.train(batches))
    by_mean = Islands().train(batches)
    assert not torch.allclose(by_mean["0.weight"], found["0.weight"], atol=1e-4), "merging makes no difference"


@pytest.mark.parametrize("slicing", [Slicing.kElement, Slicing.kTensor])
def test_neither_slices_nor_whole_tensors_matter(slicing: Slicing) -> None:
    """A tensor in one bucket, in several of one server, and in several of two servers."""

    def broad() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 5))

    islands, batches = Islands(radial=True, model=broad), vectors(3 * 9)
    large, small = (
        run_local(islands.job(**TWO, slicing=slicing, slice_bytes=size), islands.building(), script(batches, 3))
        for size in (0, 4096)
    )
    assert_same_bits(small.values, large.values)
    assert_near(large.values, islands.train(batches))
    buckets = [[len(server.model.buckets) for server in found.servers] for found in (large, small)]
    assert buckets[0] == [1, 1] and max(buckets[1]) > 2


def test_radial_fragments_and_overlap() -> None:
    """Each fragment has tensors of its own, and servers that divide them."""
    islands, batches = Islands(radial=True, **TURNS), vectors(3 * 24)
    one, many = (
        run_local(islands.job(compression=Compression.kInt8, **layout), building(), script(batches, 3)).values
        for layout in ({}, DIVIDED)
    )
    assert_near(many, one, rtol=0, atol=0.01)
