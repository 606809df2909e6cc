"""A server at its address: when it has nothing left to do, and whose fault an error is."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from in_process_job import FailureObserver, job_of

from topotrain.config.job import OnFailure
from topotrain.config.topology import Address, Role, layout
from topotrain.core.events import Failed
from topotrain.core.profiling.spans import SILENT
from topotrain.core.protocol import Drained, FinalValue, Message, ProtocolError
from topotrain.core.transport_contract import ConnectionLost
from topotrain.extensions.replication.replica_host import PrimaryEndpoint
from topotrain.launch.runtime import process_host
from topotrain.launch.runtime.entry_points import ServerObserver
from topotrain.launch.runtime.process_host import HostOptions, ServerEndpoint

HERE, THERE, WORKER = Address(Role.SERVER, 1, 0), Address(Role.SERVER, 0, 0), Address(Role.WORKER, 1, 0)


class Ending:
    """A server that is done with the first message, and then sends its final values; its own messages are refused."""

    def __init__(self, sender: Any) -> None:
        self.me, self.done, self.spans = HERE, False, SILENT
        self.timer = SimpleNamespace(attach=lambda timer: None)
        self._sender = sender

    def handle(self, sender: Address, message: Message) -> None:
        if sender == self.me:
            raise ProtocolError("there is no such snapshot")
        self.done = True
        self._sender.send(THERE, FinalValue(0))


class Factory:
    def make(self, me: Address, sender: Any) -> Ending:
        return Ending(sender)


def endpoint(router: Any, options: HostOptions) -> ServerEndpoint:
    return ServerEndpoint(HERE, Factory(), router, threading.Event(), options)  # type: ignore[arg-type]


def test_a_server_is_not_done_while_it_sends_its_last_messages():
    """A process whose servers are done closes its connections."""

    class Router:
        def send(self, me: Address, to: Address, message: Message) -> None:
            main = threading.Thread(target=lambda: seen.append(self.resident.done))
            main.start()
            main.join(0.2)  # it waits until everything is sent; a wrong one answers at once
            assert not seen
            waiting.append(main)

    seen: list[bool] = []
    waiting: list[threading.Thread] = []
    router = Router()
    router.resident = resident = endpoint(router, HostOptions())
    assert not resident.done
    resident.handle(THERE, Drained())
    for each in waiting:
        each.join()
    assert waiting and seen == [True]


def test_a_final_value_that_is_lost_by_the_own_end_is_an_error():
    def closed(*_: object) -> None:
        raise ConnectionLost("closed on this side")

    trouble: list[int] = []
    resident = endpoint(SimpleNamespace(send=closed), HostOptions(FailureObserver(lambda: trouble.append(1))))
    resident.handle(THERE, Drained())
    assert not trouble  # the other one is gone, which the supervisor sees
    resident.over = True
    with pytest.raises(ConnectionLost):
        resident.handle(THERE, Drained())
    assert trouble


def test_a_refused_message_of_the_snapshot_writer_is_no_fault_of_a_peer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_host, "snapshots_of", lambda server: None)
    trouble: list[int] = []
    written = SimpleNamespace(messages=lambda: [Drained()])
    writer: Any = SimpleNamespace(attach=lambda *_: written)
    router = SimpleNamespace(send=lambda *_: None)
    resident = endpoint(router, HostOptions(FailureObserver(lambda: trouble.append(1)), writer=writer))
    # A ProtocolError would end the connection of the peer, and nothing else.
    with pytest.raises(RuntimeError, match="snapshot writer was refused: there is no such snapshot"):
        resident.handle(THERE, Drained())
    assert trouble


@pytest.mark.parametrize(
    ("peer", "apart", "reported"), [(THERE, False, True), (WORKER, False, False), (WORKER, True, True)]
)
def test_a_lost_server_is_reported_wherever_it_runs(peer: Address, apart: bool, reported: bool):
    events: list[Any] = []
    control: Any = SimpleNamespace(emit=events.append)
    job = replace(job_of("one", nworker_groups=2, nserver_groups=2), on_failure=OnFailure.kStop)
    place: Any = SimpleNamespace(job=job, topology=layout(job.cluster))
    observer = ServerObserver(control, HERE, SimpleNamespace(), place, apart)  # type: ignore[arg-type]
    server: Any = SimpleNamespace(me=HERE, running=True, groups=[1], has_finished=lambda worker: False)
    observer.on_lost(server, peer, "reset")
    assert events == [Failed("server 1/0", "peer", f"lost {peer}: reset", "")] * reported
    server.running = False
    server.has_finished = lambda worker: True
    observer.on_lost(server, peer, "reset")
    assert len(events) == reported


def test_a_server_with_two_copies_is_not_done_while_a_message_is_handled():
    """Another thread may be adding the channel of a worker."""
    server: Any = Ending(None)
    primary: Any = SimpleNamespace(me=HERE, copy=SimpleNamespace(server=server), attach=lambda it: None, clear=True)
    resident = PrimaryEndpoint(primary, SimpleNamespace(router=None), SimpleNamespace())  # type: ignore[arg-type]
    server.done, seen = True, []
    main = threading.Thread(target=lambda: seen.append(resident.done))
    with resident._lock:
        main.start()
        main.join(0.2)
        assert not seen
    main.join()
    assert seen == [True]
