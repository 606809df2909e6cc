"""Loss over time as text, and what a comparison says of it."""

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from topotrain.config.job import Cluster, Job
from topotrain.config.topology import layout
from topotrain.launch import JobOutcome
from topotrain.tools.monitor.job_report import Report
from topotrain.tools.monitor.loss_bars import bars, common_loss, seconds_to
from topotrain.tools.monitor.result_tables import comparison, losses

FAST = [(0.0, 2.0), (1.0, 1.0), (2.0, 0.25)]
SLOW = [(0.0, 2.0), (4.0, 1.5), (8.0, 0.5), (10.0, 0.6)]


def test_bars_of_all_jobs_have_one_scale_of_time_and_loss() -> None:
    fast, slow, none = bars([FAST, SLOW, []], width=10)
    assert fast == "█▄▁" and len(slow) == 10 and none == ""
    # The highest and the lowest loss of all have the highest and the lowest bar; between two points the last one stays.
    assert slow == "█" * 4 + "▆" * 4 + "▂" * 2
    assert bars([[(1.0, 0.5)], [(2.0, 0.5)]], width=4) == ["  ▁", "   ▁"]
    assert bars([[(0.0, 100.0), (1.0, 10.0), (2.0, 1.0)]], width=3) == ["█▅▁"]  # by the logarithm
    assert bars([[]]) == [""] and bars([[(0.0, 1.0)]], width=5) == ["▁"]


def test_jobs_are_compared_at_a_loss_that_all_have_reached() -> None:
    assert common_loss([FAST, SLOW, []]) == 0.5
    assert (seconds_to(FAST, 0.5), seconds_to(SLOW, 0.5), seconds_to(SLOW, 0.4)) == (2.0, 8.0, None)
    assert common_loss([[], []]) is None


def printed(table: Table | None) -> str:
    assert table is not None
    text = io.StringIO()
    Console(file=text, width=160).print(table)
    return text.getvalue()


def row(label: str, **fields: Any) -> dict[str, Any]:
    job = Job(cluster=Cluster(nworker_groups=2))
    return {**Report(job, layout(job.cluster)).as_data(JobOutcome(0, 1.0)), "label": label, **fields}


def test_a_comparison_has_the_time_to_the_common_loss_and_the_bytes_over_tcp() -> None:
    rows = [
        row("DiLoCo", curve=FAST, bytes_out=3_000_000, bytes_link=3_000_000),
        row("AllReduce", curve=SLOW, bytes_out=9_000_000, bytes_link=6_000_000),
        row("Downpour", curve=[], bytes_out=0, bytes_link=0),
    ]
    text = printed(comparison(rows))
    assert "time to loss 0.5" in text and "MB over TCP" in text
    lines = {name: next(line for line in text.splitlines() if name in line) for name in ("DiLoCo", "AllR", "Downp")}
    assert "2.0 s" in lines["DiLoCo"] and lines["DiLoCo"].split()[-2:] == ["3.0", "3.0"]
    assert "8.0 s" in lines["AllR"] and lines["AllR"].split()[-2:] == ["9.0", "6.0"]
    assert "–" in lines["Downp"]
    drawn = printed(losses(rows))
    assert "training loss, 2 to 0.25, over 10.0 s" in drawn
    assert drawn.splitlines()[2].split() == ["AllReduce", bars([FAST, SLOW])[1]]


def test_a_comparison_without_losses_and_links_has_none_of_these_columns() -> None:
    rows = [row("Downpour", curve=[], bytes_out=5, bytes_link=5)]
    text = printed(comparison(rows))
    assert "time to loss" not in text and "over TCP" not in text
    assert losses(rows) is None
