"""The code of real processes, in threads of this one: server processes, workers' transports, and what leads where.

Bits over each transport: training/test_plain_loop.py.
"""

from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from in_process_job import adam, building, job_of, reference, run_hosted, usual_loop, vectors
from transport_pairs import WAIT, Recorder

from topotrain.comm.router import Router, RouterConfig
from topotrain.comm.security.handshake import Identity
from topotrain.comm.store import open_store
from topotrain.comm.transport import TransportError
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.job import Cluster, Job
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.launch.runtime.worker_connections import WorkerConnections


@pytest.fixture
def place(tmp_path):
    """place(job, token, number): a process of the job."""
    (tmp_path / "store").mkdir(mode=0o700)
    sockets = Path(mkdtemp(prefix="tt-"))

    def made(job=None, token=bytes(32), number=1):
        job = job or Job()
        identity = Identity(job.name, token, number, 0, job.digest())
        return RouterConfig(job, layout(job.cluster), identity, open_store((tmp_path / "store").as_uri()), sockets)

    return made


def test_optimizer_state_travels_over_tcp(tmp_path):
    def script(t):
        usual_loop(vectors(3))(t)
        t.optimizer.load_state_dict(t.optimizer.state_dict())
        usual_loop(vectors(3, seed=5))(t)

    def without(t):
        usual_loop([*vectors(3), *vectors(3, seed=5)])(t)

    job, build = job_of(transport="kTcp"), building(optimizer=adam)
    assert run_hosted(job, build, script, tmp_path).same_bits(reference(job, build, without))


# --- transports --------------------------------------------------------------------------------------------------

SERVER, WORKER = Address(Role.SERVER, 0, 0), Address(Role.WORKER, 0, 0)


@pytest.mark.parametrize(("transport", "schemes"), [("kAuto", ["unix", "tcp"]), ("kShm", ["unix"]), ("kTcp", ["tcp"])])
def test_a_server_is_reached_on_the_transports_of_the_job(transport, schemes, place):
    job = Job(cluster=Cluster(transport=transport))
    router = Router(place(job), ProcessMemory())
    urls = router.attach(SERVER, Recorder())
    router.close()
    assert [url.partition(":")[0] for url in urls] == schemes


def test_a_peer_is_answered_on_the_transport_of_its_message(place):
    home, guest = Router(place(number=1), ProcessMemory()), Router(place(number=2), ProcessMemory())
    server, worker = Recorder(), Recorder()
    home.publish("server", SERVER, home.attach(SERVER, server))
    guest.attach(WORKER, worker, dial_only=True)
    guest.connect(WORKER, SERVER, "server")
    guest.send(WORKER, SERVER, m.Fetch(1))
    assert server.got.get(timeout=WAIT) == (WORKER, m.Fetch(1))
    home.send(SERVER, WORKER, m.Applied(0, 0, 0, False, 0.0))
    assert worker.got.get(timeout=WAIT)[0] == SERVER
    assert home.traffic()[0] > 0 and guest.traffic()[1] > 0
    with pytest.raises(TransportError, match=r"no connection from server 0/0 to worker 0/1"):
        home.send(SERVER, Address(Role.WORKER, 0, 1), m.Fetch(1))
    guest.close()
    home.close()


def test_a_sender_follows_the_routes_of_its_router(place):
    home, guest = Router(place(number=1), ProcessMemory()), Router(place(number=2), ProcessMemory())
    server, sender = Recorder(), guest.sender(WORKER, wait=True)
    home.publish("server", SERVER, home.attach(SERVER, server))
    guest.attach(WORKER, Recorder(), dial_only=True)
    with pytest.raises(TransportError, match=r"no connection from worker 0/0 to server 0/0"):
        sender.send(SERVER, m.Fetch(1))
    guest.connect(WORKER, SERVER, "server")
    for number in (2, 3):
        sender.send(SERVER, m.Fetch(number))
    assert [server.got.get(timeout=WAIT) for _ in range(2)] == [(WORKER, m.Fetch(2)), (WORKER, m.Fetch(3))]
    guest.close()
    home.close()


def test_a_workers_memory_lies_in_regions_over_each_transport(place):
    for transport in ("kShm", "kTcp"):
        job = Job(cluster=Cluster(transport=transport, server_worker_separate=True))
        home = Router(place(job, number=1), ProcessMemory())
        home.publish("server", SERVER, home.attach(SERVER, Recorder()))
        connections = WorkerConnections(place(job, number=0), WORKER)
        tensor = connections.allocate(100, torch.float32)
        assert connections.memory.find(tensor) is not None and not tensor.any()
        connections.close()
        home.close()
