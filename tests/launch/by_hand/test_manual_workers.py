"""Entry points without a launcher: which peers are accepted and waited for, what is refused, where parameters are."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from free_ports import free_port
from in_process_job import Reference, Result, reference, run_local
from torch import nn

import topotrain as tt
from topotrain.comm.store import StoreError, open_store
from topotrain.comm.transport import Refused, TransportError
from topotrain.compat.paddle.flags import Flags, from_environment, from_values, parse
from topotrain.compat.paddle.init import terms_of
from topotrain.compat.tensorflow import train_api
from topotrain.config.job import Cluster, ConfigError, Job, Slicing
from topotrain.config.sharding import Parameter, SchemaError, cut, describe
from topotrain.config.sharding import parse as parse_schema
from topotrain.config.topology import Address, Role
from topotrain.core.client.client import JobError
from topotrain.launch.by_hand.manual_server import by_hand, place_of, serve, understandable
from topotrain.launch.by_hand.manual_worker import ColocatedServers, SharedSettings, StaticStore, join
from topotrain.launch.runtime.worker_connections import WorkerConnections
from topotrain.tools.plan.layout_plan import PlannedSchema, plan
from topotrain.training import context as process
from topotrain.training.parameters.flat_parameters import describe_model

SECRET = bytes(range(32))
JOB = Job(name="by hand", cluster=Cluster(nworkers_per_group=2, server_worker_separate=True))
FIRST, SECOND, SERVER = Address(Role.WORKER, 0, 0), Address(Role.WORKER, 0, 1), Address(Role.SERVER, 0, 0)


class Serving:
    """A server on a thread, and what it ended with."""

    def __init__(self, store: StaticStore, terms: SharedSettings) -> None:
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(store, terms), daemon=True)
        self.thread.start()

    def _run(self, store: StaticStore, terms: SharedSettings) -> None:
        try:
            serve(JOB, [SERVER], store, SECRET, terms=terms)
        except BaseException as error:
            self.error = error

    def ended(self) -> str:
        self.thread.join(30)
        assert not self.thread.is_alive()
        return str(self.error)


def call(
    store: StaticStore, me: Address = FIRST, secret: bytes = SECRET, terms: SharedSettings | None = None
) -> WorkerConnections:
    return WorkerConnections(
        place_of(by_hand(JOB), store, secret, terms or SharedSettings("2 trainers"), "127.0.0.1"), me
    )


@contextmanager
def served(**terms: object) -> Iterator[tuple[StaticStore, Serving]]:
    store = StaticStore([f"127.0.0.1:{free_port()}"])
    serving = Serving(store, SharedSettings(**{"words": "2 trainers", **terms}))
    yield store, serving
    serving.ended()


# --- who is let in -----------------------------------------------------------------------------------------------


def test_a_process_with_other_settings_is_refused_with_a_reason():
    with served(compare="num_of_gradient_servers") as (store, _):
        right = call(store)
        with pytest.raises(Refused, match=r"worker 0/1 has 3 trainers .*, server 0/0 has 2 trainers") as refused:
            call(store, SECOND, terms=SharedSettings("3 trainers"))
        assert refused.value.code == "CONFIG"
        with pytest.raises(Refused, match="could not prove"):
            call(store, SECOND, bytes(32))
        with pytest.raises(Refused, match="worker 0/0 is here already: two processes claim") as refused:
            call(store)
        assert refused.value.code == "TWICE"
        said = str(understandable(refused.value, terms_of(Flags(num_of_gradient_servers=2))))
        assert "trainer_id of its own, from 0 to" in said and "trainer_id = 0 and num_of_gradient_servers = 2" in said
        task = tt.train.Server(GOOD, job_name="ps", task_index=0)
        assert "task_index of its own" in str(understandable(refused.value, task._terms))
        right.exchange.give_up("that is all")
        right.close(finished=False)


def test_a_worker_that_gives_up_ends_the_job_with_its_message():
    with served(name=lambda address: f"trainer {address.index}") as (store, serving):
        first, second = call(store), call(store, SECOND)
        second.exchange.give_up("ValueError: boom")
        assert serving.ended() == "trainer 1 failed: ValueError: boom"
        second.close(finished=False)
        first.close(finished=False)


def test_a_cause_outranks_what_follows_from_it():
    """Worker 0 hears what follows from worker 1's end, and gives up first."""
    with served(name=lambda address: f"trainer {address.index}") as (store, serving):
        first, second = call(store), call(store, SECOND)
        first.exchange.give_up("it was left alone", cause=False)
        second.exchange.give_up("it was stopped")
        assert (
            first.exchange.channel.await_cause(lambda: False) == serving.ended() == "trainer 1 failed: it was stopped"
        )
        second.close(finished=False)
        first.close(finished=False)


