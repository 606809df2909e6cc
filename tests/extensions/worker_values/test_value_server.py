"""Calls over the workers on server (0,0): complete, or ended by name; and the first buffers."""

import pytest
import torch

from topotrain.config.job import Cluster, Job
from topotrain.config.topology import Address, Role, layout
from topotrain.core.model.schema import PrivateMemory
from topotrain.core.protocol import Fail, Message, ProtocolError, decode, encode
from topotrain.core.server.server import Server
from topotrain.extensions.worker_values.value_messages import PART, AwaitedCall, PassedCall, WorkerValue
from topotrain.extensions.worker_values.value_server import ValueServer
from topotrain.launch.runtime.server_composition import make_server

PLACE = (3, 1, 0, 3)


def worker(group: int, index: int) -> Address:
    return Address(Role.WORKER, group, index)


A, B, C, D = worker(0, 0), worker(0, 1), worker(1, 0), worker(1, 1)


class Calls:
    """Server (0,0) of a job of two groups of two workers, and what it has sent last."""

    def __init__(self) -> None:
        cluster = Cluster(nworker_groups=2, nworkers_per_group=2, server_worker_separate=True)
        job = Job(cluster=cluster)
        self.server: Server = make_server(Address(Role.SERVER, 0, 0), job, layout(cluster), PrivateMemory())
        self.values = self.server.extension(ValueServer)

    def tell(self, who: Address, message: Message) -> list[tuple[Address, Message]]:
        return list(self.server.handle(who, message))

    def call(
        self, who: Address, number: int = 0, what: str = "tt.mean", job: bool = False, byte: int | None = None
    ) -> list[tuple[Address, Message]]:
        body = torch.tensor([who.group * 2 + who.index if byte is None else byte], dtype=torch.uint8)
        return self.tell(who, WorkerValue(who.group, who.index, job, number, 0, 1, what, PLACE, body=body))


def bytes_to(out: list[tuple[Address, Message]], who: Address) -> list[int]:
    return [int(message.body) for to, message in out if to == who and isinstance(message, WorkerValue)]


def failures(out: list[tuple[Address, Message]]) -> dict[Address, str]:
    return {to: message.text for to, message in out if isinstance(message, Fail)}


def test_each_worker_gets_the_values_of_all_in_the_order_of_the_workers():
    calls = Calls()
    for number in range(3):
        first, second = (A, B) if number % 2 else (B, A)
        assert calls.call(first, number) == [(second, AwaitedCall(0, False, number, PLACE))]
        out = calls.call(second, number)
        assert bytes_to(out, A) == bytes_to(out, B) == [0, 1] and not bytes_to(out, C)
    # Another group, and the job, have calls of their own. One worker of a group speaks for it.
    assert len(calls.call(D, 0, job=True)) == 3
    assert calls.call(C, 0, job=True) == []
    assert [to for to, _ in calls.call(B, 0, job=True)] == [A]
    out = calls.call(A, 0, job=True)
    assert all(bytes_to(out, who) == [0, 1, 2, 3] for who in (A, B, C, D))


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (lambda c: c.call(B, 0, "tt.sum"), "worker 0/0 called tt.mean after 3 steps, worker 0/1 called tt.sum after 3"),
        (
            lambda c: c.call(B, 0, "tt.mean(job)", job=True),
            "worker 0/0 called tt.mean after 3 steps, worker 0/1 called",
        ),
        (lambda c: c.call(B, 1), "worker 0/1 calls tt.mean as number 2, and the others are in number 1"),
        (lambda c: c.tell(B, PassedCall(False, 0, 4, False)), "worker 0/1 went on without this call"),
        (lambda c: c.tell(B, PassedCall(False, 0, 4, True)), "worker 0/1 ended its script after 4 steps"),
    ],
)
def test_a_worker_that_makes_another_call_or_none_ends_the_wait_by_name(second, said):
    calls = Calls()
    calls.call(A)
    found = failures(second(calls))
    assert {A, B} <= found.keys() and all(said in text for text in found.values()), found


