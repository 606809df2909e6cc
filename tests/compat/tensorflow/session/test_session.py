"""A client drives a cluster: what it writes down of a model, what tasks take of that, and how sessions begin and end.

The clusters here are real ones on threads of this process: every task has its listener, and the transports are TCP.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
import torch
from free_ports import free_ports
from torch import Tensor, nn
from torch.nn import functional as f

import topotrain as tt
from topotrain.comm.request_reply import RequestChannel
from topotrain.comm.security.handshake import HandshakeAborted
from topotrain.comm.transport import Refused
from topotrain.comm.transport.frame import BODY, Header
from topotrain.compat.tensorflow.session import session_protocol, session_server
from topotrain.compat.tensorflow.session.session_protocol import SessionClosed, SessionConnection, call
from topotrain.compat.tensorflow.session.session_server import SessionServer
from topotrain.compat.tensorflow.session.session_task import TaskAddress
from topotrain.config.job import ConfigError
from topotrain.core.client.client import JobError
from topotrain.core.message_limits import MAX_BODY
from topotrain.parallel.program.worker_program import replaced
from topotrain.parallel.remote.allowed_functions import FUNCTIONS, name_of
from topotrain.parallel.remote.argument_codec import CallInput, NodeOutput, read_json
from topotrain.parallel.remote.graph_description import GraphDescription, StateDescription, states_from
from topotrain.parallel.remote.graph_recorder import record
from topotrain.parallel.remote.graph_replayer import OutputCollector, WorkerModel, program
from topotrain.parallel.remote.state_numbers import ModelState, TaskCluster

TOKEN = "ab" * 32
ROOM = 1 << 30
ONE, TWO = "/job:worker/task:0", "/job:worker/task:1"


# --- models ------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with tt.device("/job:ps/task:0"):
            self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with tt.device(TWO):
            hidden = torch.tanh(self.a(x))
        return f.cross_entropy(self.b(hidden), y)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with tt.device(ONE):
            self.body = nn.Sequential(
                nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()
            )
        with tt.device(TWO):
            self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return f.cross_entropy(self.head(self.body(x.view(-1, 1, 2, 3).repeat(1, 1, 3, 2)[:, :, :5, :5])), y)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(9, 8), nn.Embedding(6, 8)
        with tt.device(TWO):
            self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        ids = (x.abs() * 3).long().clamp(max=8)
        first, *_ = self.block(self.word(ids) + self.place(torch.arange(ids.shape[1]))).unbind(1)
        return f.cross_entropy(self.head(first), y)


MODELS = (Mlp, Cnn, Transformer)


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(7)
    return [(torch.randn(n, 6, generator=rng), torch.randint(3, (n,), generator=rng)) for n in sizes]


def made(kind: type[nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = kind()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def written(model: nn.Module, *args: Any, workers: int = 2) -> tuple[GraphDescription, tuple[StateDescription, ...]]:
    kept = ModelState.of(model, TaskCluster(workers, 1))
    return record(kept, args, {}, loss=True), kept.states()


# --- what is written down ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_a_description_survives_its_way(kind):
    described, states = written(made(kind)[0], *batches(4)[0])
    assert {node.worker for node in described.nodes} == ({1} if kind is Mlp else {0, 1})
    text = json.dumps([described.to_data(), [state.to_data() for state in states]])
    came, held = read_json(text.encode())
    again = states_from(held, 2, 1)
    assert again == states
    assert GraphDescription.from_data(came, 2, len(again)) == described


def test_the_list_of_functions_is_what_torch_calls_them():
    assert all(callable(function) for function in FUNCTIONS.values())
    assert all(name_of(function) in FUNCTIONS for function in FUNCTIONS.values())
    for name in (
        "torch.load",
        "torch.empty",
        "torch.as_strided",
        "torch.randn",
        "torch.Tensor.set_",
        "torch.Tensor.apply_",
    ):
        assert name not in FUNCTIONS


class Does(nn.Module):
    def __init__(self, does: Callable[["Does", Tensor], Any]) -> None:
        super().__init__()
        self.a, self.does, self.plain = nn.Linear(6, 6), does, torch.ones(6)

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)


def writes_what_travels(model: Does, x: Tensor) -> Tensor:
    hidden = model.a(x)
    part = hidden[0]
    part.add_(1)
    with tt.device(TWO):
        return hidden.sum()


def nowhere(model: Does, x: Tensor) -> Tensor:
    with tt.device("/job:worker/task:5"):
        return model.a(x).sum()


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (lambda m, x: m.a(x).sum() if x.sum() > 0 else m.a(x).mean(), "decides or counts by a tensor's values"),
        (lambda m, x: m.a(x).sum() * x.max().item(), "decides or counts by a tensor's values"),
        (lambda m, x: m.a(x + torch.randn(6)).sum(), "calls torch.randn, which a session does not run"),
        (lambda m, x: m.a(x.mul_(2)).sum(), "torch.Tensor.mul_ writes in place to an argument"),
        (writes_what_travels, "torch.Tensor.add_ writes in place to an argument, or to a value"),
        (nowhere, "no such device; there are /job:worker/task:0 to task:1"),
        (lambda m, x: m.a(x), "must return the loss"),
        (lambda m, x: m.a(x).sum().detach(), "must return the loss"),
        (lambda m, x: m.a(x[:, :2]).sum(), "cannot be captured: RuntimeError"),
    ],
)
def test_what_cannot_be_written_down_is_refused_with_its_line(does, words):
    with pytest.raises(ConfigError, match=r"test_session\.py:\d+") as refused:
        written(Does(does), torch.ones(2, 6))
    assert words in str(refused.value)


def test_a_constant_of_the_forward_comes_along():
    described, states = written(Does(lambda m, x: (m.a(x) * m.plain * torch.tensor(2.0)).sum()), torch.ones(2, 6))
    assert states[-1].graded is None and states[-1].form.sizes == (6,)
    assert program(described, states, 2, 0, None, ROOM).steps


# --- hostile words -----------------------------------------------------------------------------------------------


def sane() -> dict[str, Any]:
    return {
        "inputs": [["float32", [2, 6]]],
        "nodes": [["torch.Tensor.sum", 0, [{"input": 0}], {}, True, "here.py:1"]],
        "output": {"value": [0, []]},
    }


def node(**changed: Any) -> dict[str, Any]:
    fields = dict(zip(("function", "worker", "args", "kwargs", "graded", "line"), sane()["nodes"][0], strict=True))
    return {**sane(), "nodes": [list({**fields, **changed}.values())]}


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (node(function="os.system"), "os.system"),
        (node(function="torch.Tensor.__reduce_ex__"), "not a function that a session may call"),
        (node(worker=2), "must be 0 to 1"),
        (node(worker=True), "must be 0 to 1"),
        (node(args=[{"value": [0, []]}]), "a node before"),
        (node(args=[{"input": 1}]), "must be one of 1"),
        (node(args=[{"stated": 0}]), "must be one of 0"),
        (node(args=[{"pickle": "gASV"}]), "not a kind of argument"),
        (node(args=[{"dtype": "__class__"}]), "must be one of"),
        (node(args=[{"memory_format": "__class__"}]), "must be one of"),
        ({**sane(), "inputs": [["object", [1]]]}, "dtype"),
        (node(args=[1 << 70]), "must be a plain value"),
        (node(args=["x" * 5000]), "must be a plain value"),
        (node(args=deep(40)), "nested at most"),
        (node(line=1), "must have a line"),
        ({**sane(), "inputs": [["float32", [1 << 39, 1 << 39]]]}, "elements"),
        ({**sane(), "inputs": [["float32", [-1]]]}, "whole numbers"),
        ({**sane(), "more": 1}, "must have inputs, nodes and output"),
        ([], "must have inputs, nodes and output"),
    ],
)
def test_hostile_descriptions_are_refused(data, words):
    GraphDescription.from_data(sane(), 2, 0)
    with pytest.raises(ConfigError) as refused:
        GraphDescription.from_data(read_json(json.dumps(data).encode()), 2, 0)
    assert words in str(refused.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b"\xff", b"[NaN]", b"[Infinity]"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ConfigError):
        read_json(text)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("torch.zeros", [{"tuple": [1 << 20, 1 << 20]}]),
        ("torch.Tensor.repeat", [{"input": 0}, 1 << 20, 1 << 10]),
        ("torch.eye", [1 << 20]),
        ("torch.Tensor.matmul", [{"input": 0}, {"input": 0}]),
        ("torch.Tensor.sum", ["dim"]),
    ],
)
def test_what_is_too_large_or_no_call_is_refused_before_it_is_computed(function, args):
    described = GraphDescription.from_data(node(function=function, args=args), 2, 0)
    with pytest.raises(ConfigError, match=r"here\.py:1"):
        program(described, (), 2, 0, OutputCollector(), ROOM)


@pytest.mark.parametrize(
    "data", [[["float32", [2]], 2, True, -1], [["float32", [2]], 0, 1, -1], [["float32", [2]], 0, True, 1]]
)
def test_hostile_states_are_refused(data):
    with pytest.raises(ConfigError):
        states_from([data], 2, 1)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, SessionConnection]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, SessionConnection(RequestChannel(other))


def frame(payload: bytes, kind: int = 1, number: int = 1, size: int | None = None, meta: bytes = b"") -> bytes:
    size = len(payload) if size is None else size
    return Header(BODY if size else 0, kind, len(meta), size, 0, number).pack() + meta + payload


LIES = frame(b'{"words":{},"tensors":[["float32",[1000000]]]}')
HUGE = frame(b'{"words":{},"tensors":[["float32",[4294967296]],["float32",[17179869184]]]}')


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 3,
        frame(b"{}", size=MAX_BODY + 1),
        frame(b"{}"),
        frame(b'{"words":{},"tensors":[]}', meta=b"x"),
        frame(b'{"words":1,"tensors":[]}'),
        frame(b'{"words":{},"tensors":[1]}'),
        LIES + frame(bytes(4), kind=2, number=2),
        LIES + frame(bytes(4_000_000), kind=1, number=2),
        LIES + frame(bytes(4_000_000), kind=2, number=3),
        LIES + frame(b"", kind=2, number=2, size=4_000_000),  # and then nothing comes
        HUGE,
    ],
)
def test_hostile_frames_end_the_connection(raw):
    with pair() as (sock, talk), ThreadPoolExecutor(1) as pool:
        sending = pool.submit(suppressing, sock, raw)
        with pytest.raises(SessionClosed):
            talk.receive()
        talk.close()  # a frame that was refused may not have been read to its end
        sending.result()


def suppressing(sock: socket.socket, raw: bytes) -> None:
    with suppress(OSError):
        sock.sendall(raw)
        sock.shutdown(socket.SHUT_WR)


def test_frames_carry_messages_and_tensors():
    tensors = [torch.randn(3, 2).t(), torch.tensor(True), torch.empty(0, 4, dtype=torch.int64), torch.arange(5).half()]
    with pair() as (sock, talk):
        SessionConnection(RequestChannel(sock)).send({"do": "run"}, tensors)
        words, came = talk.receive()
    assert words == {"do": "run"}
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, came, strict=True))


# --- the optimizer -----------------------------------------------------------------------------------------------


def test_a_model_is_held_in_parts():
    states = states_from(
        [[["float32", [2, 3]], 0, True, 0], [["float32", [2]], 1, False, -1], [["int64", []], 1, None, -1]], 2, 1
    )
    held = WorkerModel(states, {0: torch.ones(2, 3)})
    assert [p.is_meta for p in held.parameters()] == [False, True]
    assert [share.owners for whole in held.divided(states, 2).parameters for share in whole.shares] == [(0,), (1,)]


# --- sessions ----------------------------------------------------------------------------------------------------


class SessionCluster:
    """One ps task and some workers, on threads."""

    def __init__(self, workers: int = 2) -> None:
        ps, *others = (f"127.0.0.1:{port}" for port in free_ports(1 + workers))
        self.cluster = {"ps": [ps], "worker": others}
        tasks = [TaskAddress(job, k, at) for job, addresses in self.cluster.items() for k, at in enumerate(addresses)]
        self.residents = [SessionServer(self.cluster, task, bytes.fromhex(TOKEN)) for task in tasks]
        self.threads = [threading.Thread(target=resident.stay, daemon=True) for resident in self.residents]
        for thread in self.threads:
            thread.start()

    def target(self, worker: int = 0) -> str:
        return f"tcp://{self.cluster['worker'][worker]}"

    def close(self) -> None:
        for resident in self.residents:
            resident.close()
        for thread in self.threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in self.threads)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SessionCluster]:
    opened = SessionCluster()
    yield opened
    opened.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("session")]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPOTRAIN_TOKEN", TOKEN)


def trained(target: str, kind: type[nn.Module], sizes: Sequence[int]) -> tuple[list[float], Tensor, dict[str, Tensor]]:
    """Losses of the steps, one evaluation, and the values at the end."""
    model, optimizer = made(kind)
    train_op = tt.train.minimize(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    with tt.Session(target) as session:
        for x, y in batches(*sizes):
            losses.append(float(session.run(train_op, x, y)))
            scheduler.step()
        model.eval()
        evaluated = session.run(model, x, feed_dict={"y": y})
    return losses, evaluated, model.state_dict()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("worker", [0, 1])
def test_a_session_equals_one_process(cluster, kind, worker):
    sizes = (6, 6, 4, 6)
    expected, found = (trained(target, kind, sizes) for target in ("", cluster.target(worker)))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert float(found[1]) == pytest.approx(float(expected[1]), rel=1e-6) and not found[1].requires_grad
    for name, value in expected[2].items():
        torch.testing.assert_close(found[2][name], value, rtol=1e-6, atol=1e-7)


def test_a_cluster_of_one_worker_and_the_answer_of_a_nest():
    cluster = SessionCluster(workers=1)
    try:
        model = Does(lambda m, x: {"sum": m.a(x).sum(), "parts": (x.chunk(2), 3, None)})
        with tt.Session(cluster.target()) as session:
            found = session.run(model, torch.ones(4, 6))
        torch.testing.assert_close(found["sum"], model(torch.ones(4, 6))["sum"].detach())
        (first, second), number, nothing = found["parts"]
        assert first.shape == second.shape == (2, 6) and (number, nothing) == (3, None)
    finally:
        cluster.close()


def test_values_come_home_when_they_are_pulled(cluster):
    model, optimizer = made(Mlp)
    before = model.b.weight.detach().clone()
    with tt.Session(cluster.target().replace("tcp://", "grpc://")) as session:  # TensorFlow's own scheme
        loss = session.run(tt.train.minimize(model, optimizer), *batches(6)[0])
        assert torch.equal(model.b.weight, before)
        session.pull()
        assert not torch.equal(model.b.weight, before) and model.b.weight.requires_grad
    assert loss.dim() == 0 and not loss.requires_grad


def test_an_error_in_a_step_names_the_worker_and_the_line_and_frees_the_cluster(cluster):
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with tt.device(TWO):
                self.table = nn.Embedding(4, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).sum()

    model = Lookup()
    session = tt.Session(cluster.target())
    with pytest.raises(JobError, match=r"/job:worker/task:1: IndexError: .*test_session.py:\d+"):
        session.run(tt.train.minimize(model, torch.optim.SGD(model.parameters(), lr=0.1)), torch.tensor([9]))
    with pytest.raises(ConfigError, match="is closed"):
        session.run(model, torch.tensor([1]))
    trained(cluster.target(1), Mlp, (4,))


def test_a_description_that_is_refused_leaves_the_session_alive(cluster):
    """One that no task takes, and one that is too large."""
    model = Does(lambda m, x: {"sum": m.a(x).sum(), "text": "x" * (MAX_BODY if len(x) > 4 else 1)})
    with tt.Session(cluster.target()) as session:
        session.run(model, torch.ones(4, 6))
        with pytest.raises(ConfigError, match=r"os\.system"):
            session._ask({"do": "learn", "number": 99, "description": node(function="os.system"), "loss": False})
        with pytest.raises(ConfigError, match="a description may have"):
            session.run(model, torch.ones(5, 6))
        assert session.run(model, torch.ones(4, 6))["text"] == "x"


def test_a_second_client_is_refused_and_one_that_vanishes_frees_the_cluster(cluster, monkeypatch):
    monkeypatch.setattr(session_server, "GRACE_S", 0.1)
    model, optimizer = made(Mlp)
    session = tt.Session(cluster.target())
    session.run(tt.train.minimize(model, optimizer), *batches(6)[0])
    with pytest.raises(ConfigError, match="belongs to the session of another client"):
        tt.Session(cluster.target())
    session._connection.close()  # as the system does it for a process that was killed
    monkeypatch.setattr(session_server, "GRACE_S", 30.0)
    trained(cluster.target(), Mlp, (4,))


def test_who_is_not_let_in_reads_why(cluster, monkeypatch):
    host, port = cluster.cluster["ps"][0].split(":")
    with pytest.raises(ConfigError, match="a session talks to a worker, tcp://127"):
        tt.Session(f"tcp://{host}:{port}")
    for target, words in (("http://a:1", "must be a worker's"), ("tcp://127.0.0.1:1", "cannot be reached")):
        with pytest.raises(ConfigError, match=words):
            tt.Session(target)
    monkeypatch.setenv("TOPOTRAIN_TOKEN", "cd" * 32)
    with pytest.raises(ConfigError, match="has another token"):
        tt.Session(cluster.target())


def test_a_client_that_a_crowd_has_pushed_out_tries_again(cluster, monkeypatch):
    refusals, connect = iter([HandshakeAborted("pushed out"), Refused("FULL", "")]), session_protocol.connect

    def crowded(*words):
        for error in refusals:
            raise error
        return connect(*words)

    monkeypatch.setattr(session_protocol, "connect", crowded)
    trained(cluster.target(), Mlp, (4,))
    assert next(refusals, None) is None


def test_a_stranger_that_has_the_token_and_sends_nonsense_disturbs_no_session(cluster):
    host, port = cluster.cluster["worker"][0].split(":")
    for words in ({}, {"do": 3}, {"do": "begin"}, {"do": "join", "then": {}}, {"do": "join", "then": {"meet": 1}}):
        talk = call(host, int(port), bytes.fromhex(TOKEN))
        talk.send(words)
        if "then" in words:
            talk.send(words["then"])
        assert "error" in talk.receive()[0]
        talk.close()
    trained(cluster.target(), Mlp, (4,))


def test_what_a_session_takes(cluster):
    """A model of any dtype and its optimizer, before their first step; and only these."""
    (batch,), other = batches(4), Mlp()
    model, optimizer = made(Mlp)
    model.double()
    with tt.Session(cluster.target()) as session:
        train_op = tt.train.minimize(model, optimizer)
        assert session.run(train_op, batch[0].double(), batch[1]).dtype is torch.float64
        with pytest.raises(ConfigError, match="one for each session"):
            session.run(other, *batch)
        with pytest.raises(ConfigError, match="has one optimizer"):
            session.run(tt.train.minimize(model, torch.optim.SGD(model.parameters(), lr=1.0)), *batch)
        with pytest.raises(ConfigError, match="must be a model"):
            session.run("loss")
    model, optimizer = made(Mlp)
    optimizer.state[model.b.weight] = {"a": 1}
    with tt.Session(cluster.target()) as session, pytest.raises(ConfigError, match="has taken steps already"):
        session.run(tt.train.minimize(model, optimizer), *batch)
    with pytest.raises(ConfigError, match="minimize"):
        tt.train.minimize(model, "sgd")


def test_what_a_server_is_told_of_sessions():
    with pytest.raises(ConfigError, match="session = 1: must be True or False"):
        tt.train.Server({"ps": ["a:1"], "worker": ["a:2"]}, "ps", 0, session=1)
    with pytest.raises(ConfigError, match="an address of its own for every task"):
        tt.train.Server({"ps": ["a:1"], "worker": ["a:2", "a:2"]}, "ps", 0, session=True)


# ---- memory of a task ------------------------------------------------------------------------------------------------


def described(*nodes: tuple[str, list[object], dict[str, object]], output: int) -> GraphDescription:
    data = [[name, 0, args, kwargs, False, "model.py:1"] for name, args, kwargs in nodes]
    return GraphDescription.from_data(
        {"inputs": [["int64", [2]]], "nodes": data, "output": {"value": [output, []]}}, 1, 0
    )


def replayed(description: GraphDescription, *inputs: torch.Tensor, most: int = 1 << 20) -> None:
    """Run a description as a task does: on fake tensors, and then for real."""
    program(description, (), 1, 0, OutputCollector(), most)
    values: list[Any] = []
    known = {CallInput: lambda ref: inputs[ref.number], NodeOutput: lambda ref: values[ref.node]}
    for node in description.nodes:
        args, kwargs = replaced([list(node.args), dict(node.kwargs)], lambda ref: known[type(ref)](ref), tuple(known))
        values.append(FUNCTIONS[node.function](*args, **kwargs))


@pytest.mark.parametrize(
    ("counts", "size"), [([3, -1], 2), ([10_000_000, -9_999_990], 10), ([1, 1], 3), ([1 << 62, 1 << 62], 10)]
)
@pytest.mark.parametrize("home", ["torch", "torch.Tensor"])
def test_counts_of_repeats_must_be_those_of_the_output(home: str, counts: list[int], size: int) -> None:
    repeat = described(
        ("torch.zeros", [[2]], {}),
        (f"{home}.repeat_interleave", [{"value": [0, []]}, {"input": 0}], {"output_size": size}),
        output=1,
    )
    with pytest.raises(ValueError, match="repeats must be at least 0, and their sum must be the size of the output"):
        replayed(repeat, torch.tensor(counts))
    assert torch.equal(
        FUNCTIONS[f"{home}.repeat_interleave"](torch.arange(2), torch.tensor([2, 0])), torch.tensor([0, 0])
    )


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "bias": False, "batch_first": True}])
def test_recurrent_functions_read_no_memory_beyond_their_weights(
    kind: type[nn.RNNBase], options: dict[str, Any]
) -> None:
    layer = kind(3, 5, **options)
    call = FUNCTIONS[f"torch.{layer.mode.lower()}"]
    x, state = torch.randn(4, 2, 3), torch.zeros(layer.num_layers * (2 if layer.bidirectional else 1), 2, 5)
    if layer.batch_first:
        x = x.transpose(0, 1)
    states = (state, state) if kind is nn.LSTM else state
    rest = (layer.bias, layer.num_layers, 0.0, False, layer.bidirectional, layer.batch_first)
    weights = list(layer._flat_weights)
    assert torch.equal(call(x, states, weights, *rest)[0], layer(x)[0])
    small, short = torch.zeros(1, 1), torch.zeros(1, 2, 5)
    for wrong in ([small, *weights[1:]], [*weights[:-1], small], weights[:-1], []):
        with pytest.raises(ValueError, match="do not fit together"):
            call(x, states, wrong, *rest)
    if layer.num_layers > 1:
        with pytest.raises(ValueError, match="do not fit together"):
            call(x, (short, short) if kind is nn.LSTM else short, weights, *rest)
    with pytest.raises(ValueError, match=r"packed|do not fit"):
        call(x, torch.tensor([1]), states, weights, *rest[:-1])


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_a_projection_has_weights_of_its_own() -> None:
    layer = nn.LSTM(3, 5, proj_size=2)
    states = torch.zeros(1, 2, 2), torch.zeros(1, 2, 5)
    found = FUNCTIONS["torch.lstm"](
        torch.ones(4, 2, 3), states, list(layer._flat_weights), *(True, 1, 0.0, False, False, False)
    )
    assert torch.equal(found[0], layer(torch.ones(4, 2, 3))[0])


def test_all_values_of_a_description_together_are_bounded() -> None:
    views = [("torch.Tensor.view", [{"value": [0, []]}, 1024], {})] * 8  # which have no memory of their own
    replayed(described(("torch.zeros", [[1024]], {}), *views, output=8), torch.zeros(2), most=4096)
    with pytest.raises(ConfigError, match=r"the values of this call have 12,288, more than the limit .* 8,192"):
        replayed(described(*[("torch.zeros", [[1024]], {})] * 3, output=2), torch.zeros(2), most=8192)


def test_a_peer_without_a_session_takes_no_memory(cluster: Any) -> None:
    host, port = cluster.cluster["worker"][0].split(":")
    for words, tensors in (({"do": "nothing", "x": "x" * 5000}, []), ({"do": "open"}, [torch.zeros(1 << 20)])):
        talk = call(host, int(port), bytes.fromhex(TOKEN))
        with suppress(SessionClosed):
            talk.send(words, tensors)
        with pytest.raises(SessionClosed):
            talk.receive()
        talk.close()


def test_a_text_of_very_many_items_is_neither_sent_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (SessionConnection(RequestChannel(sock)) for sock in socket.socketpair())
    with closing(ours), closing(theirs):
        with pytest.raises(ConfigError, match="numbers and names"):
            ours.send({"x": [[]] * (1 << 20)})
        monkeypatch.setattr(session_protocol, "_MAX_ITEMS", 1 << 30)
        sending = threading.Thread(target=lambda: ours.send({"x": [[]] * (1 << 20)}))
        sending.start()
        text = bytes(theirs._frame(1, 20).payload)
        sending.join()
        assert session_protocol._items(text) > 1 << 20
