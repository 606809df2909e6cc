"""Whatever comes in: what is no true word ends its connection with a reason, and nothing else happens.

TOPOTRAIN_FUZZ_FRAMES says how many frames (20,000 if it says nothing), TOPOTRAIN_FUZZ_SEED which.
"""

import gc
import json
import resource
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_frames import COUNT, SEED, Dice, share
from reports import FunctionSender
from simulation import Seat, Town, job
from snapshot_files import Vault
from transport_pairs import SERVER, WORKER, Recorder, identity, place_new

from topotrain.comm.request_reply import RequestChannel
from topotrain.comm.security.handshake import NotOurProtocol, answer
from topotrain.comm.store.key_validation import StoreError, check_key, check_prefix
from topotrain.comm.store.memory_store import MemoryTable
from topotrain.comm.store.tcp_store_protocol import Op, StoreRequest, receive_request, send_request
from topotrain.comm.store.tcp_store_server import _answer
from topotrain.comm.transport import ConnectionLost, Refused
from topotrain.comm.transport.connection import Connection, checked
from topotrain.comm.transport.frame import BODY, Header
from topotrain.compat.tensorflow.session.session_protocol import SessionClosed, SessionConnection
from topotrain.config import job_file
from topotrain.config.field_checks import ConfigError
from topotrain.config.job import Agreement, Algorithm, Grads
from topotrain.config.sharding import Parameter
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.client.client import Client
from topotrain.core.model.schema import FlatBuffers, PrivateMemory
from topotrain.core.protocol import ProtocolError, decode, encode
from topotrain.core.server.server import Server
from topotrain.extensions.checkpointing.checkpoint_reader import FOLDER, MANIFEST, Manifest, hashed
from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotFiles
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

MIB = 1 << 20


class Everything:
    """Holds every address."""

    def __contains__(self, address: object) -> bool:
        return True


@pytest.fixture(scope="module")
def imported() -> None:
    """torch imports its compiler with the first optimizer: 90 MiB that are nobody's garbage."""
    conversation()


@pytest.fixture(autouse=True)
def memory_stays(imported: None) -> Iterator[None]:
    """What garbage leaves behind is little, however much of it came."""
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"seed {SEED}, {COUNT} frames: the most memory there was has grown by {grown:.1f} MiB")
    assert grown < 32, f"seed {SEED}: {grown:.1f} MiB"


# --- messages on servers and workers, as decoded --------------------------------------------------------------------


@dataclass
class Said:
    """One message of a real conversation."""

    sender: Address
    to: Address
    message: m.Message


@dataclass
class Conversation:
    """All that was said in a job, and how to have its residents anew."""

    cluster: Town
    said: list[Said] = field(default_factory=list)
    shared: bool = False

    def servers(self) -> dict[Address, Server]:
        return {
            me: make_server(me, self.cluster.job, self.cluster.topology, PrivateMemory())
            for me in self.cluster.sim_servers
        }


SMALLEST = (Parameter("a", (70,), (1,), "float32", True), Parameter("b", (5,), (1,), "float64", True))


def conversation(**more: Any) -> Conversation:
    town = Town(job(**more), schema=SMALLEST)
    found = Conversation(town)
    town.transport.observers.append(lambda sender, to, message: found.said.append(Said(sender, to, message)))
    town.play(everything)
    return found


def everything(seat: Seat) -> None:
    """A worker's life with as many kinds of messages as it can have."""
    door, me = seat.client, seat.me
    first = me.group == 0 and me.index == 0
    seat.visible = seat.visible and seat.cluster.job.grads is Grads.kVisible
    seat.open()
    _, start, _ = door.extension(DataClient).lease(0, 0, 8, 5, 0, False)
    if first:
        door.extension(DataClient).put_draw(0, 0, True, (2, 2), (0, 1, 2, 3))
    else:
        door.extension(DataClient).get_draw(0, 0)
    state = torch.arange(99, dtype=torch.uint8)
    door.extension(WorkerStateClient).save(EPOCH, state)
    door.extension(WorkerStateClient).load()
    tables(seat)
    for number in range(3):
        stream = 0x8000_0000 | me.group
        seat.step(seat.numbers(), marks=(stream, number, number), **handed_in(seat))
    door.extension(DataClient).applied(1)
    door.channel.exit_loop(seat.steps, 1)
    for part in door.optimizer_state.get():
        bucket = seat.cluster.map.buckets[part.bucket]
        door.optimizer_state.put(bucket, part.piece, part.key, part.number if part.body is None else part.body)
    door.extension(DataClient).free(0, 0, start)
    seat.step(seat.numbers(), **handed_in(seat))
    seat.finish()
    if first:
        door.values.fetch_final()
        door.buffers.final()