def test_who_does_not_come_in_time_is_named():
    with served(patience_s=0.2) as (_, serving):
        assert serving.ended() == "worker 0/0, worker 0/1 did not come within 0.2 s"
        assert isinstance(serving.error, JobError) and serving.error.config


def test_a_server_that_does_not_come_in_time_is_named():
    before = threading.enumerate()
    with pytest.raises(TransportError, match=r"server 0/0 was not there within 0.2 s: cannot reach"):
        call(StaticStore([f"127.0.0.1:{free_port()}"]), terms=SharedSettings(patience_s=0.2))
    assert [thread for thread in threading.enumerate() if thread not in before] == []


def test_a_port_that_is_taken_is_an_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=f"port {port} of 127.0.0.1 cannot be used"):
            serve(JOB, [SERVER], StaticStore([f"127.0.0.1:{port}"]), SECRET)
    assert torch.tensor([1e-40]).mul(1.0).item() != 0  # the process is the user's again: tiny numbers are kept


def test_nobody_listens_on_every_interface(tmp_path):
    everywhere = "host = '0.0.0.0': stands for every interface; must be the address of one"
    store = StaticStore([f"127.0.0.1:{free_port()}"])
    for servers in (StaticStore(["0.0.0.0:7164"]), open_store(tmp_path.as_uri())):
        with pytest.raises(TransportError, match=everywhere):
            serve(JOB, [SERVER], servers, SECRET, host="0.0.0.0")
    with pytest.raises(TransportError, match=everywhere):
        WorkerConnections(place_of(by_hand(JOB), store, SECRET, SharedSettings(), "0.0.0.0"), FIRST)


def test_places_that_do_not_exist_are_refused():
    store = StaticStore([f"127.0.0.1:{free_port()}"])
    with pytest.raises(ConfigError, match="worker = \\(0, 2\\)"):
        join(JOB, Address(Role.WORKER, 0, 2), store, SECRET)
    with pytest.raises(ConfigError, match="server = \\(0, 1\\)"):
        serve(JOB, [Address(Role.SERVER, 0, 1)], store, SECRET)
    with pytest.raises(ConfigError, match="store's URL"):
        join(JOB, FIRST, object(), SECRET, beside=ColocatedServers([SERVER]))
    assert process.current() is None


# --- the list of addresses ---------------------------------------------------------------------------------------


def test_a_list_of_addresses_knows_servers_and_nothing_else():
    store = StaticStore(["127.0.0.1:7", "localhost:8", "[::1]:9", "10.0.0.1:10"], shards=2)
    expected = ["tcp://127.0.0.1:7", "tcp://127.0.0.1:8", "tcp://[::1]:9", "tls://10.0.0.1:10"]
    keys = ["server/0/0", "listening/0/1", "server/1/0", "listening/1/1"]
    assert [store.get(key) for key in keys] == [url.encode() for url in expected]
    assert store.watch("server/0/0", 0) == b"tcp://127.0.0.1:7"
    store.set("server/0/0", b"tcp://127.0.0.1:7")
    for wrong in (
        lambda: store.get("server/2/0"),
        lambda: store.get("job"),
        lambda: store.set("server/0/0", b"tcp://127.0.0.1:8"),
        lambda: store.watch("server/0/0", 0, b"tcp://127.0.0.1:7"),
        lambda: store.compare_and_set("server/0/0", None, b""),
        lambda: store.delete("server/0/0"),
        lambda: store.keys(),
        lambda: StaticStore(["127.0.0.1:7"] * 3, shards=2),
        lambda: StaticStore([]),
        *(lambda bad=bad: StaticStore([bad]) for bad in ("host", "host:", ":7", "host:0", "host:70000", "::1:7")),
    ):
        with pytest.raises(StoreError):
            wrong()


