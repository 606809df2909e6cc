"""TensorFlow 1's interface as `tt.train`: ClusterSpec, Server, placement.

A "ps" task is a server, and a "worker" task joins the job (`manual_server`, `manual_worker`). Every worker is a group
of its own unless all tasks have `sync=True`.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer

from topotrain.comm.security.secret import load_secret
from topotrain.comm.store import StoreError
from topotrain.comm.store.discovery.static_addresses import StaticStore
from topotrain.compat.tensorflow.cluster_spec import ClusterSpec, Tasks, task_name
from topotrain.compat.tensorflow.ps_placement import (
    GreedyLoadBalancingStrategy,
    ReplicaDeviceSetter,
    RoundRobinStrategy,
    byte_size_load_fn,
)
from topotrain.config.job import Cluster, ConfigError, Job, TransportChoice
from topotrain.config.topology import Address, Role, layout
from topotrain.launch.by_hand.manual_server import SharedSettings, serve, tell
from topotrain.launch.by_hand.manual_worker import join, leave
from topotrain.training import context as process
from topotrain.training.parameters.flat_parameters import HOME

if TYPE_CHECKING:
    from topotrain.compat.tensorflow.session.session_client import TrainOp, minimize

__all__ = [
    "ClusterSpec",
    "GreedyLoadBalancingStrategy",
    "ReplicaDeviceSetter",
    "RoundRobinStrategy",
    "Server",
    "SyncReplicasOptimizer",
    "TrainOp",
    "byte_size",
    "byte_size_load_fn",
    "device",
    "minimize",
    "replica_device_setter",
]

byte_size = byte_size_load_fn

_INSTEAD = (
    (
        r"Monitored\w*|Supervisor|SessionManager|Scaffold|\w*SessionCreator",
        "tt.prepare and an ordinary loop take its place",
    ),
    (r"\w*global_step|assert_global_step", "tt.global_step() is the number of steps of the job"),
    (
        r"\w*Optimizer|exponential_decay|\w+_decay",
        "torch.optim has optimizers and schedules, which tt.prepare is given",
    ),
    (r"\w*Saver\w*|\w*[cC]heckpoint\w*", "tt.save(tt.state_dict(model), path) saves; a job takes snapshots by itself"),
    (r"\w*Hook", "what it does is a line of the script's loop, such as `if tt.global_step() >= steps: break`"),
    (
        r"\w*ClusterResolver|TFConfig\w*",
        'json.loads(os.environ["TF_CONFIG"]) has "cluster", for tt.train.ClusterSpec, and "task"',
    ),
    (r"ExponentialMovingAverage", "torch.optim.swa_utils.AveragedModel keeps an average of the weights"),
    (r"Coordinator|\w*[qQ]ueue_?[rR]unner\w*|\w*batch\w*|\w*producer", "a DataLoader reads, which tt.prepare is given"),
)
"""Names of TensorFlow's module that are not here, and what a script has instead."""


def __getattr__(name: str) -> Any:
    # The client session is a package of its own, imported when it is used.
    if name in ("TrainOp", "minimize"):
        return getattr(import_module("topotrain.compat.tensorflow.session.session_client"), name)
    words = next((words for names, words in _INSTEAD if re.fullmatch(names, name)), "docs/coming-from.md has what is")
    raise AttributeError(f"tt.train has no {name}: {words}")


COMPARE = 'the ClusterSpec (jobs "ps" and "worker", in this order everywhere) and sync'


