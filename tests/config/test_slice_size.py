"""The size of a slice follows the link."""

import pytest

from topotrain.config.job import Algorithm, Cluster, Compression, Link, TransportChoice
from topotrain.config.slice_size import FAST_BYTES, SENT_BYTES, SLOW_BYTES, sizes_in_words, slice_bytes
from topotrain.config.topology import layout

TCP = {"nworkers_per_group": 2, "server_worker_separate": True, "transport": TransportChoice.kTcp}


@pytest.mark.parametrize(
    ("mbit", "expected"),
    [(0.0, SENT_BYTES), (500.0, SLOW_BYTES), (501.0, SENT_BYTES), (3999.0, SENT_BYTES), (4000.0, FAST_BYTES)],
)
def test_large_slices_for_fast_links_and_small_ones_for_slow_links(mbit: float, expected: int) -> None:
    assert slice_bytes(layout(Cluster(**TCP), link_mbit=mbit)) == expected


@pytest.mark.parametrize(
    "more",
    [
        {"compression": Compression.kInt8},
        {"algorithm": Algorithm.kRing, "nservers_per_group": 2, "server_worker_separate": False},
        {"link": Link(bandwidth=100_000.0)},
    ],
    ids=str,
)
def test_where_bits_depend_on_slices_no_measurement_changes_them(more: dict[str, object]) -> None:
    topology = layout(Cluster(**{**TCP, **more}), link_mbit=9400.0)
    assert not topology.fits_slices
    assert slice_bytes(topology) == SENT_BYTES


def test_the_job_file_and_a_stated_link_come_first() -> None:
    assert slice_bytes(layout(Cluster(**TCP, slice_bytes=1 << 17), link_mbit=9400.0)) == 1 << 17
    assert slice_bytes(layout(Cluster(**TCP, link=Link(bandwidth=100.0)), link_mbit=9400.0)) == SLOW_BYTES


def test_a_plan_says_what_decides_the_size() -> None:
    said = {
        "at most 4 MB in shared memory": Cluster(),
        "at most 256 kB, 1 MB or 4 MB, by the speed of the link": Cluster(**TCP),
        "in shared memory; between hosts at most 256 kB": Cluster(**{**TCP, "transport": TransportChoice.kAuto}),
        "at most 131,072 bytes, as slice_bytes says": Cluster(**TCP, slice_bytes=1 << 17),
        "at most 1 MB": Cluster(**TCP, compression=Compression.kInt8),
    }
    for words, cluster in said.items():
        assert words in sizes_in_words(layout(cluster)), cluster
    assert sizes_in_words(layout(Cluster())) == "at most 4 MB in shared memory"
