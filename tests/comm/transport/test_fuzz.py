"""Whatever comes in: what is no true word ends its connection with a reason, and nothing else happens.

TOPOTRAIN_FUZZ_FRAMES says how many frames (1,000 if it says nothing, 20,000 in `make soak`), TOPOTRAIN_FUZZ_SEED which.
"""

import gc
import resource
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
from random_frames import COUNT, SEED, FrameGenerator, share
from reports import FunctionSender
from simulation import ScriptedCluster, ScriptedWorker, job

from topotrain.comm.request_reply import RequestChannel
from topotrain.comm.store.key_validation import StoreError, check_key, check_prefix
from topotrain.comm.store.memory_store import MemoryTable
from topotrain.comm.store.tcp_store_protocol import Op, StoreRequest, receive_request, send_request
from topotrain.comm.store.tcp_store_server import _answer
from topotrain.comm.transport import ConnectionLost
from topotrain.comm.transport.connection import copied
from topotrain.compat.tensorflow.session.session_protocol import SessionClosed, SessionConnection
from topotrain.config import job_file
from topotrain.config.field_checks import ConfigError
from topotrain.config.job import Agreement, Algorithm, Grads
from topotrain.config.sharding import Parameter
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.client.client import Client
from topotrain.core.model.schema import FlatBuffers, PrivateMemory
from topotrain.core.protocol import ProtocolError
from topotrain.core.server.server import Server
from topotrain.extensions.resume.worker_state_client import WorkerStateClient
from topotrain.extensions.resume.worker_state_store import EPOCH
from topotrain.extensions.tables.table_messages import (
    TableAssign,
    TableBarrier,
    TableList,
    TableOpen,
    TablePull,
    TablePush,
    TablesFinished,
    TableStatsRequest,
    TableStep,
)
from topotrain.extensions.tables.table_spec import TableSpec, pack_ids
from topotrain.launch.runtime.server_composition import make_server
from topotrain.launch.runtime.worker_composition import client_extensions
from topotrain.training.data.data_client import DataClient


@pytest.fixture(scope="module", autouse=True)
def memory_stays() -> Iterator[None]:
    """What garbage leaves behind is little, however much of it came."""
    conversation()  # torch imports its compiler with the first optimizer: 90 MiB that are nobody's garbage
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"seed {SEED}, {COUNT} frames: the most memory there was has grown by {grown:.1f} MiB")
    assert grown < 32, f"seed {SEED}: {grown:.1f} MiB"


# --- messages on servers and workers, as decoded --------------------------------------------------------------------


@dataclass
class Sent:
    """One message of a real conversation."""

    sender: Address
    to: Address
    message: m.Message


@dataclass
class Conversation:
    """All messages of a job, and how to make its endpoints anew."""

    cluster: ScriptedCluster
    sent: list[Sent] = field(default_factory=list)
    shared: bool = False

    def servers(self) -> dict[Address, Server]:
        return {
            me: make_server(me, self.cluster.job, self.cluster.topology, PrivateMemory())
            for me in self.cluster.sim_servers
        }


SMALLEST = (Parameter("a", (70,), (1,), "float32", True), Parameter("b", (5,), (1,), "float64", True))


def conversation(**more: Any) -> Conversation:
    cluster = ScriptedCluster(job(**more), schema=SMALLEST)
    found = Conversation(cluster)
    cluster.transport.observers.append(lambda sender, to, message: found.sent.append(Sent(sender, to, message)))
    cluster.play(everything)
    return found


def everything(worker: ScriptedWorker) -> None:
    """All that a worker does, with as many kinds of messages as it can send."""
    client, me = worker.client, worker.me
    first = me.group == 0 and me.index == 0
    worker.visible = worker.visible and worker.cluster.job.grads is Grads.kVisible
    worker.open()
    _, start, _ = client.extension(DataClient).lease(0, 0, 8, 5, 0, False)
    if first:
        client.extension(DataClient).put_draw(0, 0, ((2, 2), (0, 1, 2, 3), True))
    else:
        client.extension(DataClient).get_draw(0, 0)
    state = torch.arange(99, dtype=torch.uint8)
    client.extension(WorkerStateClient).save(EPOCH, state)
    client.extension(WorkerStateClient).load(0)
    tables(worker)
    for number in range(3):
        stream = 0x8000_0000 | me.group
        worker.step(worker.numbers(), marks=(stream, number, number), **handed_in(worker))
    client.extension(DataClient).applied(1)
    client.channel.exit_loop(worker.steps, 1)
    for part in client.optimizer_state.get():
        bucket = worker.cluster.map.buckets[part.bucket]
        client.optimizer_state.put(bucket, part.piece, part.key, part.number if part.body is None else part.body)
    client.extension(DataClient).free(0, 0, start)
    worker.step(worker.numbers(), **handed_in(worker))
    worker.finish()
    if first:
        client.values.fetch_final()
        client.buffers.final()