class Server:
    """This process's task: `tf.train.Server`.

        cluster = tt.train.ClusterSpec({"ps": ["host:2222"], "worker": ["host:2223", "host:2224"]})
        server = tt.train.Server(cluster, job_name="worker", task_index=0)

    A "worker" belongs to the job from here on. A "ps" serves in `join()`. Under `topotrain run`, which has placed the
    process already, nothing changes.

    Args:
        server_or_cluster_def: a ClusterSpec, or an argument for one. It must name every task of the jobs "ps" and
            "worker".
        job_name: "ps" or "worker".
        task_index: number of the task in its job.
        protocol: "grpc" as in TensorFlow, or None. topotrain has one protocol.
        config: None.
        start: False: a worker joins the job in `start()`.
        sync: workers take every step together. It must be the same on all tasks. See `SyncReplicasOptimizer`.
        session: the cluster is driven by clients (`tt.Session`): every task stays in `join`, for one session after the
            other. It must be the same on all tasks.
        workspace: where worker 0 writes the result; "": ./workspace/tensorflow.
        wait_s: seconds to wait for the other tasks before training starts.

    Raises:
        ConfigError: there is no such task, or the cluster cannot be trained on.
    """

    def __init__(
        self,
        server_or_cluster_def: ClusterSpec | Mapping[str, Tasks],
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: None = None,
        start: bool = True,
        *,
        sync: bool = False,
        session: bool = False,
        workspace: str = "",
        wait_s: float = 600.0,
    ) -> None:
        self.cluster = ClusterSpec(server_or_cluster_def)
        self.job_name, self.task_index = str(job_name), 0 if task_index is None else task_index
        self.sync, self.session = sync, session
        self._ps, workers = (_complete(self.cluster, name) for name in ("ps", "worker"))
        if sorted(self.cluster.jobs) != ["ps", "worker"]:
            accepted = (
                'must have the jobs "ps" and "worker", and no other: a chief or master is the first task of "worker"'
            )
            raise ConfigError("cluster", self.cluster.as_dict(), accepted)
        if job_name not in ("ps", "worker"):
            raise ConfigError("job_name", job_name, 'must be "ps" or "worker"')
        if len(set(self._ps)) < len(self._ps):
            raise ConfigError("cluster['ps']", self._ps, "must be different addresses")
        # With sessions the workers listen, too. Without them their addresses only name them.
        if session and len({*self._ps, *workers}) < len(self._ps) + len(workers):
            raise ConfigError("cluster", self.cluster.as_dict(), "must have an address of its own for every task")
        if protocol not in (None, "grpc"):
            raise ConfigError("protocol", protocol, 'must be "grpc", or not given: there is one protocol here')
        if config is not None:
            raise ConfigError("config", config, "must be None: there is no ConfigProto here")
        for name, value in (("sync", sync), ("session", session), ("start", start)):
            if not isinstance(value, bool):
                raise ConfigError(name, value, "must be True or False")
        if not isinstance(wait_s, int | float) or not wait_s > 0:
            raise ConfigError("wait_s", wait_s, "must be a number of seconds > 0")
        here = self._ps if job_name == "ps" else workers
        if type(self.task_index) is not int or not 0 <= self.task_index < len(here):
            raise ConfigError("task_index", task_index, f"must be 0 to {len(here) - 1}, the tasks of {job_name!r}")
        self.address = here[self.task_index]
        self._job = _job_of(len(self._ps), len(workers), sync, workspace)
        how = "sync" if sync else "async"
        apart = f"every worker task needs a task_index of its own; this process has task_index = {self.task_index}"
        self._terms = SharedSettings(
            f"{len(self._ps)} ps, {len(workers)} workers, {how}", COMPARE, wait_s, task_name, apart
        )
        # Under `topotrain run` the process has its place already.
        self._placed = process.placed()
        self._started = False
        if start:
            self.start()

    @classmethod
    def create_local_server(cls, config: None = None, start: bool = True) -> "Server":
        """Refuse: a script without a cluster needs no server, and trains in its process."""
        raise ConfigError(
            "tt.train.Server.create_local_server", None, "is not there: a script without a Server is local"
        )

    def start(self) -> None:
        """Make a worker part of the job after `start=False`. A second call does nothing.

        Raises:
            ConfigError, TransportError: as in `join`.
        """
        # As in TensorFlow, a worker belongs to the cluster from here on, and a ps task only from `join` on.
        if self.job_name == "worker" and not (self._started or self._placed or self.session):
            self._started = True
            self._join()

    @property
    def target(self) -> str:
        """The URL of this task, as TensorFlow writes it; `tt.Session` takes it."""
        return f"grpc://{self.address}"

    @property
    def server_def(self) -> dict[str, Any]:
        """The cluster and this task's number in it, as plain data."""
        return {"cluster": self.cluster.as_dict(), "job_name": self.job_name, "task_index": self.task_index}

    def join(self) -> None:
        """Serve on a "ps" task until all workers have ended; end a worker's part.

        With `session=True` it serves clients, until the process is stopped. Ctrl-C in a task that only serves ends its
        process with code 130 (SystemExit).

        Raises:
            ConfigError: no connection can be accepted at this task's address.
            JobError: the job cannot go on.
            TransportError: the port cannot be used, or another task refuses this one.
        """
        if self._placed:
            return
        if self.session:
            with _stopped_by_user(self.job_name, self.task_index):
                self._reside()
            return
        self.start()
        if self.job_name == "worker":
            here = process.current()
            # A worker without a model has nothing to train. Most likely it was to wait for clients.
            if here is not None and not here.adopted and here.tables is None:
                accepted = "must be True on every task where a worker only joins, and waits for the session of a client"
                raise ConfigError("session", False, accepted)
            leave()
            return
        me = Address(Role.SERVER, 0, self.task_index)
        with _stopped_by_user(self.job_name, self.task_index):
            serve(self._job, [me], StaticStore(self._ps), load_secret(os.environ), terms=self._terms)

    def _reside(self) -> None:
        from topotrain.compat.tensorflow.session.session_server import SessionServer
        from topotrain.compat.tensorflow.session.session_task import TaskAddress

        me = TaskAddress(self.job_name, self.task_index, self.address)
        try:
            SessionServer(self.cluster.as_dict(), me, load_secret(os.environ)).stay()
        except StoreError as error:
            raise ConfigError("cluster", self.address, f"cannot be served at: {error}") from None

    def _join(self) -> None:
        group, index = (0, self.task_index) if self.sync else (self.task_index, 0)
        me = Address(Role.WORKER, group, index)
        join(self._job, me, StaticStore(self._ps), load_secret(os.environ), terms=self._terms)


