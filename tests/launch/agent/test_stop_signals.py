"""Handlers of stop signals: what is handled, and what stays as it was."""

import signal
import threading

import pytest

from topotrain.launch.agent.stop_signals import signals
from topotrain.launch.launchers.foreground_tool import StopRequested, interruptible


@pytest.mark.parametrize("handling", [signals, interruptible])
def test_a_handler_of_a_c_library_stays(monkeypatch, handling):
    before, known = signal.getsignal(signal.SIGHUP), signal.getsignal
    # As Python reports a handler that was installed before Python started.
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGHUP else known(number))
    with handling():
        assert known(signal.SIGHUP) is before
        assert known(signal.SIGTERM) is not signal.SIG_DFL
    assert known(signal.SIGTERM) is signal.SIG_DFL


def test_off_the_main_thread_a_block_is_not_interruptible_and_runs():
    ran = []

    def run():
        with interruptible():
            ran.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ran == [signal.SIG_DFL]


def test_a_terminal_that_closes_asks_once_though_it_signals_twice():
    with signals() as stop:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            signal.raise_signal(number)
    assert stop.came == [signal.SIGHUP, signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_signal_interrupts_the_main_thread():
    with pytest.raises(StopRequested), interruptible():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
