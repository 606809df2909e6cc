"""TensorFlow 1's ClusterSpec: the addresses of all tasks, by job. Without torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from topotrain.comm.store import StoreError
from topotrain.comm.store.discovery.static_addresses import split_address
from topotrain.config.job import ConfigError
from topotrain.config.topology import Address, Role

Tasks = Sequence[str] | Mapping[int, str]

SCHEMES = ("tcp://", "grpc://")
"""Accepted before HOST:PORT: `Server.target` has the first one, TensorFlow's programs the second."""


class ClusterSpec:
    """The addresses of all tasks, by job: `tf.train.ClusterSpec`.

    Args:
        cluster: job name -> list of HOST:PORT, or task number -> HOST:PORT; or another ClusterSpec. HOST:PORT may begin
            with one of `SCHEMES`, which is left out.

    Raises:
        ConfigError: any other argument.
    """

    def __init__(self, cluster: "Mapping[str, Tasks] | ClusterSpec") -> None:
        given = cluster.as_dict() if isinstance(cluster, ClusterSpec) else cluster
        if not isinstance(given, Mapping):
            raise ConfigError("cluster", given, 'must be a dictionary such as {"ps": ["host:2222"]}')
        for job in given:
            if not isinstance(job, str):
                raise ConfigError("cluster", job, 'must have names of jobs, such as "ps"')
        self._tasks = {job: _tasks_of(job, tasks) for job, tasks in given.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: a list per job, or a dictionary with missing numbers."""
        return {
            # Without gaps in the numbers a list says the same, as in TensorFlow.
            job: list(tasks.values()) if list(tasks) == list(range(len(tasks))) else dict(tasks)
            for job, tasks in self._tasks.items()
        }

    def as_cluster_def(self) -> dict[str, Any]:
        """Return the same as `as_dict`: `ClusterSpec` and `Server` take plain data."""
        return self.as_dict()

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._tasks)

    def num_tasks(self, job_name: str) -> int:
        """Return how many tasks a job has. Raises ValueError if there is no such job."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the numbers of a job's tasks. Raises ValueError for an unknown job."""
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return HOST:PORT of a task. Raises ValueError for an unknown job or task."""
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(f"no task {task_index} in job {job_name!r}, it has {', '.join(map(str, tasks))}")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return HOST:PORT of each task of a job by number, None for missing numbers."""
        tasks = self._job(job_name)
        # Numbers without a task are None, so that the place in the list is the number.
        return [tasks.get(number) for number in range(max(tasks, default=-1) + 1)]

    def _job(self, job_name: str) -> Mapping[int, str]:
        if job_name not in self._tasks:
            raise ValueError(f"no job {job_name!r} in the cluster, it has {', '.join(self._tasks)}")
        return self._tasks[job_name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        # The dictionaries inside have no hash. `str` shows all that `__eq__` compares.
        return hash(str(self))

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __str__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    __repr__ = __str__


def _tasks_of(job: str, tasks: Any) -> dict[int, str]:
    if isinstance(tasks, Mapping):
        found = dict(tasks)
    elif isinstance(tasks, list | tuple):
        found = dict(enumerate(tasks))
    else:
        raise ConfigError(f"cluster[{job!r}]", tasks, "must be a list of HOST:PORT, or numbers with HOST:PORT")
    for number, address in found.items():
        try:
            if type(number) is not int or number < 0:
                raise StoreError(f"task number {number!r}: must be a whole number >= 0")
            found[number] = without_scheme(str(address))
            # Only to refuse an address that is not HOST:PORT.
            split_address(found[number])
        except StoreError as error:
            raise ConfigError(f"cluster[{job!r}]", tasks, str(error)) from None
    # By number, so that equal clusters are equal however they were written.
    return dict(sorted(found.items()))


def without_scheme(address: str) -> str:
    """Return HOST:PORT of an address that may begin with one of `SCHEMES`."""
    return next((address.removeprefix(scheme) for scheme in SCHEMES if address.startswith(scheme)), address)


def task_name(address: Address) -> str:
    """Return TensorFlow's name of a worker's or a server's task."""
    if address.role is Role.SERVER:
        return f"/job:ps/task:{address.index}"
    # Synchronous workers differ by their index, and asynchronous ones by their group. The other number is 0.
    return f"/job:worker/task:{address.group + address.index}"