@contextmanager
def _stopped_by_user(job: str, index: int) -> Iterator[None]:
    """End a serving task after Ctrl-C with a line instead of a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        tell(f"/job:{job}/task:{index}: stopped (Ctrl-C)")
        # 128 + SIGINT, as shells report it.
        raise SystemExit(130) from None


def _complete(cluster: ClusterSpec, job: str) -> list[str]:
    """Return the addresses of all tasks of a job. Raises ConfigError."""
    if job not in cluster.jobs or not cluster.num_tasks(job):
        raise ConfigError("cluster", cluster.as_dict(), f'must have at least one task of the job "{job}"')
    tasks = cluster.job_tasks(job)
    if None in tasks:
        raise ConfigError(f"cluster[{job!r}]", cluster.as_dict()[job], "must name every task, not some of them")
    return [str(address) for address in tasks]


def _job_of(servers: int, workers: int, sync: bool, workspace: str) -> Job:
    cluster = Cluster(
        nworker_groups=1 if sync else workers,
        nworkers_per_group=workers if sync else 1,
        nservers_per_group=servers,
        server_worker_separate=True,
        transport=TransportChoice.kTcp,
        workspace=workspace,
    )
    layout(cluster)
    return Job(name="tensorflow", cluster=cluster)


def SyncReplicasOptimizer(
    opt: Optimizer,
    replicas_to_aggregate: int,
    total_num_replicas: int | None = None,
    variable_averages: None = None,
    variables_to_average: None = None,
    use_locking: bool = False,
    name: str = "sync_replicas",
) -> Optimizer:
    """Check that every step sums the gradients of all workers.

    This is `tf.train.SyncReplicasOptimizer`. Every task must give `sync=True` to `Server`. The optimizer is returned
    unchanged.

    Args:
        opt: the optimizer.
        replicas_to_aggregate, total_num_replicas: the number of workers.
        variable_averages, variables_to_average: None. An average is a line of the script's loop.
        use_locking: of no importance: a server applies one update at a time.
        name: of no importance: there is no graph.

    Raises:
        ConfigError: the job is asynchronous, or not all of its workers would count: there are no backup workers here.
    """
    for given, average in (("variable_averages", variable_averages), ("variables_to_average", variables_to_average)):
        if average is not None:
            raise ConfigError(given, type(average).__name__, "must be None: keep an average in the loop of the script")
    del use_locking, name
    opt.make_session_run_hook = _no_hook  # type: ignore[attr-defined]
    here = process.current()
    if here is None:
        return opt
    topology = here.place.topology
    workers = topology.workers_per_group
    # The ps tasks decide which steps belong together, so a worker alone cannot make its steps synchronous.
    if topology.worker_groups > 1:
        raise ConfigError("sync", False, "must be True in tt.train.Server, on every task, for SyncReplicasOptimizer")
    for given, value in (("replicas_to_aggregate", replicas_to_aggregate), ("total_num_replicas", total_num_replicas)):
        if value not in (None, workers):
            raise ConfigError(given, value, f"must be {workers}, the number of workers: each one counts in every step")
    return opt


def _no_hook(is_chief: bool = False, num_tokens: int = -1) -> Any:
    accepted = "is not there, and needs no counterpart: each step() waits for the gradients of all workers"
    raise ConfigError("make_session_run_hook", None, accepted)


# --- placement of variables on ps tasks --------------------------------------------------------------------------


def replica_device_setter(
    ps_tasks: int = 0,
    ps_device: str = "/job:ps",
    worker_device: str = "/job:worker",
    merge_devices: bool = True,
    cluster: ClusterSpec | Mapping[str, Tasks] | None = None,
    ps_ops: Sequence[str] | None = None,
    ps_strategy: Any = None,
) -> ReplicaDeviceSetter | None:
    """Return a chooser of ps tasks for parameters: `tf.train.replica_device_setter`.

        with tt.train.device(tt.train.replica_device_setter(cluster=cluster)):
            model = Net()

    Without it parameters are cut into equal parts over all ps tasks, which is nearly always the better choice.

    Args:
        ps_tasks: their number. 0: those of `cluster`. With no ps tasks None is returned.
        ps_device: the names of places: "/job:ps" or "/job:ps/cpu:0". A number of a task in it is replaced.
        worker_device: where the rest of the model is: on the CPU of this process, so its task is this one.
        merge_devices: of no importance: a place that the script gives to a parameter counts.
        cluster: a ClusterSpec, or an argument for one.
        ps_ops: None, or a list with the name of an operation of variables. Parameters are placed.
        ps_strategy: parameter -> number of the task; None: `RoundRobinStrategy`.
    """
    if type(ps_tasks) is not int or ps_tasks < 0:
        raise ConfigError("ps_tasks", ps_tasks, "must be a whole number >= 0")
    if not isinstance(ps_device, str):
        raise ConfigError("ps_device", ps_device, 'must be a text such as "/job:ps"')
    if not isinstance(merge_devices, bool):
        raise ConfigError("merge_devices", merge_devices, "must be True or False")
    if ps_ops is not None and not _VARIABLES & set(ps_ops):
        raise ConfigError("ps_ops", ps_ops, f"must have one of {', '.join(sorted(_VARIABLES))}: parameters are placed")
    _check_worker_device(worker_device)
    if ps_strategy is not None and not callable(ps_strategy):
        raise ConfigError("ps_strategy", ps_strategy, "must be a function from a parameter to the number of a ps task")
    if cluster is not None:
        spec = ClusterSpec(cluster)
        name = _parts(ps_device).get("job", "")
        ps_tasks = spec.num_tasks(name) if name in spec.jobs else 0
    if not ps_tasks:
        return None
    return ReplicaDeviceSetter(ps_tasks, ps_device, ps_strategy or RoundRobinStrategy(ps_tasks))


_VARIABLES = {"Variable", "VariableV2", "AutoReloadVariable", "VarHandleOp"}


def _parts(name: str) -> dict[str, str]:
    """Split the name of a device: "/job:ps/task:3/cpu:0" has a job, a task and a CPU."""
    words = (word.partition(":") for word in name.lower().removeprefix("/").replace("device:", "").split("/"))
    return {kind: rest for kind, _, rest in words}


def _check_worker_device(name: str | None) -> None:
    if not isinstance(name, str | None):
        raise ConfigError("worker_device", name, 'must be a text such as "/job:worker/task:0"')
    parts, here = _parts(name or ""), process.current()
    if "gpu" in parts:
        raise ConfigError("worker_device", name, "must be a CPU: a script moves its model to a GPU itself")
    # Under a launcher all processes have the same words.
    if here is not None and not process.placed() and parts.get("task", str(here.number)) != str(here.number):
        accepted = f"must be /job:worker/task:{here.number}, this process's task: it computes here"
        raise ConfigError("worker_device", name, accepted)


@contextmanager
def device(setter: object) -> Iterator[None]:
    """Place parameters that modules get inside this block by `setter`.

    None: they are placed anywhere.

    Raises:
        ConfigError: another argument, such as the name of a device.
    """
    if setter is None:
        yield
        return
    if not isinstance(setter, ReplicaDeviceSetter):
        accepted = "must be the result of tt.train.replica_device_setter, or None"
        if isinstance(setter, str):
            accepted += f"; a place by its name is tt.device({setter!r})"
        raise ConfigError("tt.train.device", setter, accepted)

    def place(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # A tied weight is registered twice, and stays where it was placed first.
        if parameter is not None and not hasattr(parameter, HOME):
            setter(parameter)

    # torch calls this for every parameter that a module registers, in any thread of the process.
    hook = register_module_parameter_registration_hook(place)
    try:
        yield
    finally:
        hook.remove()