def handed_in(worker: ScriptedWorker) -> dict[str, Any]:
    """In a collective each worker hands in the gradient of its server's shard."""
    if not worker.client.model.sends_own_shard:
        return {}
    for bucket in worker.cluster.map.buckets_of(worker.me.index):
        worker.client.gradients.edit(worker.steps, bucket, worker.flats.view("local", bucket))
    return {"edited": (1 << sum(len(bucket.pieces) for bucket in worker.cluster.map.buckets)) - 1}


def tables(worker: ScriptedWorker) -> None:
    """Messages about a table that no peer waits for."""
    spec = TableSpec("t", 50, 3, mode="async")
    rows = torch.ones(4 * 3)
    for server in worker.client.channel.servers:
        ids = torch.arange(4).numpy() * len(worker.client.channel.servers) + server.index
        for number, word in enumerate(
            [
                TableOpen(0, 0, spec.to_text()),
                TablePush(1, 0, 1, True, pack_ids(ids), body=rows),
                TablePull(2, 0, 1, 0, pack_ids(ids)),
                TableAssign(3, 0, pack_ids(ids), body=rows),
                TableStatsRequest(4, 0, 1),
                TableStep(5, 0),
                TableList(6, 0, 1, 0),
                TableBarrier(7, 1),
                TablesFinished(8),
            ]
        ):
            assert word.number == number
            worker.client.channel.send(server, word)


def come(resident: Server | Client, sender: Address, message: m.Message, viewable: bool) -> Any:
    """As a transport hands it over."""
    body = message.body
    if body is not None:
        view = body.detach().view(-1).view(torch.uint8)
        target = resident.place(sender, message, viewable)
        if target is None and not viewable:
            raise ProtocolError("no place")
        if target is not None:
            copied(target, message, view)
        message = type(message)(**_fields(message), body=view if target is None else target)
    return resident.handle(sender, message)


def _fields(message: m.Message) -> dict[str, Any]:
    return {f.name: getattr(message, f.name) for f in fields(message) if f.name != "body"}


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"workers": 2, "shards": 2},
    "hidden": {"workers": 2, "grads": Grads.kHidden},
    "bounded": {"groups": 2, "max_staleness": 1},
    "groups": {"groups": 2, "nserver_groups": 2},
    "ring of groups": {"groups": 2, "nserver_groups": 2, "agreement": Agreement.kRingAverage},
    "elastic groups": {"groups": 2, "nserver_groups": 2, "agreement": Agreement.kElastic},
    "gossip of groups": {"groups": 2, "nserver_groups": 2, "agreement": Agreement.kGossip},
    "ring": {"workers": 2, "shards": 2, "algorithm": Algorithm.kRing, "server_worker_separate": False},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_servers_take_nothing_but_valid_messages(layout: str) -> None:
    talk, rng = conversation(**LAYOUTS[layout]), FrameGenerator(SEED + len(layout))
    truth = [sent for sent in talk.sent if sent.to.role is Role.SERVER]
    senders = sorted({sent.sender for sent in talk.sent} | set(talk.cluster.workers))
    words = [sent.message for sent in talk.sent]
    left, ends = share(0.5 / len(LAYOUTS)), Counter[str]()
    while left > 0:
        servers = talk.servers()
        hostile = rng.random.choice((None, *talk.cluster.workers))  # None: everybody
        stays = rng.random.choice((0.2, 1.0, 3.0))
        for sent in truth[: rng.random.randrange(len(truth)) + 1 if rng.random.random() < 0.3 else None]:
            for _ in range(rng.random.randrange(int(2 * stays) + 1)):
                sender = rng.someone(senders) if hostile is None else hostile
                to = rng.random.choice(sorted(servers)) if rng.random.random() < 0.3 else sent.to
                left -= 1
                if sender == to:  # the handshake refuses who says that it is us
                    continue
                deliver(servers, sender, to, rng.spoil(sent.message, words), rng.random.random() < 0.3, ends)
            if not hostile or rng.random.random() < 0.95:
                deliver(servers, sent.sender, sent.to, sent.message, False, ends)
    print(dict(ends))
    assert ends["refused"] and ends["taken"]


def deliver(
    servers: dict[Address, Server], sender: Address, to: Address, message: m.Message, viewable: bool, ends: Counter[str]
) -> None:
    try:
        come(servers[to], sender, message, viewable)
        ends["taken"] += 1
    except ProtocolError:
        ends["refused"] += 1
    except Exception as error:
        pytest.fail(f"seed {SEED}: {message!r:.600} from {sender} to {to}: {error!r}", pytrace=True)


class Idle:
    """A waiter for whom nobody waits."""

    def update(self) -> Any:
        return threading.Lock()

    def wait(self, ready: Callable[[], bool]) -> None:
        raise AssertionError


