"""What a unit says while it waits for others: lines, or one line in place, with the seconds."""

import pytest

from tests.tools.monitor.test_longest_wait import Clock
from topotrain.launch.multinode import node_rendezvous
from topotrain.launch.multinode.node_rendezvous import QUIET_S, REPEAT_S, RendezvousNotice
from topotrain.tools.monitor import rendezvous_line


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (node_rendezvous, rendezvous_line):
        monkeypatch.setattr(module.time, "monotonic", made)
    return made


def test_lines_come_now_and_then(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    notice = rendezvous_line.rendezvous_line(0, 2)  # in place only on a terminal
    assert type(notice) is RendezvousNotice
    for _ in range(int(QUIET_S + REPEAT_S) + 1):
        notice("unit 1")
        clock.now += 1
    notice.end()
    assert capsys.readouterr().err.splitlines() == [
        f"topotrain: unit 0 of 2 waits at the rendezvous for unit 1, {seconds:.0f} s"
        for seconds in (QUIET_S, QUIET_S + REPEAT_S)
    ]


def test_on_a_terminal_one_line_counts_the_seconds_and_goes(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    notice = rendezvous_line.LiveRendezvousNotice(0, 3)
    notice("units 1, 2")
    assert capsys.readouterr().err == ""
    clock.now += 12
    notice("units 1, 2")
    clock.now += 1
    notice("unit 2")
    notice.end()
    notice.end()
    *shown, last = capsys.readouterr().err.split("\r\x1b[2K")
    assert shown == [
        "",
        "topotrain: unit 0 of 3 waits at the rendezvous for units 1, 2, 12 s",
        "topotrain: unit 0 of 3 waits at the rendezvous for unit 2, 13 s",
    ]
    assert last == ""