def test_a_call_after_the_end_of_another_script_is_ended_too():
    calls = Calls()
    assert calls.tell(B, PassedCall(False, 0, 9, True)) == []
    assert (
        "worker 0/0 called tt.mean after 3 steps, worker 0/1 ended its script after 9 steps"
        in failures(calls.call(A))[A]
    )
    assert "worker 0/1 ended its script after 9 steps" in failures(calls.call(C, job=True))[C]
    calls = Calls()
    # A call of the other group needs no worker of a group that has left the job.
    assert not calls.values.group_over(1) and not failures(calls.call(A))
    assert bytes_to(calls.call(B), B) == [0, 1]
    assert "worker 1/0 is not in the job" in failures(calls.call(A, job=True))[A]


def test_what_a_worker_says_late_ends_no_call():
    calls = Calls()
    calls.call(A)
    calls.call(B)
    assert calls.tell(B, PassedCall(False, 0, 4, False)) == []
    calls.call(B, 1)
    assert calls.tell(B, PassedCall(False, 1, 4, False)) == []


def test_a_group_that_starts_again_makes_its_calls_again_and_none_of_the_job():
    calls = Calls()
    calls.call(A)
    calls.call(B)
    calls.call(A, 1)
    calls.server.reset_group(0, False)
    calls.call(A)
    assert bytes_to(calls.call(B), A) == [0, 1]
    calls.call(C, job=True)
    calls.server.queue.begin()
    calls.server.reset_group(0, False)
    found = failures(calls.server.queue.out)
    assert found.keys() == {A, B, C, D} and all("worker group 0 was started again" in text for text in found.values())


def test_the_first_buffers_are_the_main_workers_and_travel_only_where_they_differ():
    calls = Calls()

    def buffers(who: Address, digest: str, byte: int | None = None) -> list[tuple[Address, Message]]:
        body = None if byte is None else torch.tensor([byte], dtype=torch.uint8)
        return calls.tell(who, WorkerValue(who.group, who.index, True, -1, 0, 1, digest, (), body=body))

    assert buffers(B, "b") == []
    out = buffers(A, "a", 7)
    assert [to for to, _ in out] == [B] and bytes_to(out, B) == [7]
    ((to, same),) = buffers(C, "a")
    assert to == C and same.body is None
    assert buffers(A, "z", 9) == []  # its new process
    assert bytes_to(buffers(D, "d"), D) == [7]


def test_a_metric_that_differs_and_a_file_of_several_workers_are_said():
    calls = Calls()
    files = "\n/w/a=b.pt=1\n/w/c.pt=1"
    for who, metrics in ((A, f"loss=0.5\nsame=2{files}"), (B, "loss=0.25\nsame=2\nmine=3"), (C, f"loss=7{files}")):
        calls.tell(who, PassedCall(False, 0, 9, True, metrics))
    notice, wrote = calls.values.events()
    assert "tt.report loss is the main worker's own, 0.5, with 0.25 on worker 0/1: tt.mean" in notice.text
    assert "2 workers wrote /w/a=b.pt and 1 more, one over the other's: use tt.save" in wrote.text


def test_impossible_numbers_are_refused():
    calls = Calls()
    for wrong in (
        WorkerValue(0, 1, False, 0, 0, 1, "tt.mean", PLACE),
        WorkerValue(0, 0, False, 0, 1, 1, "tt.mean", PLACE),
        WorkerValue(0, 0, False, 0, 0, 1 << 40, "tt.mean", PLACE),
        WorkerValue(0, 0, False, 0, 0, 1, "tt.mean", (1,)),
    ):
        with pytest.raises(ProtocolError):
            calls.tell(A, wrong)
    room = calls.values.place(A, WorkerValue(0, 0, False, 0, 2, 2 * PART + 5, "tt.mean", PLACE), False)
    assert room is not None and room.numel() == 5
    assert decode(*encode(PassedCall(True, 2, 3, False))) == PassedCall(True, 2, 3, False)