def handed_in(seat: Seat) -> dict[str, Any]:
    """In a collective each worker hands in the gradient of its server's shard."""
    if not seat.client.model.sends_own_shard:
        return {}
    for bucket in seat.cluster.map.buckets_of(seat.me.index):
        seat.client.gradients.edit(seat.steps, bucket, seat.flats.view("local", bucket))
    return {"edited": (1 << sum(len(bucket.pieces) for bucket in seat.cluster.map.buckets)) - 1}


def tables(seat: Seat) -> None:
    """Words about a table that nobody waits for."""
    spec = TableSpec("t", 50, 3, mode="async")
    rows = torch.ones(4 * 3)
    for server in seat.client.channel.servers:
        ids = torch.arange(4).numpy() * len(seat.client.channel.servers) + server.index
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
            seat.client.channel.send(server, word)


def come(resident: Server | Client, sender: Address, message: m.Message, viewable: bool) -> Any:
    """As a transport hands it over."""
    body = message.body
    if body is not None:
        view = body.detach().view(-1).view(torch.uint8)
        target = resident.place(sender, message, viewable)
        if target is None and not viewable:
            raise ProtocolError("no place")
        if target is not None:
            checked(target, message, view.numel()).view(torch.uint8).copy_(view)
        message = type(message)(**_fields(message), body=view if target is None else target)
    return resident.handle(sender, message)


def _fields(message: m.Message) -> dict[str, Any]:
    return {f.name: getattr(message, f.name) for f in fields(message) if f.name != "body"}


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"workers": 2, "shards": 2},
    "alone": {},
    "hidden": {"workers": 2, "grads": Grads.kHidden},
    "bounded": {"groups": 2, "max_staleness": 1},
    "groups": {"groups": 2, "nserver_groups": 2},
    "ring of groups": {"groups": 2, "nserver_groups": 2, "agreement": Agreement.kRingAverage},
    "ring": {"workers": 2, "shards": 2, "algorithm": Algorithm.kRing, "server_worker_separate": False},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_servers_take_nothing_but_true_words(layout: str) -> None:
    talk, dice = conversation(**LAYOUTS[layout]), Dice(SEED + len(layout))
    truth = [said for said in talk.said if said.to.role is Role.SERVER]
    people = sorted({said.sender for said in talk.said} | set(talk.cluster.workers))
    words = [said.message for said in talk.said]
    left, ends = share(0.5 / len(LAYOUTS)), Counter[str]()
    while left > 0:
        servers = talk.servers()
        hostile = dice.random.choice((None, *talk.cluster.workers))  # None: everybody
        stays = dice.random.choice((0.2, 1.0, 3.0))
        for said in truth[: dice.random.randrange(len(truth)) + 1 if dice.random.random() < 0.3 else None]:
            for _ in range(dice.random.randrange(int(2 * stays) + 1)):
                sender = dice.someone(people) if hostile is None else hostile
                to = dice.random.choice(sorted(servers)) if dice.random.random() < 0.3 else said.to
                left -= 1
                if sender == to:  # the handshake refuses who says that it is us
                    continue
                deliver(servers, sender, to, dice.spoil(said.message, words), dice.random.random() < 0.3, ends)
            if not hostile or dice.random.random() < 0.95:
                deliver(servers, said.sender, said.to, said.message, False, ends)
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


def test_workers_take_nothing_but_true_words() -> None:
    dice, ends = Dice(SEED + 1), Counter[str]()
    talks = [conversation(**LAYOUTS[name]) for name in ("one", "bounded", "ring")]
    left = share(0.15)
    while left > 0:
        talk = dice.random.choice(talks)
        me = dice.random.choice(talk.cluster.workers)
        door = opened(talk, me, dice)
        truth = [said for said in talk.said if said.to == me]
        words = [said.message for said in talk.said]
        people = sorted({said.sender for said in talk.said})
        for said in truth:
            awaited(door, said.message)
            for _ in range(dice.random.randrange(3)):
                left -= 1
                word = dice.spoil(said.message, words)
                deliver({me: door}, dice.someone(people), me, word, False, ends)  # type: ignore[dict-item]
            deliver({me: door}, said.sender, me, said.message, False, ends)  # type: ignore[dict-item]
    assert ends["refused"] and ends["taken"]


def opened(talk: Conversation, me: Address, dice: Dice) -> Client:
    topology = talk.cluster.topology
    sender = FunctionSender(lambda to, message: None)
    door = Client(me, topology, sender, Idle(), extensions=client_extensions(topology))
    if dice.random.random() < 0.9:
        door.open(talk.cluster.schema, talk.cluster.map, FlatBuffers(talk.cluster.map, None, PrivateMemory()))
    return door


