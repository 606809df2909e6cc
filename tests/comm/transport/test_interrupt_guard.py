"""Ctrl-C while a script sends: what it says afterwards still arrives."""

import signal
import sys
from collections.abc import Iterator

import pytest
from transport_pairs import Pair, TransportGroup

from topotrain.comm.transport import interrupt_guard
from topotrain.comm.transport.frame_writer import FrameWriter
from topotrain.comm.transport.interrupt_guard import between_frames
from topotrain.core.protocol import Drained, Fetch


@pytest.fixture
def pair() -> Iterator[Pair]:
    transports = TransportGroup("tcp")
    yield Pair(transports)
    transports.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(signal, "default_int_handler", signal.getsignal(signal.SIGINT))
    restore = between_frames()
    assert signal.getsignal(signal.SIGINT) is interrupt_guard._interrupt
    yield
    restore()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupted_inside(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Raise SIGINT once, inside of a method of the outbox."""
    usual = getattr(FrameWriter, name)

    def method(self: FrameWriter, *args: object) -> object:
        monkeypatch.setattr(FrameWriter, name, usual)
        signal.raise_signal(signal.SIGINT)
        return usual(self, *args)

    monkeypatch.setattr(FrameWriter, name, method)


def until_interrupted(pair: Pair) -> int:
    """How many frames were sent."""
    count = 0
    try:
        for _ in range(sys.maxsize):
            pair.to_server(Fetch(round=count))
            count += 1
    except KeyboardInterrupt:
        return count
    raise AssertionError("nobody interrupted")


def test_a_frame_is_finished_first(pair: Pair, patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_inside(monkeypatch, "put")
    sent = until_interrupted(pair)
    pair.to_server(Drained())
    got = [pair.server.next()]
    while got[-1] != Drained():
        got.append(pair.server.next())
    assert len(got) in (sent + 1, sent + 2)  # interrupted after it was sent, before it was counted
    assert got[:-1] == [Fetch(round=n) for n in range(len(got) - 1)]


def test_outside_of_a_frame_it_comes_at_once(patient: None) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_handler_of_the_script_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = signal.getsignal(signal.SIGINT)
    try:
        heard: list[int] = []
        signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
        between_frames()()
        signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, usual)
