"""torch.distributed as an engine: Gloo on CPUs, NCCL on GPUs.

- There is no global process group and no environment variable. Gloo binds only to the given address or interface.
- Processes find each other through a file in a directory that only this user may enter, or through a given store.
- Every collective has a deadline.
- All ranks must start the same collectives in the same order. Errors name the number of the collective.
- Neither engine has authentication or encryption. Any process that reaches the port of a group while it forms may take
  part. So use `lo` or a private network.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from topotrain.comm.transport import TransportError
from topotrain.config.job import ConfigError, Engine

# A rank in another collective, or a stopped process, shows only by this deadline.
DEADLINE = 30.0  # seconds; torch's own default is half an hour


class CollectiveError(TransportError):
    """A collective failed: a peer died, was late, or is in another collective.

    The group cannot be used any more.
    """


class CollectiveWork:
    """A running collective. Its tensors must not be used until `wait` returns."""

    def __init__(self, work: Any, group: "TorchCollective", what: str) -> None:
        self._work, self._group, self._what = work, group, what

    def wait(self) -> None:
        """Wait for the end, at most for the group's deadline.

        With NCCL the current stream waits, not the caller.

        Raises:
            CollectiveError: the collective failed.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._group.error(self._what, error) from error


class TorchCollective:
    """One rank in one group of one generation. The constructor waits for all ranks.

    Args:
        backend: kGloo or kNccl.
        store: the path of a file for this group alone, which must not exist before the first rank comes. Its directory
            is made (mode 0700) if it is missing. A new generation needs a new name. For ranks on several hosts: a
            `torch.distributed.Store` with keys for this group alone.
        rank, size: of this process, and of the group.
        timeout_s: seconds for the rendezvous of the group, and for each collective.
        interface: name of the network interface that Gloo binds to.
        device: index of the GPU (kNccl).
        address: the address that Gloo binds to, instead of an interface.

    Raises:
        ConfigError: the engine is not one of torch's, or this machine cannot run it.
        CollectiveError: a rank did not join in time.
        TransportError: the directory of the store is open to other users.
    """

    def __init__(
        self,
        backend: Engine,
        store: Any,
        rank: int,
        size: int,
        timeout_s: float = DEADLINE,
        interface: str = "lo",
        device: int = 0,
        address: str = "",
    ) -> None:
        check_engine(backend)
        if not 0 <= rank < size:
            raise ValueError(f"rank = {rank}: must be 0 to {size - 1}")
        self.rank, self.size = rank, size
        self._name, self._seconds, self._started = backend.value, timeout_s, 0
        self._deadline = timedelta(seconds=timeout_s)
        try:
            if isinstance(store, str):
                # The file is all that a process needs to join, so no other user may enter its directory.
                _check_directory(os.path.dirname(os.path.abspath(store)))
                store = vars(dist)["FileStore"](store, size)  # missing from the type stubs
            store.set_timeout(self._deadline)
            if backend is Engine.kGloo:
                self._group: Any = _gloo(store, rank, size, self._deadline, interface, address)
            else:
                self._group = _nccl(store, rank, size, self._deadline, device)
        except RuntimeError as error:
            raise self.error("joining the group", error) from error

    def all_reduce(self, tensor: torch.Tensor) -> CollectiveWork:
        """Replace a contiguous tensor by its sum over all ranks."""
        options = dist.AllreduceOptions()  # a sum by default
        options.timeout = self._deadline
        return self._start("all_reduce", tensor, "allreduce", options)

    def broadcast(self, tensor: torch.Tensor, src: int) -> CollectiveWork:
        """Replace a contiguous tensor by the tensor of rank `src`."""
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.timeout = self._deadline
        return self._start(f"broadcast from rank {src}", tensor, "broadcast", options)

    def close(self) -> None:
        """Leave the group. Ranks that wait for this rank fail at once."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def _start(self, what: str, tensor: torch.Tensor, operation: str, options: Any) -> CollectiveWork:
        self._started += 1
        words = f"{what} number {self._started} ({tensor.numel()} × {str(tensor.dtype).removeprefix('torch.')})"
        if self._group is None:
            raise self.error(words, "this group is closed")
        try:
            return CollectiveWork(getattr(self._group, operation)([tensor], options), self, words)
        except RuntimeError as error:
            raise self.error(words, error) from error

    def error(self, what: str, why: BaseException | str) -> CollectiveError:
        """Return the error of an operation, with rank and deadline."""
        # torch appends a C++ stack trace.
        reason = str(why).split("\n")[0]
        return CollectiveError(
            f"{self._name}, rank {self.rank} of {self.size}: {what} failed (deadline {self._seconds:g} s): {reason}"
        )


def check_engine(backend: Engine) -> None:
    """Raise ConfigError for an engine that this machine or torch does not have."""
    if backend not in (Engine.kGloo, Engine.kNccl):
        raise ConfigError("cluster.engine", backend, "torch.distributed has kGloo and kNccl")
    if backend is Engine.kGloo and not dist.is_gloo_available():
        raise ConfigError("cluster.engine", backend, "needs a build of torch with Gloo")
    if backend is Engine.kNccl:
        if not torch.cuda.is_available():
            raise ConfigError("cluster.engine", backend, "needs an NVIDIA GPU and a build of torch with CUDA")
        if not dist.is_nccl_available():
            raise ConfigError("cluster.engine", backend, "needs a build of torch with NCCL")


def _check_directory(directory: str) -> None:
    os.makedirs(directory, mode=0o700, exist_ok=True)
    info = os.stat(directory)
    if info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise TransportError(
            f"store directory {directory!r}: must belong to this user and be closed to others (mode 0700)"
        )


def _gloo(store: Any, rank: int, size: int, deadline: timedelta, interface: str, address: str) -> Any:
    # Constructed directly: `init_process_group` would occupy the process's global group and read the environment.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # Set explicitly, so that neither GLOO_SOCKET_IFNAME nor the address of the host's name is used.
    options._devices = [gloo.create_device(hostname=address) if address else gloo.create_device(interface=interface)]
    options._timeout = deadline
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, deadline: timedelta, device: int) -> Any:
    torch.cuda.set_device(device)
    # Looked up by name, because a build without NCCL does not have the class.
    nccl: Any = vars(dist)["ProcessGroupNCCL"]
    options = nccl.Options()
    options._timeout = deadline
    return nccl(store, rank, size, options)