# --- Paddle's flags ----------------------------------------------------------------------------------------------


def test_flags_are_read_as_gflags_reads_them():
    words = "--use_gpu --port 7000 -ports_num=2 --noasync_sgd --num_gradient_servers=3 --pservers=a,b --comment x"
    flags = parse(words.split())
    assert (flags.use_gpu, flags.port, flags.ports_num, flags.async_sgd) == (True, 7000, 2, False)
    assert (flags.num_of_gradient_servers, flags.hosts, flags.comment) == (3, ["a", "b"], "x")
    assert parse(["--use_gpu", "False", "--is_local=0"]) == parse(["--nouse_gpu", "--", "--is_local", "no"])
    assert from_values({"use_gpu": True, "port": 7000, "pservers": "a"}) == Flags(True, 7000, pservers="a")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prt=3"], "did you mean port?"),
        (["--xyzzy=3"], "flags are use_gpu"),
        (["--port"], "--port: needs a value"),
        (["port=3"], "must be a flag such as"),
        (["--port=x"], "must be a whole number"),
        (["--port=65535", "--ports_num=2"], "must be 1 to 65534"),
        (["--use_gpu=maybe"], "must be True or False"),
        (["--port=1", "--port=2"], "is given twice"),
        (["--num_of_gradient_servers=2", "--trainer_id=2"], "must be 0 to 1, with 2 trainers"),
        (["--trainer_count=4"], "start one trainer per device"),
        (["--pservers=a,a"], "different hosts"),
        (["--pservers=a:1,b:1"], "hosts alone"),
        (["--rdma_tcp=rdma"], "must be tcp"),
        (["--saving_period=1"], "there is no such flag"),
    ],
)
def test_wrong_flags_are_refused(words, said):
    with pytest.raises(ConfigError) as refused:
        parse(words)
    assert said in str(refused.value)


def test_flags_say_which_process_is_where():
    flags = Flags(num_of_gradient_servers=3, pservers="127.0.0.1,127.0.0.2", ports_num=2, port=100, host="127.0.0.2")
    assert flags.store().addresses == ("127.0.0.1:100", "127.0.0.1:101", "127.0.0.2:100", "127.0.0.2:101")
    assert [server.index for server in flags.servers_here()] == [2, 3]
    names = [flags.name(Address(Role.SERVER, 0, 3)), flags.name(SECOND), flags.name(Address(Role.WORKER, 2, 0))]
    assert names == ["pserver 127.0.0.2:101", "trainer 1", "trainer 2"]
    assert flags.job().cluster.nworkers_per_group == 3
    both = Flags(num_of_gradient_servers=3, async_sgd=True)
    assert both.job().cluster.nworker_groups == 3
    assert len({terms_of(f).words for f in (flags, both, Flags(num_of_gradient_servers=3))}) == 3
    with pytest.raises(ConfigError, match="are on this machine: choose one with --host"):
        Flags(pservers="127.0.0.1,127.0.0.2").servers_here()
    with pytest.raises(ConfigError, match="must be one of the pservers"):
        Flags(host="127.0.0.3").servers_here()


def test_a_network_interface_names_a_pserver():
    several = "127.0.0.1,192.0.2.77"
    assert [server.index for server in Flags(pservers=several, nics="lo", ports_num=2).servers_here()] == [0, 1]
    assert Flags(nics="lo").servers_here()
    with pytest.raises(ConfigError, match="nics = 'xgbe0': must be a network interface of this machine"):
        Flags(nics="xgbe0").servers_here()
    with pytest.raises(ConfigError, match="must be one of the pservers"):
        Flags(pservers="192.0.2.77,192.0.2.78", nics="lo").servers_here()


def test_flags_of_a_trainer_are_in_the_environment():
    """As where a script says `paddle.init()` alone."""
    started = {"PADDLE_INIT_NUM_GRADIENT_SERVERS": "2", "PADDLE_INIT_TRAINER_ID": "1", "PADDLE_INIT_PORT": "7000"}
    found = from_environment({}, {**started, "PADDLE": "x"})
    assert (found.num_of_gradient_servers, found.trainer_id, found.port, found.is_local) == (2, 1, 7000, False)
    found = from_environment({"trainer_id": 0, "num_of_gradient_servers": 3, "is_local": False}, started)
    assert (found.num_of_gradient_servers, found.trainer_id, found.port) == (3, 0, 7000)
    assert from_environment({}, {"PADDLE_INIT_PORT": "7000"}).is_local
    assert from_environment({"is_local": True}, started).is_local
    with pytest.raises(ConfigError, match="there is no such flag"):
        from_environment({}, {"PADDLE_INIT_TRAINER": "1"})


