"""A task that follows the session's first worker: another worker, or a ps task."""

import queue
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

import torch

from topotrain.comm.store import StoreError, open_store
from topotrain.comm.transport import TransportError
from topotrain.compat.tensorflow.session.session_protocol import SessionClosed, SessionConnection
from topotrain.compat.tensorflow.session.session_task import TaskAddress, failed, part_of
from topotrain.compat.tensorflow.session.task_graph import OVER, TERMS, SessionRendezvous, SessionWorker
from topotrain.config.job import ConfigError
from topotrain.config.topology import Address, Role
from topotrain.core.client.client import JobError
from topotrain.launch.by_hand.manual_server import serve, tell


class SessionShard:
    """The parameter server of a ps task, for the length of one session."""

    def __init__(self, me: TaskAddress, meet: SessionRendezvous, host: str, secret: bytes) -> None:
        self._me, self._meet, self._host, self._secret = me, meet, host, secret
        self._done = threading.Event()
        self.why = OVER
        """Why it has ended."""

    def run(self) -> None:
        me = Address(Role.SERVER, 0, self._me.index)
        try:
            # The store of this session: each session is a job with a rendezvous of its own.
            with closing(open_store(self._meet.store, self._secret)) as store:
                serve(self._meet.job(), [me], store, self._secret, self._host, terms=TERMS)
        # The task survives its session. The reason is printed when the session ends.
        except (JobError, TransportError, StoreError, ConfigError) as error:
            self.why = str(error)
        finally:
            self._done.set()

    def wait(self) -> None:
        self._done.wait()


ShardQueue = queue.SimpleQueue[SessionShard | None]


def follow(
    me: TaskAddress,
    connection: SessionConnection,
    request: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
    counts: Sequence[int],
    host: str,
    secret: bytes,
    shards: ShardQueue,
) -> None:
    """Take part in one session. Raises SessionClosed.

    Args:
        connection: to the first worker. request, tensors: its first message.
        counts: how many workers and ps tasks there are. host: where others reach this task.
        shards: a ps task's server is put there, and runs on the thread that takes it.
    """
    try:
        meet = SessionRendezvous.from_data(request.get("meet"))
        # The tasks were started one by one, perhaps with different lists.
        if [meet.workers, meet.servers] != list(counts):
            raise ConfigError("cluster", counts, "must be the same ClusterSpec in all tasks")
        part = None if me.job == "ps" else part_of(meet, me.index, request, tensors, secret, host)
    # Nothing is open yet, so any error is only a reply, and the task goes back to waiting.
    except Exception as error:
        connection.send(failed(me, error, None).to_data())
        return
    connection.send({})
    # All tasks have agreed: begin. If one of them has not, the connection is closed here.
    connection.receive()
    if part is None:
        _serve(me, connection, SessionShard(me, meet, host, secret), shards)
    else:
        _Following(me, connection, part).follow()


def _serve(me: TaskAddress, connection: SessionConnection, shard: SessionShard, shards: ShardQueue) -> None:
    # The reply comes first: the shard runs until the end of the session.
    connection.send({})
    # The main thread runs it, where Ctrl-C arrives.
    shards.put(shard)
    shard.wait()
    try:
        connection.receive()
        tell(f"{me}: {OVER}")
    except SessionClosed:
        tell(f"{me}: {OVER}: {shard.why}")


class _Following:
    """A worker that carries out the requests of the session's first worker."""

    def __init__(self, me: TaskAddress, connection: SessionConnection, part: SessionWorker) -> None:
        self._me, self._connection, self._part = me, connection, part

    def follow(self) -> None:
        """Carry out requests until the session's end."""
        why = f"{self._me}: the session's first worker is gone"
        try:
            self._part.enter()
            self._connection.send({})
            while True:
                request, _ = self._connection.receive()
                if request.get("do") == "end":
                    why = OVER
                    return
                self._obey(request)
        # The first worker is gone. `why` says so already.
        except SessionClosed:
            pass
        # Errors of torch and of the user's model come from here, so none is excluded.
        except Exception as error:
            found = failed(self._me, error, self._part)
            why = str(found)
            # Before the reply: the first worker may be waiting for this one in a step.
            self._part.leave(found.bare)
            with suppress(SessionClosed):
                self._connection.send(found.to_data())
        finally:
            self._part.leave(why)
            tell(f"{self._me}: {OVER}" + ("" if why == OVER else f": {why}"))

    def _obey(self, request: Mapping[str, Any]) -> None:
        try:
            found = self._part.execute(request)
        except ConfigError as error:
            # Only a description may be refused. After another error the tasks are at different steps.
            if request["do"] != "learn":
                raise
            self._connection.send(failed(self._me, error, None).to_data())
            return
        if request["do"] == "pull":
            self._connection.send({"numbers": list(found)}, list(found.values()))
        else:
            self._connection.send({})