def awaited(door: Client, message: m.Message) -> None:
    """What makes the door listen to this answer."""
    if isinstance(message, m.Values) and door.model.is_open:  # before that nobody asks for any
        door.values._round = message.round
    if isinstance(message, m.ReducedGradient | m.BackwardReduced):
        door.gradients._backward = (message.step, message.ordinal)
    if isinstance(message, m.StatePart):
        state = door.optimizer_state
        state._rounds, state._parts = message.round, {server: {} for server in door.channel.servers}


# --- bytes as messages, and on a connection --------------------------------------------------------------------------


def recorded() -> list[m.Message]:
    found = conversation(workers=2)
    return [said.message for said in found.said]


def test_bytes_are_a_message_or_a_protocol_error() -> None:
    dice, words = Dice(SEED + 2), recorded()
    metas = [encode(word) for word in words]
    others = [meta for _, meta in metas]
    for _ in range(share(0.15)):
        kind, meta = dice.random.choice(metas)
        kind = dice.random.choice((kind, kind, kind, dice.random.randrange(128)))
        try:
            message = decode(kind, dice.spoiled(meta, others))
        except ProtocolError:
            continue
        assert kind == message.KIND


@given(st.integers(0, 130), st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_protocol_error(kind: int, raw: bytes) -> None:
    try:
        message = decode(kind, raw)
    except ProtocolError:
        return
    said = encode(message)
    assert said == (kind, raw) or encode(decode(*said)) == said  # what is true may be any byte but 0


def frames(words: Sequence[m.Message]) -> list[bytes]:
    made = []
    for number, word in enumerate(words):
        kind, meta = encode(word)
        tail = b"" if word.body is None else word.body.numpy().tobytes()
        made.append(Header(BODY if tail else 0, kind, len(meta), len(tail), 0, number + 1).pack() + meta + tail)
    return made


def filled(raw: bytes) -> tuple[socket.socket, socket.socket]:
    """A connected pair; at the second end these bytes, and then the end of the stream, can be read."""
    a, b = socket.socketpair()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    a.sendall(raw)
    a.shutdown(socket.SHUT_WR)
    return a, b


def test_a_stream_of_frames_ends_with_a_reason_and_no_more() -> None:
    dice = Dice(SEED + 3)
    words = [m.Init(10, body=torch.ones(10)), m.Fetch(1), m.Push(0, 0, 7, 1.0, b"\1", body=torch.ones(7)), m.Finish(3)]
    true, left = frames(words), share(0.05)
    while left > 0:
        stream = [dice.spoiled(frame, true) if dice.random.random() < 0.4 else frame for frame in true]
        if dice.random.random() < 0.3:
            dice.random.shuffle(stream)
        left -= len(stream)
        a, b = filled(b"".join(stream))
        # Of this test's schema a bucket's number is its size: as little as nobody else has.
        resident = Recorder(lambda word, view: place_new(word, view) if 0 <= getattr(word, "bucket", -1) < 99 else None)
        connection = Connection(b, SERVER, WORKER, resident, 0)
        connection.run()
        assert "internal" not in connection.reason, (SEED, connection.reason)
        a.close()


# --- before anybody is believed --------------------------------------------------------------------------------------


class Copied:
    """A socket that keeps what is sent."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.sent = sock, [b""]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendall(self, raw: bytes, flags: int = 0) -> None:
        self.sent.append(raw)
        self._sock.sendall(raw)


def one_side() -> bytes:
    """What a dialer says in a handshake that goes well."""
    from topotrain.comm.security.handshake import dial

    a, b = socket.socketpair()

    def hear() -> None:
        _, welcome = answer(b, identity(), Everything(), 5)
        b.sendall(welcome)

    thread = threading.Thread(target=hear)
    thread.start()
    copied = Copied(a)
    dial(copied, identity(), WORKER, SERVER, 5)
    thread.join()
    a.close()
    b.close()
    return b"".join(copied.sent)


def test_nobody_comes_in_by_a_damaged_handshake() -> None:
    dice, said = Dice(SEED + 4), one_side()
    others = [said, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)), said[7:]]
    for _ in range(share(0.1)):
        a, b = filled(dice.spoiled(said, others)[:4000] if dice.random.random() < 0.9 else said)
        with a, b, pytest.raises((Refused, NotOurProtocol)):
            answer(b, identity(), Everything(), 5)


def heard(speak: Callable[[socket.socket], None]) -> bytes:
    """What somebody who speaks into a socket sends."""
    a, b = socket.socketpair()
    with a, b:
        speak(a)
        return b.recv(1 << 16)


def test_requests_to_a_store_are_answered_or_hung_up_on() -> None:
    dice, table = Dice(SEED + 5), MemoryTable()
    asked = []
    for op in Op:
        request = StoreRequest(op, "some/key", b"value", b"known" if op % 2 else None, 5, 0.1)
        asked.append(heard(lambda sock, request=request: send_request(RequestChannel(sock), request)))
    for _ in range(share(0.05)):
        a, b = filled(dice.spoiled(dice.random.choice(asked), asked))
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


def test_what_a_session_hears_is_words_or_its_end() -> None:
    dice, asked = Dice(SEED + 6), []
    for words in ({"do": "open", "n": [1, 2, {"x": None}]}, {"do": "run", "feeds": "x" * 50}):
        tensors = [torch.arange(6.0).view(2, 3), torch.ones(3, dtype=torch.int8)]
        asked.append(heard(lambda sock, words=words, tensors=tensors: connected(sock).send(words, tensors)))
    for _ in range(share(0.03)):
        a, b = filled(dice.spoiled(dice.random.choice(asked), asked))
        with a, b:
            try:
                words, tensors = connected(b).receive(5)
                assert isinstance(words, dict) and all(tensor.numel() < 1 << 16 for tensor in tensors)
            except SessionClosed:
                continue


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_forged_manifest_is_read_or_refused_by_name(tmp_path: Path) -> None:
    dice = Dice(SEED + 7)
    path = Vault(torch.optim.Adam).train(1).write(SnapshotFiles(tmp_path / FOLDER), 1)
    true = json.loads((path / MANIFEST).read_text())
    for _ in range(share(0.02)):
        data = json.loads(json.dumps(true))
        del data["sha256"]
        forge(data, dice)
        (path / MANIFEST).write_text(json.dumps({**data, "sha256": hashed(data)}))
        try:
            found = Manifest.open(path)
            found.verify()
        except ConfigError:
            continue
        assert found.path == path
    shutil.rmtree(path)


def forge(data: Any, dice: Dice) -> None:
    """Change something somewhere in nested lists and dictionaries."""
    at: Any = data
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return
        key = dice.random.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and dice.random.random() < 0.8:
            at = at[key]
            continue
        match dice.random.randrange(5):
            case 0:
                del at[key]
            case 1:
                at[key] = dice.number()
            case 2:
                at[key] = dice.random.choice((None, True, 1e999, "x", [], {}, [[]], dice.text()))
            case 3 if isinstance(at[key], str):
                raw = dice.spoiled(at[key].encode(), [b"[]"])
                at[key] = raw.decode("latin-1")
            case _:
                at[key] = [at[key], at[key]]
        return


def test_a_damaged_safetensors_header_is_refused_by_name(tmp_path: Path) -> None:
    dice = Dice(SEED + 8)
    path = Vault(torch.optim.Adam).train(1).write(SnapshotFiles(tmp_path / FOLDER), 1)
    file = path / "model.safetensors"
    true = file.read_bytes()
    for _ in range(share(0.02)):
        file.write_bytes(dice.spoiled(true[:400], [true[8:200]]) + true[400:])
        try:
            Manifest.open(path).verify()
        except ConfigError:
            continue
        assert file.read_bytes() == true


JOB = """
name: "x" epochs: 3 updater { type: kSGD learning_rate { type: kFixed base_lr: 0.1 } momentum: 0.9 }
cluster { nworker_groups: 2 nserver_groups: 1 nworkers_per_group: 2 workspace: "w" }
"""


@pytest.mark.filterwarnings("ignore:.*invalid escape sequence")  # Python's own codec, of a text in the job
def test_a_damaged_job_is_a_job_or_refused_by_name() -> None:
    dice = Dice(SEED + 9)
    raw = JOB.encode()
    for _ in range(share(0.03)):
        text = dice.spoiled(raw, [raw, b"{}" * 9, b"cluster {" * 40]).decode("latin-1")
        try:
            job_file.loads(text)
        except ConfigError:
            continue


def test_the_bounds_of_this_file_can_fail() -> None:
    """A resident that breaks is found: the fuzz would tell."""

    class Broken:
        def place(self, *_: Any) -> None:
            return None

        def handle(self, *_: Any) -> None:
            raise KeyError(3)

    with pytest.raises(pytest.fail.Exception, match=r"seed .* KeyError\(3\)"):
        deliver({SERVER: Broken()}, WORKER, SERVER, m.Fetch(1), False, Counter())  # type: ignore[dict-item]