def test_workers_take_nothing_but_valid_messages() -> None:
    rng, ends = FrameGenerator(SEED + 1), Counter[str]()
    talks = [conversation(**LAYOUTS[name]) for name in ("one", "bounded", "ring")]
    left = share(0.15)
    while left > 0:
        talk = rng.random.choice(talks)
        me = rng.random.choice(talk.cluster.workers)
        client = opened(talk, me, rng)
        truth = [sent for sent in talk.sent if sent.to == me]
        words = [sent.message for sent in talk.sent]
        senders = sorted({sent.sender for sent in talk.sent})
        for sent in truth:
            awaited(client, sent.message)
            for _ in range(rng.random.randrange(3)):
                left -= 1
                word = rng.spoil(sent.message, words)
                deliver({me: client}, rng.someone(senders), me, word, False, ends)  # type: ignore[dict-item]
            deliver({me: client}, sent.sender, me, sent.message, False, ends)  # type: ignore[dict-item]
    assert ends["refused"] and ends["taken"]


def opened(talk: Conversation, me: Address, rng: FrameGenerator) -> Client:
    topology = talk.cluster.topology
    sender = FunctionSender(lambda to, message: None)
    client = Client(me, topology, sender, Idle(), extensions=client_extensions(topology))
    if rng.random.random() < 0.9:
        client.open(talk.cluster.schema, talk.cluster.map, FlatBuffers(talk.cluster.map, None, PrivateMemory()))
    return client


def awaited(client: Client, message: m.Message) -> None:
    """What makes the client take this answer."""
    if isinstance(message, m.Values) and client.model.is_open:  # before that nobody asks for any
        client.values._round = message.round
    if isinstance(message, m.ReducedGradient | m.BackwardReduced):
        client.gradients._backward = (message.step, message.ordinal)
    if isinstance(message, m.StatePart):
        state = client.optimizer_state
        state._rounds, state._parts = message.round, {server: {} for server in client.channel.servers}


# --- bytes as messages -----------------------------------------------------------------------------------------------


def filled(raw: bytes) -> tuple[socket.socket, socket.socket]:
    """A connected pair; at the second end these bytes, and then the end of the stream, can be read."""
    a, b = socket.socketpair()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    a.sendall(raw)
    a.shutdown(socket.SHUT_WR)
    return a, b


# --- requests --------------------------------------------------------------------------------------------------------


def heard(speak: Callable[[socket.socket], None]) -> bytes:
    """What somebody who speaks into a socket sends."""
    a, b = socket.socketpair()
    with a, b:
        speak(a)
        return b.recv(1 << 16)


def test_requests_to_a_store_are_answered_or_hung_up_on() -> None:
    rng, table = FrameGenerator(SEED + 5), MemoryTable()
    asked = []
    for op in Op:
        request = StoreRequest(op, "some/key", b"value", b"known" if op % 2 else None, 5, 0.1)
        asked.append(heard(lambda sock, request=request: send_request(RequestChannel(sock), request)))
    for _ in range(share(0.05)):
        a, b = filled(rng.spoiled(rng.random.choice(asked), asked))
        with a, b:
            try:
                request = receive_request(RequestChannel(b), 5)
                if request is not None and request.op is not Op.WATCH:
                    (check_prefix if request.op is Op.KEYS else check_key)(request.key)
                    _answer(table, request)
            except (ConnectionLost, StoreError, ValueError):
                continue


def connected(sock: socket.socket) -> SessionConnection:
    return SessionConnection(RequestChannel(sock))


def test_a_session_receives_messages_or_its_end() -> None:
    rng, asked = FrameGenerator(SEED + 6), []
    for words in ({"do": "open", "n": [1, 2, {"x": None}]}, {"do": "run", "feeds": "x" * 50}):
        tensors = [torch.arange(6.0).view(2, 3), torch.ones(3, dtype=torch.int8)]
        asked.append(heard(lambda sock, words=words, tensors=tensors: connected(sock).send(words, tensors)))
    for _ in range(share(0.03)):
        a, b = filled(rng.spoiled(rng.random.choice(asked), asked))
        with a, b:
            try:
                words, tensors = connected(b).receive(5)
                assert isinstance(words, dict) and all(tensor.numel() < 1 << 16 for tensor in tensors)
            except SessionClosed:
                continue


# --- files -----------------------------------------------------------------------------------------------------------


JOB = """
name: "x" epochs: 3 updater { type: kSGD learning_rate { type: kFixed base_lr: 0.1 } momentum: 0.9 }
cluster { nworker_groups: 2 nserver_groups: 1 nworkers_per_group: 2 workspace: "w" }
"""


@pytest.mark.filterwarnings("ignore:.*invalid escape sequence")  # Python's own codec, of a text in the job
def test_a_damaged_job_is_a_job_or_refused_by_name() -> None:
    rng = FrameGenerator(SEED + 9)
    raw = JOB.encode()
    for _ in range(share(0.03)):
        text = rng.spoiled(raw, [raw, b"{}" * 9, b"cluster {" * 40]).decode("latin-1")
        try:
            job_file.loads(text)
        except ConfigError:
            continue
