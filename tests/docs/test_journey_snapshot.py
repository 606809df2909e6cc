"""docs/journey-snapshot.md against a traced run: one snapshot passes the functions that the page names, in order."""

from pathlib import Path
from types import FrameType

import pytest
import torch
from journey_pages import PACKAGE, Tracer, check_order, stops_in
from reports import EventList, Woken
from simulation import VIEWS, ScriptedCluster, ScriptedWorker, job

from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.events import Saved
from topotrain.core.server.consistency import SNAPSHOT
from topotrain.extensions.checkpointing.checkpoint_extension import snapshots_of
from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotFiles, SnapshotPort, SnapshotWriter
from topotrain.extensions.checkpointing.snapshot_messages import SnapshotPart, SnapshotRequest
from topotrain.extensions.resume.worker_state_messages import WorkerStatePart
from topotrain.extensions.resume.worker_state_store import EPOCH, cut

PAGE = Path(__file__).parents[2] / "docs" / "journey-snapshot.md"
WORKER = Address(Role.WORKER, 0, 0)
MOST_FILES = 13
"""Files of `extensions`, apart from the hooks in EVERY_MESSAGE."""
EVERY_MESSAGE = ("accepts", "may_send")
NOT_FOLLOWED = ("config", "comm", "tools")
"""Packages of settings and addresses, of transports, and of the simulation."""
PATIENCE_S = 120.0


class SnapshotTracer(Tracer):
    """Follows the functions of `checkpointing`, messages about the snapshot, and what both call."""

    def concerns(self, frame: FrameType, caller: bool, first: bool) -> bool:
        message = frame.f_locals.get("message", frame.f_locals.get("decision"))
        if isinstance(message, m.StepDecision):
            return message.change == SNAPSHOT
        if isinstance(message, WorkerStatePart):
            return message.number > 0
        if isinstance(message, m.Message):
            return isinstance(message, SnapshotPart | SnapshotRequest)
        package = Path(frame.f_code.co_filename).relative_to(PACKAGE).parts
        return package[0] not in NOT_FOLLOWED and (caller or package[1] == "checkpointing")


class Host:
    """The process of one server, whose writer has threads of its own."""

    def __init__(self, cluster: ScriptedCluster, me: Address, folder: Path, events: EventList) -> None:
        self._sim_server, self._ready = cluster.sim_servers[me], Woken()
        writer = SnapshotWriter(cluster.job, cluster.topology, SnapshotFiles(folder), 1, str(me), events)
        self._port: SnapshotPort = writer.attach(snapshots_of(cluster.server(me.group, me.index)), self._ready)

    def handle_replies(self) -> None:
        assert self._ready.wait(PATIENCE_S)
        self._ready.clear()
        for message in self._port.messages():
            self._sim_server.handle(self._sim_server.server.me, message)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The functions that the snapshot behind the second step passes, each with its file."""
    events = EventList()
    folder = tmp_path_factory.mktemp("snapshot") / "manifests"
    cluster = ScriptedCluster(job(groups=1, workers=1, shards=2, checkpoint_freq=2), 1, VIEWS)
    hosts = [Host(cluster, me, folder, events) for me in cluster.topology.servers(0)]
    coordinator = cluster.sim_servers[Address(Role.SERVER, 0, 0)]

    def leave_state(number: int) -> None:
        for part in cut(WORKER, number, torch.zeros(3, dtype=torch.uint8)):
            coordinator.handle(WORKER, part)

    def script(worker: ScriptedWorker) -> None:
        worker.open()
        leave_state(EPOCH)
        worker.step(worker.numbers())
        worker.sleep(0.1, 0.1)  # both servers have carried out the first step
        tracer.watching = True
        worker.step(worker.numbers())

    tracer = SnapshotTracer()
    with tracer.everywhere():
        cluster.play(script)
        for host in reversed(hosts):
            host.handle_replies()
        cluster.sim.run()
        leave_state(1)
        hosts[0].handle_replies()
    assert [event for event in events if isinstance(event, Saved)]
    return tracer.seen


def test_the_snapshot_passes_the_stops_in_the_order_of_the_page(seen: dict[str, str]) -> None:
    check_order(stops_in(PAGE.read_text(encoding="utf-8")), list(seen), PAGE)


def test_a_snapshot_enters_few_files_of_the_extensions(seen: dict[str, str]) -> None:
    own = {function: file for function, file in seen.items() if not function.endswith(EVERY_MESSAGE)}
    files = {file for file in own.values() if file.startswith("extensions/")}
    assert len(files) <= MOST_FILES, sorted(files)
