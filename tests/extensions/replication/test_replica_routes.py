"""Second copies on the same host are reached through shared memory, and all others over TCP."""

import threading
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from in_process_job import job_of
from torch import Tensor

from topotrain.comm.router import Router, RouterConfig
from topotrain.comm.security.handshake import Identity
from topotrain.comm.store import open_store
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.topology import Address, Role, layout
from topotrain.core.protocol import Message
from topotrain.extensions.replication.replicated_server import standby_of
from topotrain.extensions.replication.replication_messages import ReplicaAck, ReplicatedEvent

SERVER = Address(Role.SERVER, 0, 0)
STANDBY = standby_of(SERVER)
WAIT_S = 30.0
SIZE = 1 << 20


class Recording:
    """An endpoint that keeps what comes, and has memory of its own for bodies that are sent."""

    def __init__(self) -> None:
        self.came, self.viewable = threading.Event(), False
        self.message: Message | None = None
        self.own = torch.zeros(SIZE, dtype=torch.uint8)

    def place(self, sender: Address, message: Message, viewable: bool) -> Tensor | None:
        self.viewable = viewable
        return None if viewable else self.own

    def handle(self, sender: Address, message: Message) -> None:
        self.message = message
        self.came.set()

    def lost(self, peer: Address, reason: str) -> None:
        pass


class Processes:
    """The processes of a server and of its second copy."""

    def __init__(self, folder: Path, addresses: tuple[str, str]) -> None:
        job = job_of(transport="kTcp", nservers_per_group=2, replicas=2)
        topology, sockets = layout(job.cluster), Path(mkdtemp(prefix="tt-"))
        store = open_store(folder.as_uri())
        identity = Identity(job.name, b"7" * 32, 0, 0, job.digest())
        self.memory = ProcessMemory()
        places = [RouterConfig(job, topology, identity, store, sockets, address) for address in addresses]
        self.near, self.far = Router(places[0], self.memory), Router(places[1], ProcessMemory())
        self.primary, self.standby = Recording(), Recording()
        self.urls = self.near.attach(SERVER, self.primary)
        self.standby_urls = self.far.attach(STANDBY, self.standby)
        self.far.publish("standby-0", SERVER, self.standby_urls)

    def send(self) -> Tensor:
        """Connect, and send an event with a body in the memory of the first process, and an ack back."""
        self.near.connect(SERVER, STANDBY, "standby-0", anew=True)
        body = self.memory.allocate(SIZE, torch.uint8).fill_(7)
        self.near.send(SERVER, STANDBY, ReplicatedEvent(0, 1, 0, 0, 0, 0, 10, b"", body=body))
        assert self.standby.came.wait(WAIT_S)
        self.far.send(STANDBY, SERVER, ReplicaAck(1))
        assert self.primary.came.wait(WAIT_S)
        assert self.primary.message == ReplicaAck(1)
        return body

    @property
    def body(self) -> Tensor:
        assert self.standby.message is not None and self.standby.message.body is not None
        return self.standby.message.body

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.mark.parametrize(
    ("address", "apart", "shown"),
    [
        ("127.0.0.1", False, True),
        # A copy on another host gets the bytes, and so does one without a common folder, as between containers with
        # the network of one host.
        ("127.0.0.2", False, False),
        ("127.0.0.1", True, False),
    ],
)
def test_a_gradient_is_read_where_it_is_by_a_copy_on_the_same_host(
    tmp_path: Path, address: str, apart: bool, shown: bool
) -> None:
    made = Processes(tmp_path, ("127.0.0.1", address))
    try:
        assert [url.partition(":")[0] for url in made.urls] == ["tcp"]  # workers and other servers use TCP
        assert address != "127.0.0.1" or [url.partition(":")[0] for url in made.standby_urls] == ["unix", "tcp"]
        for url in made.standby_urls if apart else ():
            if url.startswith("unix:"):
                Path(url.removeprefix("unix://")).unlink()
        made.send().fill_(9)
        assert made.standby.viewable is shown
        assert bool((made.body == (9 if shown else 7)).all())
    finally:
        made.close()