@pytest.mark.parametrize(
    "flags", [{"num_gradient_servers": 2}, {"pservers": "10.0.0.1,10.0.0.2"}, {"async_sgd": True}, {"pservers": "h"}]
)
def test_flags_of_a_cluster_that_have_no_effect_are_refused(flags):
    with pytest.raises(ConfigError, match="has no effect without is_local=False; say is_local=True"):
        tt.init(use_gpu=False, trainer_count=1, **flags)
    tt.init(is_local=True, **flags)
    tt.init(use_gpu=False, port=7164)
    assert process.current() is None


def test_joining_comes_before_preparing():
    net = nn.Linear(2, 1)
    tt.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"tt\.prepare: was called before this process joined a job: tt\.init, or"):
        tt.init(is_local=False, num_of_gradient_servers=2, trainer_id=1)
    with pytest.raises(ConfigError, match="was called before this process joined"):
        tt.train.Server(GOOD, job_name="worker", task_index=0)
    assert process.current() is None


# --- TensorFlow's cluster ----------------------------------------------------------------------------------------


def test_a_cluster_spec_is_tensorflows():
    spec = tt.train.ClusterSpec({"ps": ["a:1", "b:2"], "worker": {2: "d:4", 1: "c:3"}})
    assert spec.as_dict() == {"ps": ["a:1", "b:2"], "worker": {1: "c:3", 2: "d:4"}}
    assert (spec.jobs, spec.num_tasks("worker"), spec.task_indices("worker")) == (["ps", "worker"], 2, [1, 2])
    assert (spec.task_address("ps", 1), spec.job_tasks("worker")) == ("b:2", [None, "c:3", "d:4"])
    assert spec == tt.train.ClusterSpec(spec) and spec != tt.train.ClusterSpec({"ps": ["a:1"]}) and spec
    for wrong in (lambda: spec.num_tasks("chief"), lambda: spec.task_address("ps", 2)):
        with pytest.raises(ValueError, match=r"no (job|task)"):
            wrong()
    plain = tt.train.ClusterSpec({"ps": ["a:1"], "worker": ["b:2"]})
    assert tt.train.ClusterSpec(plain.as_cluster_def()) == plain
    assert tt.train.ClusterSpec({"ps": ["grpc://a:1"], "worker": {0: "tcp://b:2"}}) == plain
    for bad in ({"ps": "a:1"}, {"ps": ["a"]}, {"ps": {"x": "a:1"}}, {"ps": {-1: "a:1"}}, {"ps": ["http://a:1"]}, 7):
        with pytest.raises(ConfigError):
            tt.train.ClusterSpec(bad)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("MonitoredTrainingSession", "tt.prepare and an ordinary loop"),
        ("AdamOptimizer", "torch.optim"),
        ("StopAtStepHook", "a line of the script's loop"),
        ("import_meta_graph", "docs/coming-from.md"),
    ],
)
def test_names_of_tensorflow_that_are_not_here_lead_to_what_is(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=f"tt.train has no {name}: .*{re.escape(words)}"):
        getattr(tt.train, name)


GOOD = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"]}


@pytest.mark.parametrize(
    ("cluster", "job", "task", "said"),
    [
        (GOOD, "worker", 2, "must be 0 to 1, the tasks of 'worker'"),
        (GOOD, "worker", "0", "task_index = '0'"),
        ({**GOOD, "ps": ["a:1", "a:1"]}, "ps", 0, "must be different addresses"),
        ({5: ["a:1"]}, "ps", 0, "names of jobs"),
        (GOOD, "chief", 0, 'must be "ps" or "worker"'),
        ({"worker": ["a:1"]}, "worker", 0, 'at least one task of the job "ps"'),
        ({**GOOD, "chief": ["a:1"]}, "worker", 0, "a chief or master is the first task"),
        ({**GOOD, "worker": {1: "a:1"}}, "worker", 1, "must name every task"),
    ],
)
def test_tasks_that_do_not_exist_are_refused(cluster, job, task, said):
    with pytest.raises(ConfigError) as refused:
        tt.train.Server(cluster, job_name=job, task_index=task)
    assert said in str(refused.value)
    assert process.current() is None


