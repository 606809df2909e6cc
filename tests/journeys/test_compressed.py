"""Compression through the command line: it trains over TCP, and the report shows fewer bytes."""

import pytest
from job_runner import SANDBLASTER, Ended, JobRunner

pytestmark = pytest.mark.journey

START = 1.6  # loss of the untrained model is above this


def bytes_out(ended: Ended) -> int:
    return sum(process["bytes_out"] for process in ended.report["processes"])


def test_a_job_trains_with_fewer_bytes(runner: JobRunner) -> None:
    cluster = f"{SANDBLASTER} transport: kTcp"
    short = runner.run(cluster, "small.py", name="short", options=("--set", "cluster.compression=kInt8"))
    long = runner.run(cluster, "small.py", name="long")
    assert short.report["metrics"]["loss"] < START
    assert short.report["metrics"]["loss"] == pytest.approx(long.report["metrics"]["loss"], rel=0.1)
    assert bytes_out(short) < 0.75 * bytes_out(long)  # the rest is fields of messages: the model is small
    # The speed of the link decides the size of slices, but not where a slice has a scale of its own.
    assert long.report["layout"]["link_mbit"] > 0
    assert long.report["slice_bytes"] in (1 << 16, 1 << 20, 1 << 22)
    assert "link_mbit" not in short.report["layout"]
    assert short.report["slice_bytes"] == 1 << 20