def test_a_ps_task_is_no_worker():
    others = ({"sync": "False"}, {"wait_s": 0}, {"wait_s": "x"}, {"protocol": "grpc+verbs"}, {"config": object()})
    for wrong in (*others, {"start": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            tt.train.Server(GOOD, job_name="ps", task_index=0, **wrong)
    server = tt.train.Server(GOOD, "ps", 0, "grpc", None, False)
    assert server.target == "grpc://127.0.0.1:1"
    server.start()
    assert process.current() is None
    with pytest.raises(ConfigError, match="create_local_server"):
        tt.train.Server.create_local_server()


def test_a_worker_task_may_join_later(monkeypatch):
    joined = []
    monkeypatch.setattr(train_api, "join", lambda job, me, *rest, **more: joined.append(me))
    monkeypatch.setattr(train_api, "leave", lambda: joined.append("left"))
    server = tt.train.Server(GOOD, job_name="worker", task_index=1, start=False)
    assert not joined
    server.start()
    server.join()
    assert joined == [Address(Role.WORKER, 1, 0), "left"]
    tt.train.Server(GOOD, job_name="worker", task_index=0, start=False).join()
    assert joined[2:] == [Address(Role.WORKER, 0, 0), "left"]


def test_a_sync_replicas_optimizer_takes_tensorflows_arguments():
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    assert tt.train.SyncReplicasOptimizer(optimizer, 2, 2, use_locking=True, name="mnist_sync") is optimizer
    with pytest.raises(ConfigError, match=r"each step\(\) waits for the gradients of all workers"):
        optimizer.make_session_run_hook(True)
    with pytest.raises(ConfigError, match="variable_averages"):
        tt.train.SyncReplicasOptimizer(optimizer, 2, variable_averages=object())


# --- homes -------------------------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(70, 9), nn.Linear(9, 3, bias=False), nn.Linear(3, 3))


def homes(of: nn.Module) -> list[int]:
    return [parameter.home for parameter in describe_model(of).parameters]


def test_a_strategy_gives_each_parameter_a_task():
    with tt.train.device(tt.train.replica_device_setter(ps_tasks=2)):
        inside = model()
    assert homes(inside) == [0, 1, 0, 1, 0]
    assert homes(model()) == [-1] * 5
    assert homes(tt.train.replica_device_setter(cluster={"ps": ["a:1"] * 3}).assign(model())) == [0, 1, 2, 0, 1]
    # By size each parameter goes to the task with the least.
    strategy = tt.train.GreedyLoadBalancingStrategy(2, tt.train.byte_size_load_fn)
    setter = tt.train.replica_device_setter(ps_tasks=2, ps_strategy=strategy)
    weight, bias = (nn.Parameter(torch.zeros(n)) for n in (8, 2))
    assert [setter(weight), setter(bias), setter(bias), setter(weight)] == [f"/job:ps/task:{k}" for k in (0, 1, 1, 1)]
    assert tt.train.byte_size(weight) == 32


def test_no_ps_task_and_wrong_ones():
    assert tt.train.replica_device_setter() is None
    with tt.train.device(None):
        assert homes(model()) == [-1] * 5
    with pytest.raises(ConfigError, match="ps_strategy = 2"):
        tt.train.replica_device_setter(ps_tasks=2, ps_strategy=lambda parameter: 2)(nn.Parameter(torch.zeros(1)))
    with pytest.raises(ConfigError, match="ps_tasks = '2'"):
        tt.train.replica_device_setter(ps_tasks="2")
    with pytest.raises(ConfigError, match="ps_strategy = 'by size'"):
        tt.train.replica_device_setter(ps_tasks=2, ps_strategy="by size")
    with pytest.raises(ConfigError, match=r"a place by its name is tt\.device\('/job:ps/task:0'\)"):
        tt.train.device("/job:ps/task:0").__enter__()
    with pytest.raises(ConfigError, match=r"tt\.train\.device = 3: must be the result of [^;]*$"), tt.train.device(3):
        pass
    with pytest.raises(ConfigError, match="num_tasks = 0"):
        tt.train.RoundRobinStrategy(0)


def test_a_setter_takes_tensorflows_arguments(monkeypatch):
    cluster = {"moon": ["a:1", "b:1"], "sun": ["c:1"]}
    setter = tt.train.replica_device_setter(0, "/job:moon/task:5/cpu:0", "/job:sun", True, cluster, ["Variable"])
    assert [setter(nn.Parameter(torch.zeros(1))) for _ in range(3)] == [f"/job:moon/task:{k}/cpu:0" for k in (0, 1, 0)]
    named = "/job:worker/replica:0/task:1/device:CPU:0"
    assert tt.train.replica_device_setter(2, worker_device=named, merge_devices=False) is not None
    for wrong, said in (
        ({"worker_device": "/job:worker/task:0/gpu:0"}, "must be a CPU"),
        ({"worker_device": 3}, "worker_device = 3"),
        ({"merge_devices": "yes"}, "merge_devices = 'yes'"),
        ({"ps_ops": ["MatMul"]}, "ps_ops"),
    ):
        with pytest.raises(ConfigError, match=said):
            tt.train.replica_device_setter(2, **wrong)
    # In a process that has joined a job it names the task of this process.
    monkeypatch.setattr(process, "current", lambda: SimpleNamespace(number=1))
    assert tt.train.replica_device_setter(2, worker_device="/job:worker/task:1") is not None
    with pytest.raises(ConfigError, match="must be /job:worker/task:1, this process's task"):
        tt.train.replica_device_setter(2, worker_device="/job:worker/task:0")
    monkeypatch.setattr(process, "placed", lambda: True)
    assert tt.train.replica_device_setter(2, worker_device="/job:worker/task:0") is not None


def parameters(*wanted: tuple[int, int]) -> list[Parameter]:
    return [Parameter(f"p{i}", (n,), (1,), "float32", True, (), home) for i, (n, home) in enumerate(wanted)]


@pytest.mark.parametrize("slicing", Slicing)
def test_the_cut_obeys_homes_and_balances_the_rest(slicing):
    schema = parameters((100, 1), (5000, 1), (900, -1), (700, -1), (300, 0))
    found = cut(schema, 3, slicing=slicing)
    owners = [{segment.shard for segment in found.segments_of_parameter(index)} for index in range(5)]
    assert owners == [{1}, {1}, {2}, {0}, {0}]
    assert found.shard_bytes == (4000, 20400, 3600)
    assert parse_schema(describe(schema)) == tuple(schema)
    again = cut(parse_schema(describe(schema)), 3, slicing=slicing)
    assert again.digest == found.digest != cut(parameters(*[(p.count, -1) for p in schema]), 3).digest
    with pytest.raises(SchemaError, match="'p0': home = 2: must be 0 to 1: the job has 2 servers"):
        cut(parameters((10, 2)), 2)
    with pytest.raises(SchemaError, match="home = -2"):
        parameters((10, -2))


def test_homes_change_where_values_live_and_not_what_they_are():
    cluster = Cluster(nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True)

    def build():
        made = tt.train.replica_device_setter(ps_tasks=2).assign(model())
        return made, torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)

    def script(trainer: Reference) -> None:
        x = torch.randn(10, 70, generator=torch.Generator().manual_seed(2))
        for _ in range(3):
            trainer.optimizer.zero_grad()
            trainer.backward(trainer.losses(lambda net, part: net(part).square().mean(), x))
            trainer.optimizer.step()

    found: Result = run_local(Job(cluster=cluster), build, script)
    assert found.same_bits(reference(Job(cluster=cluster), build, script))
    shards = found.workers[0].worker.map
    assert [{s.shard for s in shards.segments_of_parameter(i)} for i in range(5)] == [{0}, {1}, {0}, {1}, {0}]
    data = plan(Job(cluster=cluster), PlannedSchema(tuple(parameters((640, 1), (64, -1))))).as_data()
    assert data["homes"] == {"p0": 1} and data["imbalance"] == pytest.approx(2 * 640 / 704 - 1)
